"""The step loop: the one place that knows the order of the stages.

    Phase 1 and the solve, for all steps at once; then per step: gather -> dual matmul -> decay-and-write.

The composite op runs it with the in-place write on a bank of its own; a traced call runs it with the functional write,
so that every stage of every step is a node of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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


def run_steps(bank: Tensor, staged: Staged, coupled: Coupled, write: Write) -> tuple[Tensor, Tensor, Tensor]:
    """Runs every step in order: the final bank, the readings and the retrieved rows, both [steps, P, C, D]."""
    fields = coupled.fields
    gathers = zip(*(x.unbind(0) for x in (staged.k_idx, fields.k_eff, staged.q_idx, fields.q_w)), strict=True)
    matmuls = zip(*(x.unbind(0) for x in (coupled.X, coupled.QX, staged.v, staged.beta)), strict=True)
    writes = zip(*(getattr(fields, name).unbind(0) for name in StepGroups._fields), strict=True)
    readings, retrieved_rows = [], []
    for step, (rows, (X, QX, v, beta), groups) in enumerate(zip(gathers, matmuls, writes, strict=True)):
        retrieved, inter = token_gather(bank, *rows)
        delta, reading = dual_matmul(X, QX, v, beta, retrieved, inter)
        bank = write(step, bank, delta, StepGroups(*groups))
        readings.append(reading)
        retrieved_rows.append(retrieved)
    if not readings:
        return bank, torch.empty_like(staged.v), torch.empty_like(staged.v, dtype=staged.beta.dtype)
    return bank, torch.stack(readings), torch.stack(retrieved_rows)
