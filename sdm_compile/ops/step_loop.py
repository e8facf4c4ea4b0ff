"""The step loop: the one place that knows the order of the stages.

    Phase 1 and the solve, for all steps at once; then per step: gather -> dual matmul -> decay-and-write.

The composite op runs it with the in-place write on a bank of its own; a traced call runs it with the functional write, so that
every stage of every step is a node of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .dual_matmul import dual_matmul
from .layout import ChunkFields, Staged
from .phase1 import phase1
from .solve import solve
from .token_gather import token_gather

Write = Callable[..., Tensor]
"""write(step, bank, delta, write_w, group_decay, order, group_start, group_slot) -> the bank after the step."""


class Coupled(NamedTuple):
    """What the steps need beside the staged inputs."""

    fields: ChunkFields
    X: Tensor  # [steps, P, C, C]
    QX: Tensor  # [steps, P, C, C]


def couple(staged: Staged) -> Coupled:
    fields = phase1(staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val)
    return Coupled(fields, *solve(fields.A, fields.QK, staged.beta))


def run_steps(bank: Tensor, staged: Staged, coupled: Coupled, write: Write) -> tuple[Tensor, Tensor, Tensor]:
    """Runs every step in order: the final bank, the readings and the retrieved rows, both [steps, P, C, D]."""
    fields = coupled.fields
    steps = zip(
        *(
            x.unbind(0)
            for x in (
                *(staged.k_idx, fields.k_eff, staged.q_idx, fields.q_w),
                *(coupled.X, coupled.QX, staged.v, staged.beta),
                *(fields.write_w, fields.group_decay, fields.order, fields.group_start, fields.group_slot),
            )
        ),
        strict=True,
    )
    readings, retrieved_rows = [], []
    for step, (k_idx, k_eff, q_idx, q_w, X, QX, v, beta, *groups) in enumerate(steps):
        retrieved, inter = token_gather(bank, k_idx, k_eff, q_idx, q_w)
        delta, reading = dual_matmul(X, QX, v, beta, retrieved, inter)
        bank = write(step, bank, delta, *groups)
        readings.append(reading)
        retrieved_rows.append(retrieved)
    if not readings:
        return bank, torch.empty_like(staged.v), torch.empty_like(staged.v, dtype=staged.beta.dtype)
    return bank, torch.stack(readings), torch.stack(retrieved_rows)
