"""Triton kernels of the decay-and-write. A row is decay * row, and then plus weight * delta for each write in order.

decay-and-write   one program updates G groups' rows, BD columns of each
entry slots       one program gives the writes of G groups their slots
backward          one program makes the gradients of G groups' rows, BD columns of each, and the parts of the
                  decays'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall, eviction_hint
from .layout import StepGroups
from .snapshot import SCALED_MODES, Announcement, StepRows
from .snapshot_tiles import addressable, convert, magnitude, row_scale, store_quantized
from .step_bwd_kernels import Banks, GradientGatherConfig, gradient_gather_call, sum_parts_call
from .step_table import from_table


@triton.jit
def write_delta(row, weight, delta):
    """row [N, BD] plus weight [N] times delta [N or 1, BD], each of them rounded once."""
    return tl.fma(tl.broadcast_to(weight[:, None], row.shape), tl.broadcast_to(delta, row.shape), row)


@triton.jit
def write_more(row, more, weight, p_delta, m_d):
    """`write_delta` for the rows of which there is more: adding nothing would turn -0.0 into 0.0."""
    delta = tl.load(p_delta, mask=more[:, None] & m_d[None, :], other=0.0)
    return tl.where(more[:, None], write_delta(row, weight, delta), row)


@triton.jit
def _load_rows(p_bank, slot, used, start, D, BD: tl.constexpr, EVICT: tl.constexpr):
    """Columns from `start` on of the bank's rows `slot` [N]: [N, BD], as the bank has them."""
    o_d = start + tl.arange(0, BD)
    at = slot.to(tl.int64)[:, None] * D + o_d[None, :]
    return tl.load(p_bank + at, mask=used[:, None] & (o_d < D)[None, :], other=0.0, eviction_policy=EVICT)


@triton.jit
def _write_groups(raw, column, groups, pointers, D, W: tl.constexpr, EVICT: tl.constexpr):
    """Columns from `column` on of the groups' rows, [N, BD] `raw`, decayed and written; weight and token are those of
    each group's first write. The pointers are those of the chunk, but for the bank's."""
    slot, used, start, end, decay, weight, token = groups
    p_bank, p_delta, p_write_w, p_order = pointers
    o_d = column + tl.arange(0, raw.shape[1])
    m_d = o_d < D
    m_row = used[:, None] & m_d[None, :]
    delta = tl.load(p_delta + token[:, None] * D + o_d[None, :], mask=m_row, other=0.0)
    row = write_delta(raw.to(tl.float32) * decay[:, None], weight, delta)
    longest = tl.max(tl.where(used, end - start, 0), axis=0)
    for n in range(1, longest):
        more = used & (start + n < end)
        entry = tl.load(p_order + start + n, mask=more, other=0)
        weight = tl.load(p_write_w + entry, mask=more, other=0.0)
        row = write_more(row, more, weight, p_delta + (entry // W)[:, None] * D + o_d[None, :], m_d)
    p_row = p_bank + slot.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_row, row.to(p_bank.dtype.element_ty), mask=m_row, eviction_policy=EVICT)


@triton.jit
def _decay_write_kernel(
    p_bank,
    p_table,
    p_delta,
    p_write_w,
    p_group_decay,
    p_order,
    p_group_start,
    p_group_slot,
    p_first_weight,
    p_first_token,
    p_payload,
    p_scales,
    num_slots,
    D,
    DP,
    C: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    BD: tl.constexpr,
    TABLE: tl.constexpr,
    FIRST: tl.constexpr,
    EVICT: tl.constexpr,
    MODE: tl.constexpr,
    TOP: tl.constexpr,
):
    """TABLE: the addresses of the bank, the payload and the scales stand in p_table. FIRST: each group's first weight
    and token stand beside its ordinal, so that most rows need no second look-up before their delta. MODE: the form that
    raw rows are saved in, None for not at all; DP: the saved columns; TOP: the mode's largest code, None without
    scales. A scale needs the whole row as it was, so that one program then goes through all columns."""
    if TABLE:
        p_bank = from_table(p_bank, p_table, 0)
        if MODE is not None:
            p_payload = from_table(p_payload, p_table, 1)
        if TOP is not None:
            p_scales = from_table(p_scales, p_table, 2)
    entries: tl.constexpr = C * W
    # The gather came to the last stream last, so that its rows are what the cache still holds. Measured on an H200, ms
    # per call with 8 streams of 1024 columns: 11.55 against 12.05.
    p = (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    o_g = tl.program_id(0) * G + tl.arange(0, G)
    m_g = o_g < entries
    column = tl.program_id(1) * BD
    slot = tl.load(p_group_slot + p * entries + o_g, mask=m_g, other=-1)
    start = tl.load(p_group_start + p * (entries + 1) + o_g, mask=m_g, other=0)
    end = tl.load(p_group_start + p * (entries + 1) + o_g + 1, mask=m_g, other=0)
    decay = tl.load(p_group_decay + p * entries + o_g, mask=m_g, other=0.0)
    used = m_g & (slot >= 0) & (slot < num_slots)
    if FIRST:
        weight = tl.load(p_first_weight + p * entries + o_g, mask=used, other=0.0)
        token = tl.load(p_first_token + p * entries + o_g, mask=used, other=0)
    else:
        entry = tl.load(p_order + p * entries + start, mask=used, other=0)
        weight = tl.load(p_write_w + p * entries + entry, mask=used, other=0.0)
        token = entry // W
    groups = (slot, used, start, end, decay, weight, token)
    pointers = (p_bank, p_delta + p * C * D, p_write_w + p * entries, p_order + p * entries)
    raw = _load_rows(p_bank, slot, used, column, D, BD, EVICT)
    rows = p * entries + o_g
    scale = None
    if TOP is not None:
        largest = magnitude(convert(raw, tl.float32))
        for other in range(BD, D, BD):
            more = _load_rows(p_bank, slot, used, other, D, BD, EVICT)
            largest = tl.maximum(largest, magnitude(convert(more, tl.float32)))
        scale = row_scale(largest, TOP)
        tl.store(p_scales + rows, scale, mask=used)
    if MODE is not None:
        store_quantized(p_payload, rows, used, column, raw, scale, D, DP, MODE)
    _write_groups(raw, column, groups, pointers, D, W, EVICT)
    if TOP is not None:
        for other in range(BD, D, BD):
            raw = _load_rows(p_bank, slot, used, other, D, BD, EVICT)
            store_quantized(p_payload, rows, used, other, raw, scale, D, DP, MODE)
            _write_groups(raw, other, groups, pointers, D, W, EVICT)


@triton.jit
def _entry_slots_kernel(p_order, p_group_start, p_group_slot, p_slots, ENTRIES: tl.constexpr, G: tl.constexpr):
    """p_slots: by entry, the slot of its group; stays where there is none."""
    p = tl.program_id(1).to(tl.int64)
    o_g = tl.program_id(0) * G + tl.arange(0, G)
    m_g = o_g < ENTRIES
    slot = tl.load(p_group_slot + p * ENTRIES + o_g, mask=m_g, other=-1)
    start = tl.load(p_group_start + p * (ENTRIES + 1) + o_g, mask=m_g, other=0)
    end = tl.load(p_group_start + p * (ENTRIES + 1) + o_g + 1, mask=m_g, other=0)
    length = tl.where(slot >= 0, end - start, 0)
    for n in range(0, tl.max(length, axis=0)):
        entry = tl.load(p_order + p * ENTRIES + start + n, mask=n < length, other=0)
        tl.store(p_slots + p * ENTRIES + entry, slot, mask=n < length)


@triton.jit
def _decay_write_bwd_kernel(
    p_dout,
    p_bank,
    p_group_decay,
    p_group_slot,
    p_dbank,
    p_ddecay,
    num_slots,
    D,
    ENTRIES: tl.constexpr,
    G: tl.constexpr,
    BD: tl.constexpr,
):
    """Fills the groups' rows of p_dbank, and p_ddecay [P, parts, E]; None for what is not wanted."""
    p = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    o_g = tl.program_id(0) * G + tl.arange(0, G)
    m_g = o_g < ENTRIES
    slot = tl.load(p_group_slot + p * ENTRIES + o_g, mask=m_g, other=-1)
    used = (slot >= 0) & (slot < num_slots)
    o_d = part * BD + tl.arange(0, BD)
    m_row = used[:, None] & (o_d < D)[None, :]
    at = slot.to(tl.int64)[:, None] * D + o_d[None, :]
    drow = tl.load(p_dout + at, mask=m_row, other=0.0).to(tl.float32)
    if p_dbank is not None:
        decay = tl.load(p_group_decay + p * ENTRIES + o_g, mask=used, other=0.0)
        tl.store(p_dbank + at, (drow * decay[:, None]).to(p_dbank.dtype.element_ty), mask=m_row)
    if p_ddecay is not None:
        row = tl.load(p_bank + at, mask=m_row, other=0.0).to(tl.float32)
        tl.store(p_ddecay + (p * tl.num_programs(1) + part) * ENTRIES + o_g, tl.sum(row * drow, axis=1), mask=m_g)


@dataclass(frozen=True)
class DecayWriteConfig:
    groups: int
    columns: int
    warps: int

    @staticmethod
    def from_shapes(chunk: int, head_dim: int) -> DecayWriteConfig:
        # Measured on an H200, us per whole step with 1024 columns: one group per program, 25.1 with one warp and 25.4
        # with two at a chunk of 64, 508 and 500 at 256; 27 and 589 with four groups of 256 columns. With 64 columns: 32
        # groups and four warps 17.2, 16 and two 17.4, 16 and one 19.5.
        columns = min(1024, max(2, triton.next_power_of_2(head_dim)))  # int4 packs two
        if head_dim % columns and head_dim > 256:
            columns = 256
        if columns <= 128:
            return DecayWriteConfig(groups=2048 // columns, columns=columns, warps=4)
        return DecayWriteConfig(groups=1024 // columns, columns=columns, warps=1 if chunk <= 64 else 2)


def decay_write_call(
    bank: Tensor,
    table: Tensor | None,
    delta: Tensor,
    groups: StepGroups,
    first: Sequence[Tensor] | None,
    saving: StepRows | None = None,
    config: DecayWriteConfig | None = None,
) -> KernelCall:
    """One step, in place on a contiguous bank, from contiguous [P, *] inputs.

    `first`: (weight, token) of each group's first write [P, E]. With `saving`, each group's raw row is stored there
    first. With a `table` the kernel takes the addresses of the bank, the payload and the scales from its entries 0, 1
    and 2, and from these tensors the dtypes and shapes alone. The config reaches no bit.
    """
    streams, chunk, writes = groups.write_w.shape
    num_slots, width = bank.shape
    config = config or DecayWriteConfig.from_shapes(chunk, width)
    first_weight, first_token = first or (groups.write_w, groups.order)
    payload, scales, mode = saving or (bank, bank, None)
    top = SCALED_MODES.get(mode) if mode else None
    columns = 1 if top else triton.cdiv(width, config.columns)
    # The groups, up to 65536, along the one dimension of a grid that takes as many.
    grid = (triton.cdiv(chunk * writes, config.groups), columns, streams)
    tensors = (
        *(bank, bank if table is None else table, delta, groups.write_w, groups.group_decay),
        *(groups.order, groups.group_start, groups.group_slot, first_weight, first_token),
        *(addressable(payload), scales),
    )
    options = dict(
        C=chunk,
        W=writes,
        G=config.groups,
        BD=config.columns,
        TABLE=table is not None,
        FIRST=first is not None,
        EVICT=eviction_hint(bank, streams * chunk * writes * 2),
        MODE=mode,
        TOP=top,
        num_warps=config.warps,
        enable_fp_fusion=False,
    )
    return KernelCall(_decay_write_kernel, grid, (*tensors, num_slots, width, payload.shape[1]), options)


def announce(saving: StepRows | None, layout: int) -> Announcement:
    """What the write stage of a call, built for a layout and given `saving`, says of itself: see `agreed_writer`."""
    return Announcement(layout, saving is not None)


def entry_slots_call(groups: StepGroups, slots: Tensor) -> KernelCall:
    """slots [P, C, W] int32 receives the slot of every write that has one. Contiguous."""
    streams, entries = groups.order.shape
    block = 128
    options = dict(ENTRIES=entries, G=block, num_warps=1, enable_fp_fusion=False)
    tensors = (groups.order, groups.group_start, groups.group_slot, slots)
    return KernelCall(_entry_slots_kernel, (triton.cdiv(entries, block), streams), tensors, options)


def row_gradients_call(
    dout: Tensor,
    bank: Tensor,
    groups: StepGroups,
    dbank: Tensor | None,
    ddecay: Tensor | None,
) -> KernelCall:
    """The groups' rows of dbank = decay dout, rounded once, and the parts of <bank row, dout row>, zero without a slot.

    Args:
        dout, bank: [num_slots, D]. dbank: receives the rows, and stays elsewhere. Contiguous.
        ddecay: receives [P, parts, E] float32, one part for every `DecayWriteConfig.columns` of D.
    """
    streams, chunk, writes = groups.write_w.shape
    num_slots, width = bank.shape
    config = DecayWriteConfig.from_shapes(chunk, width)
    options = dict(
        ENTRIES=chunk * writes, G=config.groups, BD=config.columns, num_warps=config.warps, enable_fp_fusion=False
    )
    grid = (triton.cdiv(chunk * writes, config.groups), triton.cdiv(width, config.columns), streams)
    tensors = (dout, bank, groups.group_decay, groups.group_slot, dbank, ddecay)
    return KernelCall(_decay_write_bwd_kernel, grid, (*tensors, num_slots, width), options)


def launch_decay_write_bwd(
    dout: Tensor, bank: Tensor, delta: Tensor, groups: StepGroups, grads: Sequence[Tensor | None]
) -> None:
    """Fills one step's gradients of the bank, delta, write_w and group_decay, or None where one is not wanted.

    All contiguous. A group of a row beyond the bank, as one without a slot, takes and gives nothing.
    """
    dbank, ddelta, dwrite_w, dgroup_decay = grads
    streams, chunk, writes = groups.write_w.shape
    width = bank.shape[1]
    if dbank is not None:
        dbank.copy_(dout)
    if dbank is not None or dgroup_decay is not None:
        parts = triton.cdiv(width, DecayWriteConfig.from_shapes(chunk, width).columns)
        ddecay = None if dgroup_decay is None else delta.new_empty(streams, parts, chunk * writes)
        row_gradients_call(dout, bank, groups, dbank, ddecay).launch()
        if ddecay is not None and dgroup_decay is not None:
            sum_parts_call(ddecay, dgroup_decay).launch()
    if ddelta is not None or dwrite_w is not None:
        slots = torch.full(groups.write_w.shape, -1, dtype=torch.int32, device=bank.device)
        entry_slots_call(groups, slots).launch()
        sums = torch.empty_like(delta) if ddelta is None else ddelta
        parts = GradientGatherConfig.from_shapes(chunk, writes, width).parts(width)
        dots = delta.new_empty(streams * chunk, parts, writes)
        banks = Banks(dout, bank, StepRows(bank, delta, "none"))  # the gather takes the first of them alone
        gradient_gather_call(banks, slots, groups.write_w, delta, sums, dots).launch()
        if dwrite_w is not None:
            sum_parts_call(dots, dwrite_w.flatten(0, 1)).launch()
