"""The write/read's backward on the CPU: steps in reverse, on a bank walked back from the snapshot (SPEC section 3).

`dM` is the gradient of the bank after the step at hand; per step it becomes the gradient of the bank before it. The
matrices of all steps are then differentiated at once, through Phase 1 and the staging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Staged, WriteGroups
from .phase1 import phase1_bwd_op, write_groups_cpu
from .rows import add_rows_, group_sums, row_dots, store_rows_, weighted_rows
from .saved import Saved
from .snapshot import dequantize_rows
from .staging import stage_inputs_bwd_op, unstage_readings_bwd_op


class _StepGradients(NamedTuple):
    du: Tensor  # [P, C, D]
    dk_eff: Tensor  # [P, C, W]
    dq_w: Tensor  # [P, C, R]
    dwrite_w: Tensor  # [P, C, W]
    dgroup_decay: Tensor  # [P, E]


def _step_backward(
    step: int,
    dM: Tensor,
    bank: Tensor,
    dy: Tensor,
    delta: Tensor,
    staged: Staged,
    groups: WriteGroups,
    saved: Saved,
    mode: str,
) -> _StepGradients:
    """One step: `dM` and `bank`, both after it, become their values before it, in place."""
    k_idx, q_idx, beta = staged.k_idx[step], staged.q_idx[step], staged.beta[step]
    X, QX, k_eff, q_w, write_w = (x[step] for x in (saved.X, saved.QX, saved.k_eff, saved.q_w, saved.write_w))
    order, group_start, group_slot = (x[step] for x in groups)
    decay = saved.group_decay[step].flatten()
    used = (group_slot.flatten() >= 0).nonzero()[:, 0]
    slots = group_slot.flatten()[used]

    du = QX.mT @ dy + X.mT @ weighted_rows(dM, k_idx, write_w)
    dretrieved = -beta * du
    dwrite_w = row_dots(dM, k_idx, delta)

    # The write side: the rows as they were before the step, and their gradient through decay and retrieval.
    row = used + step * group_slot.numel()
    scales = saved.scales[row] if len(saved.scales) else saved.scales
    payload = saved.snapshot.view(torch.uint8)[row].view(saved.snapshot.dtype)
    rows = dequantize_rows(payload, scales, mode, bank.shape[1], bank.dtype)
    store_rows_(bank, slots, rows)
    drows = dM.index_select(0, slots).to(dy.dtype)
    dgroup_decay = torch.zeros_like(decay)
    dgroup_decay[used] = (rows.to(dy.dtype) * drows).sum(-1)
    drows = drows * decay[used].unsqueeze(-1) + group_sums(dretrieved, k_eff, order, group_start, used)
    store_rows_(dM, slots, drows)

    # The read side.
    add_rows_(dM, q_idx, q_w, dy)
    return _StepGradients(
        du,
        row_dots(bank, k_idx, dretrieved),
        row_dots(bank, q_idx, dy),
        dwrite_w,
        dgroup_decay.view_as(group_slot),
    )


def write_read_backward_cpu(
    dreadings: Tensor | None,
    dM: Tensor,
    final_memory: Tensor,
    inputs: Sequence[Tensor],
    staged: Staged,
    saved: Saved,
    chunk_size: int,
    mode: str,
) -> tuple[Tensor, ...]:
    """Gradients of k_val, v, beta, g and q_val, in each one's own dtype.

    Args:
        dreadings: [P, T, D] or None for zeros. dM: [num_slots, D] the final bank's gradient, in the dtype that it
            accumulates in; becomes that of the bank before the call, in place.
        final_memory: the bank that the forward returned. inputs: k_idx to q_val as the forward took them.
        staged: the same inputs, staged. saved: what the forward kept, rows in `mode`.
    """
    bank = final_memory.clone(memory_format=torch.contiguous_format)
    dy = torch.zeros_like(saved.retrieved)
    if dreadings is not None:
        dy.copy_(unstage_readings_bwd_op(dreadings, chunk_size))
    error = staged.v - saved.retrieved
    delta = saved.X @ (staged.beta * error)

    groups = write_groups_cpu(staged.k_idx)
    steps = [
        _step_backward(step, dM, bank, dy[step], delta[step], staged, groups, saved, mode)
        for step in reversed(range(saved.X.shape[0]))
    ]
    if not steps:
        return tuple(torch.zeros_like(inputs[i]) for i in (1, 2, 3, 4, 6))
    du, dk_eff, dq_w, dwrite_w, dgroup_decay = (torch.stack(x[::-1]) for x in zip(*steps, strict=True))

    dB = -(du @ delta.mT).tril_(-1)
    dbeta = (error * du).sum(-1, keepdim=True) + (saved.A * dB).sum(-1, keepdim=True)
    dQK = (dy @ delta.mT).tril_()
    dk_val, dg, dq_val = phase1_bwd_op(
        *(dk_eff, dq_w, dwrite_w, staged.beta * dB, dQK, dgroup_decay),
        *(staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val),
    )
    return tuple(stage_inputs_bwd_op(dk_val, staged.beta * du, dbeta, dg, dq_val, *inputs))
