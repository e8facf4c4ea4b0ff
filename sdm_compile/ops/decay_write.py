"""The decay-and-write: one step's update of the bank, one writer per row.

    bank[s] = exp(Lt_s) bank[s] + sum over the slot's writes (i, w), in token order, of write_w[i,w] delta_i

bank [num_slots, D]; delta [P, C, D]; write_w [P, C, W]; the groups of each chunk as Phase 1 made them. Each row is
rounded to the bank's dtype once. Ops: `decay_write` (functional, with a formula), its backward, and `decay_write_`, in
place, which can store each group's raw row in a snapshot on its way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import (
    accumulate_dtype,
    check_devices,
    check_dtype,
    check_float,
    check_like,
    check_rank,
    check_shape,
    check_staged_ids,
)
from .layout import StepGroups, empty, empty_gradients, wanted_gradients
from .registry import register
from .rows import group_sums, load_rows, row_dots, sorted_entries, store_rows_, weighted_rows
from .snapshot import StepRows, check_mode, check_snapshot, quantize_rows

_GROUPS = "Tensor order, Tensor group_start, Tensor group_slot"
_INPUTS = f"Tensor bank, Tensor delta, Tensor write_w, Tensor group_decay, {_GROUPS}"


def _check_decay_write(
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
) -> None:
    check_rank("bank", bank, "[num_slots, D]")
    check_float("bank", bank)
    check_rank("write_w", write_w, "[P, C, W]")
    streams, chunk, writes = write_w.shape
    check_shape("delta", delta, (streams, chunk, bank.shape[1]), "[P, C, D]")
    for name, tensor, width in (
        ("group_decay", group_decay, chunk * writes),
        ("order", order, chunk * writes),
        ("group_start", group_start, chunk * writes + 1),
        ("group_slot", group_slot, chunk * writes),
    ):
        check_shape(name, tensor, (streams, width), "[P, C * W] (group_start one longer)")
    dtype = accumulate_dtype(bank.dtype)
    for name, tensor in (("delta", delta), ("write_w", write_w), ("group_decay", group_decay)):
        check_dtype(name, tensor, dtype, f"with a {bank.dtype} bank")
    groups = {"order": order, "group_start": group_start, "group_slot": group_slot}
    for name, tensor in groups.items():
        check_staged_ids(name, tensor)
    check_devices(bank=bank, delta=delta, write_w=write_w, group_decay=group_decay, **groups)


def _check_in_place(
    bank: Tensor, snapshot: Tensor | None, scales: Tensor | None, group_slot: Tensor, mode: str
) -> None:
    check_mode("snapshot_quant", mode, bank.dtype)
    if (snapshot is None) != (scales is None):
        raise ValueError("snapshot and scales come together: one of them is None")
    if snapshot is not None and scales is not None:
        check_snapshot("snapshot", snapshot, scales, group_slot.numel(), bank, mode)
    for name, tensor in (("bank", bank), ("snapshot", snapshot), ("scales", scales)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tuple(tensor.stride())}; an in-place write needs it contiguous")
    check_devices(bank=bank, snapshot=snapshot, scales=scales)


def _empty_decay_write_output(bank: Tensor) -> Tensor:
    return empty(tuple(bank.shape), bank)


def _write_rows_(
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
) -> None:
    used = (group_slot.flatten() >= 0).nonzero()[:, 0]
    slots = group_slot.flatten()[used]
    rows = bank.index_select(0, slots).to(delta.dtype)
    rows = rows * group_decay.flatten()[used].unsqueeze(-1) + group_sums(delta, write_w, order, group_start, used)
    store_rows_(bank, slots, rows)


def _decay_write_cpu(bank: Tensor, *step: Tensor) -> Tensor:
    _check_decay_write(bank, *step)
    out = _empty_decay_write_output(bank).copy_(bank)
    _write_rows_(out, *step)
    return out


def _decay_write_cuda(bank: Tensor, *step: Tensor) -> Tensor:
    from .decay_write_kernels import decay_write_call

    _check_decay_write(bank, *step)
    out = _empty_decay_write_output(bank).copy_(bank)
    delta, *groups = (x.contiguous() for x in step)
    decay_write_call(out, None, delta, StepGroups(*groups), None).launch()
    return out


def _decay_write_fake(bank: Tensor, *step: Tensor) -> Tensor:
    _check_decay_write(bank, *step)
    return _empty_decay_write_output(bank)


def _decay_write_in_place_cpu(
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
    snapshot: Tensor | None,
    scales: Tensor | None,
    snapshot_quant: str,
) -> None:
    step = (delta, write_w, group_decay, order, group_start, group_slot)
    _check_decay_write(bank, *step)
    _check_in_place(bank, snapshot, scales, group_slot, snapshot_quant)
    if snapshot is not None and scales is not None:
        used = (group_slot.flatten() >= 0).nonzero()[:, 0]
        rows, row_scales = quantize_rows(bank.index_select(0, group_slot.flatten()[used]), snapshot_quant)
        snapshot.view(torch.uint8)[used] = rows.view(torch.uint8)
        if len(scales):
            scales[used] = row_scales
    _write_rows_(bank, *step)


def _decay_write_in_place_cuda(
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
    snapshot: Tensor | None,
    scales: Tensor | None,
    snapshot_quant: str,
) -> None:
    from .decay_write_kernels import decay_write_call

    step = (delta, write_w, group_decay, order, group_start, group_slot)
    _check_decay_write(bank, *step)
    _check_in_place(bank, snapshot, scales, group_slot, snapshot_quant)
    saving = None if snapshot is None or scales is None else StepRows(snapshot, scales, snapshot_quant)
    delta, *groups = (x.contiguous() for x in step)
    decay_write_call(bank, None, delta, StepGroups(*groups), None, saving).launch()


def _decay_write_in_place_fake(
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
    snapshot: Tensor | None,
    scales: Tensor | None,
    snapshot_quant: str,
) -> None:
    _check_decay_write(bank, delta, write_w, group_decay, order, group_start, group_slot)
    _check_in_place(bank, snapshot, scales, group_slot, snapshot_quant)


def _check_decay_write_bwd(
    dout: Tensor,
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
) -> None:
    _check_decay_write(bank, delta, write_w, group_decay, order, group_start, group_slot)
    check_like("dout", dout, "bank", bank)
    check_devices(bank=bank, dout=dout)


def _empty_decay_write_bwd_outputs(
    bank: Tensor, delta: Tensor, write_w: Tensor, group_decay: Tensor, mask: list[bool]
) -> tuple[Tensor, ...]:
    """dbank, ddelta, dwrite_w, dgroup_decay."""
    return empty_gradients((bank, delta, write_w, group_decay), mask)


def _decay_write_bwd_cpu(
    dout: Tensor,
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    _check_decay_write_bwd(dout, bank, delta, write_w, group_decay, order, group_start, group_slot)
    outs = _empty_decay_write_bwd_outputs(bank, delta, write_w, group_decay, mask)
    dbank, ddelta, dwrite_w, dgroup_decay = outs
    entry, sizes = sorted_entries(order, group_start)
    group = torch.arange(group_slot.numel()).repeat_interleave(sizes)
    idx = torch.full((write_w.numel(),), -1, dtype=torch.int32)
    idx[entry] = group_slot.flatten()[group]
    idx = idx.view(write_w.shape)
    if mask[0]:
        used = (group_slot.flatten() >= 0).nonzero()[:, 0]
        slots = group_slot.flatten()[used]
        rows = dout.index_select(0, slots).to(delta.dtype) * group_decay.flatten()[used].unsqueeze(-1)
        store_rows_(dbank.copy_(dout), slots, rows)
    if mask[1]:
        ddelta.copy_(weighted_rows(dout, idx, write_w))
    if mask[2]:
        dwrite_w.copy_(row_dots(dout, idx, delta))
    if mask[3]:
        rows, drows = (load_rows(x, group_slot, delta.dtype) for x in (bank, dout))
        torch.sum(rows * drows, -1, out=dgroup_decay)
    return outs


def _decay_write_bwd_cuda(
    dout: Tensor,
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    from .decay_write_kernels import launch_decay_write_bwd

    _check_decay_write_bwd(dout, bank, delta, write_w, group_decay, order, group_start, group_slot)
    outs = _empty_decay_write_bwd_outputs(bank, delta, write_w, group_decay, mask)
    step = (write_w, group_decay, order, group_start, group_slot)
    dout, bank, delta, *groups = (x.contiguous() for x in (dout, bank, delta, *step))
    launch_decay_write_bwd(dout, bank, delta, StepGroups(*groups), wanted_gradients(outs, mask))
    return outs


def _decay_write_bwd_fake(
    dout: Tensor,
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    _check_decay_write_bwd(dout, bank, delta, write_w, group_decay, order, group_start, group_slot)
    return _empty_decay_write_bwd_outputs(bank, delta, write_w, group_decay, mask)


decay_write_bwd_op = register(
    f"decay_write_bwd(Tensor dout, {_INPUTS}, bool[] mask) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_decay_write_bwd_cpu,
    cuda=_decay_write_bwd_cuda,
    fake=_decay_write_bwd_fake,
)


def _setup_decay_write(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _decay_write_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad[:4])
    grads = decay_write_bwd_op(dout, *ctx.saved_tensors, mask)
    return (*wanted_gradients(grads, mask), None, None, None)


decay_write_op = register(
    f"decay_write({_INPUTS}) -> Tensor",
    cpu=_decay_write_cpu,
    cuda=_decay_write_cuda,
    fake=_decay_write_fake,
    setup_context=_setup_decay_write,
    backward=_decay_write_backward,
)

decay_write_in_place_op = register(
    f"decay_write_({_INPUTS.replace('Tensor bank', 'Tensor(a!) bank')}, "
    "Tensor(b!)? snapshot, Tensor(c!)? scales, str snapshot_quant) -> ()",
    cpu=_decay_write_in_place_cpu,
    cuda=_decay_write_in_place_cuda,
    fake=_decay_write_in_place_fake,
)


def decay_write(
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
) -> Tensor:
    """The bank after one step. Equivalent code, for group o of slot s: `decay[o] * bank[s] + w @ delta`.

    Args:
        bank: [num_slots, D] bfloat16 or float32 (float64 on the CPU).
        delta: [P, C, D] from the dual matmul. write_w: [P, C, W]. Accumulate dtype.
        group_decay, order, group_start, group_slot: [P, E] ([P, E + 1] for group_start), the step's `ChunkFields`;
            the last three are int32.
    Returns:
        [num_slots, D], fresh memory.
    Raises:
        ValueError: shapes or dtypes disagree.
    Note: differentiable in the first four; each row is rounded once; SPEC section 2.
    """
    return decay_write_op(bank, delta, write_w, group_decay, order, group_start, group_slot)


def decay_write_(
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
    snapshot: Tensor | None = None,
    scales: Tensor | None = None,
    snapshot_quant: str = "none",
) -> None:
    """`decay_write` in place, storing every group's raw row first where a snapshot is given.

    Args:
        bank to group_slot: as in `decay_write`; the bank is contiguous.
        snapshot, scales: [P * E, *] and [P * E] or [0], in the mode's form; row p * E + o is group o of chunk p.
        snapshot_quant: the mode, see `snapshot`.
    Raises:
        ValueError: shapes, dtypes or strides do not fit; nothing has been written then.
    Note: mutates bank, snapshot and scales; no gradient; SPEC sections 2 and 4.
    """
    decay_write_in_place_op(
        bank, delta, write_w, group_decay, order, group_start, group_slot, snapshot, scales, snapshot_quant
    )
