"""The write/read's training on CUDA: the forward that saves what its backward needs, and that backward.

The forward is one slab of all steps, whose fields are the saved tensors themselves. The backward runs the steps in
reverse, in place on the bank's gradient and on a bank that is walked back from the snapshot's rows; what needs no bank
runs for all steps at once, before and after (SPEC section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .bound import each_step
from .decay_write_kernels import decay_write_call
from .dual_matmul_kernels import (
    lower_matmul_call,
    outer_product_call,
    transposed_lower_matmul_call,
    values_backward_call,
)
from .layout import ChunkFields, Staged, StepGroups, empty, empty_staged
from .phase1 import phase1_bwd_op
from .phase1_kernels import NO_ENTRY, empty_phase1_scratch, launch_phase1, sort_by_slot
from .repeats import repeat_count
from .snapshot import StepRows
from .solve_kernels import beta_backward_call, launch_solve
from .staging import stage_inputs_bwd_op
from .staging_kernels import launch_stage_inputs, launch_unstage_readings_bwd
from .step_bwd_kernels import (
    Banks,
    GradientGatherConfig,
    SlotEntries,
    SlotRowsConfig,
    gradient_gather_call,
    read_side_call,
    sum_parts_call,
    write_side_call,
)
from .step_loop import run_in_order
from .token_gather_kernels import token_gather_call
from .write_read_bwd import Saved


def _stage(bank: Tensor, inputs: Sequence[Tensor], steps: int, chunk: int, count_repeats: bool) -> Staged:
    k_idx, _, _, _, g, q_idx, _ = inputs
    lead = (steps, k_idx.shape[0], chunk)
    sizes = (k_idx.shape[2], q_idx.shape[2], g.shape[2], bank.shape[1])
    staged = empty_staged(lead, *sizes, bank, bank.dtype, torch.float32)
    repeats = repeat_count(bank.device) if count_repeats else None
    launch_stage_inputs(inputs, staged, empty(lead, bank, torch.int8), repeats, bank.shape[0])
    return staged


def _rows_of_steps(saved: Saved) -> tuple[Tensor, Tensor]:
    """The snapshot's rows and scales, step by step."""
    steps = saved.k_eff.shape[0]
    rows, width = saved.snapshot.shape
    return saved.snapshot.view(steps, rows // steps, width), saved.scales.view(steps, len(saved.scales) // steps)


def _first_ordinals(fields: ChunkFields) -> Tensor:
    """[steps, P, C, W] int32: the group's ordinal at its first entry, -1 at every other entry."""
    steps, streams, entries = fields.order.shape
    starts = fields.group_start[..., :-1].clamp(max=entries - 1).long()
    used = fields.group_slot >= 0
    place = torch.where(used, fields.order.gather(-1, starts), entries).long()
    ordinals = torch.arange(entries, dtype=torch.int32, device=place.device).expand(place.shape)
    found = torch.full((steps, streams, entries + 1), -1, dtype=torch.int32, device=place.device)
    return found.scatter_(-1, place, torch.where(used, ordinals, -1))[..., :-1].reshape(fields.k_eff.shape).contiguous()


class _SavingStages:
    """The stages of a saving forward's steps."""

    def __init__(
        self,
        bank: Tensor,
        staged: Staged,
        fields: ChunkFields,
        leads: Sequence[Tensor],
        saved: Saved,
        inter: Tensor,
        mode: str,
        writer: str | None,
    ) -> None:
        steps = staged.k_idx.shape[0]
        payload, scales = _rows_of_steps(saved)
        delta = torch.empty_like(inter[0])
        ordinals = _first_ordinals(fields) if writer == "gather" else None

        def gather(step: int):  # type: ignore[no-untyped-def]
            sides = (staged.k_idx[step], fields.k_eff[step], staged.q_idx[step], fields.q_w[step])
            saving = None if ordinals is None else (ordinals[step], payload[step])
            return token_gather_call(bank, None, *sides, None, saved.retrieved[step], inter[step], saving)

        def dual_matmul(step: int):  # type: ignore[no-untyped-def]
            residual = (staged.v[step], staged.beta[step])
            return lower_matmul_call(saved.X[step], saved.retrieved[step], delta, bank.dtype, residual)

        def write(step: int):  # type: ignore[no-untyped-def]
            groups = StepGroups(*(getattr(fields, name)[step] for name in StepGroups._fields))
            saving = StepRows(payload[step], scales[step], mode) if writer == "write" else None
            return decay_write_call(bank, None, delta, groups, [x[step] for x in leads], saving)

        self.gather, self.dual_matmul, self.write = (each_step(call, steps) for call in (gather, dual_matmul, write))


def save_cuda(
    bank: Tensor, inputs: Sequence[Tensor], readings: Tensor, saved: Saved, mode: str, writer: str, count_repeats: bool
) -> None:
    """Advances `bank` over all steps; fills `readings` [P, T, D] and `saved`, unflattened, all contiguous.

    writer: the stage that stores the snapshot's rows, "write" or "gather".
    """
    steps, streams, chunk, writes = saved.k_eff.shape
    for rows in (saved.snapshot, saved.scales):
        rows.view(torch.uint8).zero_()  # rows of unused groups are outputs too, and every output is reproducible
    if not steps or not streams:
        return
    staged = _stage(bank, inputs, steps, chunk, count_repeats)
    kept = {name: getattr(saved, name) for name in ChunkFields._fields if name in Saved._fields}
    fields = ChunkFields(QK=torch.empty_like(saved.A), **kept)
    scratch = empty_phase1_scratch(steps * streams, chunk * writes, bank)
    launch_phase1(staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val, fields, scratch)
    launch_solve(fields.A, fields.QK, staged.beta, saved.X, saved.QX)
    leads = [x.view(steps, streams, -1) for x in (scratch.lead_value, scratch.lead_index)]
    inter = torch.empty_like(saved.retrieved)
    run_in_order(_SavingStages(bank, staged, fields, leads, saved, inter, mode, writer), steps)
    lower_matmul_call(
        saved.QX.flatten(0, 1),
        saved.retrieved.flatten(0, 1),
        readings,
        bank.dtype,
        residual=(staged.v.flatten(0, 1), staged.beta.flatten(0, 1)),
        plus=inter.flatten(0, 1),
        unstage=(0, streams),
    ).launch()


class _Groups(NamedTuple):
    """A call's reads grouped by slot, as `ChunkFields` groups the writes."""

    order: Tensor  # [steps, P, E] int32
    start: Tensor  # [steps, P, E + 1] int32
    slot: Tensor  # [steps, P, E] int32


def _group_reads(q_idx: Tensor) -> _Groups:
    steps, streams, chunk, reads = q_idx.shape
    chunks, entries = steps * streams, chunk * reads
    keys, merged = (torch.empty(chunks, entries, dtype=torch.int64, device=q_idx.device) for _ in range(2))
    keys = sort_by_slot(q_idx.view(chunks, entries), keys, merged, reads)
    held, slots = keys != NO_ENTRY.value, keys >> 32
    before = torch.cat([slots.new_full((chunks, 1), -1), slots[:, :-1]], 1)
    first = held & (slots != before)
    # Everything that starts no group goes to a place behind the last one.
    ordinal = torch.where(first, first.cumsum(1) - 1, entries + 1)
    places = torch.arange(entries, dtype=torch.int32, device=q_idx.device).expand(chunks, entries)
    start = held.sum(1, keepdim=True, dtype=torch.int32).repeat(1, entries + 2).scatter_(1, ordinal, places)
    slot = torch.full((chunks, entries + 2), -1, dtype=torch.int32, device=q_idx.device)
    slot.scatter_(1, ordinal, slots.int())
    order = torch.where(held, keys & 0xFFFFFFFF, -1).int()
    fields = (order, start[:, : entries + 1], slot[:, :entries])
    return _Groups(*(x.contiguous().view(steps, streams, -1) for x in fields))


def _summed(parts: Tensor) -> Tensor:
    """[n, parts, N] to [n, N], in the order of the parts."""
    if parts.shape[1] == 1:
        return parts[:, 0]
    out = parts.new_empty((parts.shape[0], parts.shape[2]))
    sum_parts_call(parts, out).launch()
    return out


def backward_cuda(
    dreadings: Tensor | None, dM: Tensor, final_memory: Tensor, inputs: Sequence[Tensor], saved: Saved, mode: str
) -> tuple[Tensor, ...]:
    """Gradients of k_val, v, beta, g and q_val; `dM`, the final bank's, becomes that of the bank before, in place.

    saved: what `save_cuda` filled, unflattened and contiguous.
    """
    steps, streams, chunk, writes = saved.k_eff.shape
    reads, width, dtype = saved.q_w.shape[3], final_memory.shape[1], final_memory.dtype
    if not steps or not streams:
        return tuple(torch.zeros_like(inputs[i]) for i in (1, 2, 3, 4, 6))
    bank = final_memory.clone(memory_format=torch.contiguous_format)
    staged = _stage(bank, inputs, steps, chunk, count_repeats=False)
    groups = _group_reads(staged.q_idx)
    dy = torch.zeros_like(saved.retrieved)
    if dreadings is not None:
        launch_unstage_readings_bwd(dreadings, dy)
    X, QX, retrieved, v, beta, dy_flat = (
        x.flatten(0, 1) for x in (saved.X, saved.QX, saved.retrieved, staged.v, staged.beta, dy)
    )
    delta, du = torch.empty_like(saved.retrieved), torch.empty_like(saved.retrieved)
    delta_flat, du_flat = delta.flatten(0, 1), du.flatten(0, 1)
    lower_matmul_call(X, retrieved, delta_flat, dtype, (v, beta), many=True).launch()
    transposed_lower_matmul_call(QX, dy_flat, du_flat, dtype, many=True).launch()

    gather_parts = GradientGatherConfig.from_shapes(writes, width).parts(width)
    row_parts = SlotRowsConfig.from_shapes(chunk, width).parts(width)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=bank.device)

    dwrite_parts = floats(steps, streams, chunk, gather_parts, writes)
    ddecay_parts, dk_eff_parts = (floats(steps, streams, row_parts, chunk * writes) for _ in range(2))
    dq_w_parts = floats(steps, streams, row_parts, chunk * reads)
    gathered, dretrieved = torch.empty_like(dy[0]), torch.empty_like(dy[0])
    banks = Banks(dM, bank)
    payload, scales = _rows_of_steps(saved)

    calls = (
        lambda s: gradient_gather_call(
            banks, staged.k_idx[s], saved.write_w[s], delta[s], gathered, dwrite_parts[s]
        ),
        lambda s: transposed_lower_matmul_call(saved.X[s], gathered, du[s], dtype, plus=du[s]),
        lambda s: values_backward_call(
            du[s], staged.v[s], staged.beta[s], saved.retrieved[s], dretrieved=dretrieved
        ),
        lambda s: write_side_call(
            banks,
            SlotEntries(staged.k_idx[s], saved.k_eff[s], saved.order[s], saved.group_start[s], saved.group_slot[s]),
            dretrieved,
            StepRows(payload[s], scales[s], mode),
            saved.group_decay[s],
            ddecay_parts[s],
            dk_eff_parts[s],
        ),
        lambda s: read_side_call(
            banks, SlotEntries(staged.q_idx[s], saved.q_w[s], *(x[s] for x in groups)), dy[s], dq_w_parts[s]
        ),
    )
    launches = [each_step(call, steps) for call in calls]
    for step in reversed(range(steps)):
        for launch in launches:
            launch(step)

    dwrite_w = _summed(dwrite_parts.flatten(0, 2)).view_as(saved.write_w)
    dgroup_decay = _summed(ddecay_parts.flatten(0, 1)).view_as(saved.group_decay)
    dk_eff = _summed(dk_eff_parts.flatten(0, 1)).view_as(saved.k_eff)
    dq_w = _summed(dq_w_parts.flatten(0, 1)).view_as(saved.q_w)
    dB, dQK = torch.empty_like(saved.A), torch.empty_like(saved.A)
    outer_product_call(du_flat, delta_flat, dB.flatten(0, 1), dtype, tril=-1, negative=True).launch()
    outer_product_call(dy_flat, delta_flat, dQK.flatten(0, 1), dtype, tril=0).launch()
    dv, dA, of_values, dbeta = (torch.empty_like(x) for x in (du, dB, staged.beta, staged.beta))
    values_backward_call(du_flat, v, beta, retrieved, dv.flatten(0, 1), of_values.flatten(0, 1)).launch()
    beta_backward_call(dB, saved.A, staged.beta, dA, dbeta, plus=of_values).launch()
    dk_val, dg, dq_val = phase1_bwd_op(
        *(dk_eff, dq_w, dwrite_w, dA, dQK, dgroup_decay),
        *(staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val),
    )
    return tuple(stage_inputs_bwd_op(dk_val, dv, dbeta, dg, dq_val, *inputs))
