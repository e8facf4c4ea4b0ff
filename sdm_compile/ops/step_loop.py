"""The step loop: the order of the stages.

    Phase 1 and the solve, for all steps at once; then per step: gather -> dual matmul -> decay-and-write.

The composite op runs it with the in-place write on a bank of its own; a traced call runs it with the functional write,
so that every stage of every step is a node of the graph. On CUDA most of the composite op's forwards have all steps in
one launch instead, see `step_flow_kernels`: the one other place that knows the order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .dual_matmul import dual_matmul
from .layout import ChunkFields, Staged, StepGroups
from .phase1 import phase1
from .solve import solve
from .token_gather import token_gather

Write = Callable[[int, Tensor, Tensor, StepGroups], Tensor]
"""write(step, bank, delta, groups) -> the bank after the step."""


class Coupled(NamedTuple):
    """What the steps need beside the staged inputs."""

    fields: ChunkFields
    X: Tensor  # [steps, P, C, C]
    QX: Tensor  # [steps, P, C, C]


def couple(staged: Staged) -> Coupled:
    """Phase 1 and the solve of every chunk."""
    fields = phase1(staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val)
    return Coupled(fields, *solve(fields.A, fields.QK, staged.beta))


class Stages(Protocol):
    """The stages of a step, each working on what the ones before it left."""

    @property
    def gather(self) -> Callable[[int], None]: ...

    @property
    def dual_matmul(self) -> Callable[[int], None]: ...

    @property
    def write(self) -> Callable[[int], None]: ...


def run_in_order(stages: Stages, steps: int) -> None:
    """The step loop itself, whatever its stages are: registered ops, or kernel launches."""
    for step in range(steps):
        stages.gather(step)
        stages.dual_matmul(step)
        stages.write(step)


class _OpStages:
    """The stages as registered ops."""

    def __init__(self, bank: Tensor, staged: Staged, coupled: Coupled, write: Write) -> None:
        fields = coupled.fields
        self.bank, self._write = bank, write
        self._rows = _by_step(staged.k_idx, fields.k_eff, staged.q_idx, fields.q_w)
        self._matrices = _by_step(coupled.X, coupled.QX, staged.v, staged.beta)
        self._groups = _by_step(*(getattr(fields, name) for name in StepGroups._fields))
        self.retrieved: list[Tensor] = []
        self.readings: list[Tensor] = []

    def gather(self, step: int) -> None:
        retrieved, self._inter = token_gather(self.bank, *self._rows[step])
        self.retrieved.append(retrieved)

    def dual_matmul(self, step: int) -> None:
        X, QX, v, beta = self._matrices[step]
        self._delta, reading = dual_matmul(X, QX, v, beta, self.retrieved[step], self._inter)
        self.readings.append(reading)

    def write(self, step: int) -> None:
        self.bank = self._write(step, self.bank, self._delta, StepGroups(*self._groups[step]))


def _by_step(*fields: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(field.unbind(0) for field in fields), strict=True))


def run_steps(bank: Tensor, staged: Staged, coupled: Coupled, write: Write) -> tuple[Tensor, Tensor, Tensor]:
    """Runs every step over the registered ops: the final bank, the readings and the retrieved rows [steps, P, C, D]."""
    stages = _OpStages(bank, staged, coupled, write)
    run_in_order(stages, staged.k_idx.shape[0])
    if not stages.readings:
        return bank, torch.empty_like(staged.v), torch.empty_like(staged.v, dtype=staged.beta.dtype)
    return stages.bank, torch.stack(stages.readings), torch.stack(stages.retrieved)
