"""Triton kernels of one backward step that touch bank rows (SPEC section 3): the gradient's, and the bank's.

    gather        per token: the weighted sum of the gradient's rows at its writes, and each row's dot with its delta
    write side    per written slot: the row before the step, from the snapshot; its dots with the gradient and with
                  what its writes retrieved; the gradient through decay and retrieval
    read side     per read slot: the row's dots with what its reads sent back, and their part of the gradient

The order is gather, write side, read side: the first one reads the gradient after the step, and the last one the bank
before it. A dot over D columns leaves a kernel as one part for each of its blocks of columns, a number that D and the
dtypes fix, and is the sum of those in order: `sum_parts_call`, for any number of steps at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .snapshot import SCALED_MODES, StepRows
from .snapshot_tiles import addressable, convert, load_quantized


@triton.jit
def _from_table(p, p_table, n: tl.constexpr):
    """The pointer p, at the address that stands in entry n of a table."""
    return tl.multiple_of(tl.load(p_table + n).to(tl.pointer_type(p.dtype.element_ty)), 16)


@triton.jit
def _gradient_gather_kernel(
    p_dM,
    p_table,
    p_idx,
    p_weight,
    p_x,
    p_sums,
    p_dots,
    num_slots,
    D,
    W: tl.constexpr,
    BW: tl.constexpr,
    BD: tl.constexpr,
    TABLE: tl.constexpr,
):
    """BD columns of one token, BW rows at a time. TABLE: the gradient's address stands in p_table."""
    if TABLE:
        p_dM = _from_table(p_dM, p_table, 0)
    parts = tl.cdiv(D, BD)
    token = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    o_d = part * BD + tl.arange(0, BD)
    m_d = o_d < D
    x = tl.load(p_x + token * D + o_d, mask=m_d, other=0.0)
    total = tl.zeros([BD], tl.float32)
    for n in tl.static_range(0, W, BW):
        o_n = n + tl.arange(0, BW)
        idx = tl.load(p_idx + token * W + o_n, mask=o_n < W, other=-1)
        m_n = (idx >= 0) & (idx < num_slots)
        weight = tl.load(p_weight + token * W + o_n, mask=m_n, other=0.0)
        at = idx.to(tl.int64)[:, None] * D + o_d[None, :]
        rows = tl.load(p_dM + at, mask=m_n[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        total += tl.sum(rows * weight[:, None], axis=0)
        dots = tl.where(m_n, tl.sum(rows * x[None, :], axis=1), 0.0)
        tl.store(p_dots + (token * parts + part) * W + o_n, dots, mask=o_n < W)
    tl.store(p_sums + token * D + o_d, total, mask=m_d)


@triton.jit
def _slot_rows_kernel(
    p_dM,
    p_bank,
    p_table,
    p_payload,
    p_scales,
    p_idx,
    p_weight,
    p_x,
    p_order,
    p_start,
    p_slot,
    p_decay,
    p_ddecay,
    p_dots,
    num_slots,
    D,
    DP,
    C: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    BD: tl.constexpr,
    TABLE: tl.constexpr,
    MODE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """BD columns of the rows of G slots; each slot has a group of a chunk's C * N entries, which bring a weight each,
    and a row x per token. TABLE: the addresses of the gradient and of the bank stand in p_table. MODE: that of the
    payload, whose row of the group the bank gets back, with a decay per group; None for the read side."""
    if TABLE:
        p_dM = _from_table(p_dM, p_table, 0)
        p_bank = _from_table(p_bank, p_table, 1)
    entries: tl.constexpr = C * N
    parts, blocks = tl.cdiv(D, BD), tl.cdiv(entries, G)
    part = tl.program_id(0) % parts
    p = (tl.program_id(0) // parts // blocks).to(tl.int64)
    o_g = tl.program_id(0) // parts % blocks * G + tl.arange(0, G)
    m_g = o_g < entries
    o_d = part * BD + tl.arange(0, BD)
    m_d = o_d < D
    group = p * entries + o_g  # [G]
    slot = tl.load(p_slot + group, mask=m_g, other=-1)
    used = m_g & (slot >= 0) & (slot < num_slots)
    m_row = used[:, None] & m_d[None, :]
    start = tl.load(p_start + group + p, mask=used, other=0)
    length = tl.load(p_start + group + p + 1, mask=used, other=0) - start
    p_order += p * entries
    p_weight += p * entries
    p_x += p * C * D
    entry = tl.load(p_order + start, mask=used, other=0)
    weight = tl.load(p_weight + entry, mask=used, other=0.0)
    x = tl.load(p_x + (entry // N)[:, None] * D + o_d[None, :], mask=m_row, other=0.0)

    at = slot.to(tl.int64)[:, None] * D + o_d[None, :]
    drow = tl.load(p_dM + at, mask=m_row, other=0.0).to(tl.float32)
    if MODE is None:
        row = tl.load(p_bank + at, mask=m_row, other=0.0).to(tl.float32)
    else:
        scale = None
        if SCALED:
            scale = tl.load(p_scales + group, mask=used, other=0.0)
        row = load_quantized(p_payload, group, used, part * BD, scale, DP, BD, MODE)
        row = convert(row, p_bank.dtype.element_ty)
        tl.store(p_bank + at, row, mask=m_row)
        row = tl.where(m_row, row.to(tl.float32), 0.0)  # codes beyond the columns are not zero

    # The dots' parts of this chunk and these columns; entries without a slot have no group that would write them.
    first = (p * parts + part) * entries
    idx = tl.load(p_idx + group, mask=m_g, other=0)
    tl.store(p_dots + first + o_g, tl.zeros([G], tl.float32), mask=m_g & ((idx < 0) | (idx >= num_slots)))
    if MODE is not None:
        decay = tl.load(p_decay + group, mask=used, other=0.0)
        tl.store(p_ddecay + first + o_g, tl.where(used, tl.sum(row * drow, axis=1), 0.0), mask=m_g)
        drow *= decay[:, None]
    tl.store(p_dots + first + entry, tl.sum(row * x, axis=1), mask=used)
    drow = tl.fma(tl.broadcast_to(weight[:, None], drow.shape), x, drow)
    longest = tl.max(length, axis=0)
    for n in range(1, longest):
        more = n < length
        entry = tl.load(p_order + start + n, mask=more, other=0)
        weight = tl.load(p_weight + entry, mask=more, other=0.0)
        m_more = more[:, None] & m_d[None, :]
        x = tl.load(p_x + (entry // N)[:, None] * D + o_d[None, :], mask=m_more, other=0.0)
        tl.store(p_dots + first + entry, tl.sum(row * x, axis=1), mask=more)
        drow = tl.fma(tl.broadcast_to(weight[:, None], drow.shape), x, drow)
    tl.store(p_dM + at, drow.to(p_dM.dtype.element_ty), mask=m_row)


@triton.jit
def _sum_parts_kernel(p_parts, p_out, total, N, parts, B: tl.constexpr):
    """B of [n, N] sums of [n, parts, N], in order."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    mask = at < total
    p_part = p_parts + at // N * N * parts + at % N
    x = tl.load(p_part, mask=mask, other=0.0)
    for part in range(1, parts):
        x += tl.load(p_part + part * N, mask=mask, other=0.0)
    tl.store(p_out + at, x, mask=mask)


@dataclass(frozen=True)
class GradientGatherConfig:
    rows: int
    columns: int
    warps: int

    @staticmethod
    def from_shapes(writes: int, head_dim: int) -> GradientGatherConfig:
        # The shape that was best for the forward's gather on an H200.
        return GradientGatherConfig(
            rows=min(32, triton.next_power_of_2(writes)),
            columns=min(64, triton.next_power_of_2(head_dim)),
            warps=1,
        )

    def parts(self, head_dim: int) -> int:
        """How many parts a dot over the columns has."""
        return triton.cdiv(head_dim, self.columns)


@dataclass(frozen=True)
class SlotRowsConfig:
    groups: int
    columns: int
    warps: int

    @staticmethod
    def from_shapes(chunk: int, head_dim: int) -> SlotRowsConfig:
        # The shapes that were best for the forward's write by group on an H200.
        columns = min(1024, max(2, triton.next_power_of_2(head_dim)))  # int4 packs two
        if head_dim % columns and head_dim > 256:
            columns = 256
        if columns <= 128:
            return SlotRowsConfig(groups=2048 // columns, columns=columns, warps=4)
        return SlotRowsConfig(groups=1024 // columns, columns=columns, warps=1 if chunk <= 64 else 2)

    def parts(self, head_dim: int) -> int:
        """How many parts a dot over the columns has."""
        return triton.cdiv(head_dim, self.columns)


class Banks(NamedTuple):
    """What a backward step updates in place; contiguous. With a table, kernels take both addresses from there."""

    dM: Tensor  # [num_slots, D] the gradient, in the bank's dtype or float32
    bank: Tensor  # [num_slots, D]
    table: Tensor | None = None  # [2] int64 their addresses, multiples of 16


class SlotEntries(NamedTuple):
    """A step's entries, writes or reads, grouped by slot as `ChunkFields` groups the writes; E = C * N. Contiguous."""

    idx: Tensor  # [P, C, N] int32
    weights: Tensor  # [P, C, N] float32
    order: Tensor  # [P, E] int32
    start: Tensor  # [P, E + 1] int32
    slot: Tensor  # [P, E] int32


def gradient_gather_call(
    banks: Banks,
    k_idx: Tensor,
    write_w: Tensor,
    delta: Tensor,
    gathered: Tensor,
    dwrite_w: Tensor,
    config: GradientGatherConfig | None = None,
) -> KernelCall:
    """gathered[i] = sum over w of write_w[i,w] dM[k_idx[i,w]], and the parts of <dM[k_idx[i,w]], delta_i>.

    Args:
        k_idx, write_w: [P, C, W] int32 and float32. delta: [P, C, D] float32. Contiguous.
        gathered: receives [P, C, D] float32. dwrite_w: receives [P, C, parts, W] float32.
    """
    streams, chunk, writes = k_idx.shape
    num_slots, width = banks.dM.shape
    config = config or GradientGatherConfig.from_shapes(writes, width)
    table = banks.dM if banks.table is None else banks.table
    tensors = (banks.dM, table, k_idx, write_w, delta, gathered, dwrite_w)
    options = dict(
        W=writes,
        BW=config.rows,
        BD=config.columns,
        TABLE=banks.table is not None,
        num_warps=config.warps,
        enable_fp_fusion=True,
    )
    grid = (streams * chunk * config.parts(width),)
    return KernelCall(_gradient_gather_kernel, grid, (*tensors, num_slots, width), options)


def write_side_call(
    banks: Banks,
    writes: SlotEntries,
    dretrieved: Tensor,
    rows: StepRows,
    group_decay: Tensor,
    dgroup_decay: Tensor,
    dk_eff: Tensor,
    config: SlotRowsConfig | None = None,
) -> KernelCall:
    """The written slots: bank[s] = M0[s], dM[s] = decay dM[s] + sum of weight dretrieved_i, each rounded once.

    Args:
        writes: weights are k_eff. dretrieved: [P, C, D] float32. group_decay: [P, E] float32. Contiguous.
        dgroup_decay: receives [P, parts, E] float32, the parts of <M0[s], dM[s]> of every group.
        dk_eff: receives [P, parts, E] float32, the parts of <M0[s], dretrieved_i> of every write.
    """
    return _slot_rows_call(banks, writes, dretrieved, rows, group_decay, dgroup_decay, dk_eff, config)


def read_side_call(
    banks: Banks, reads: SlotEntries, dy: Tensor, dq_w: Tensor, config: SlotRowsConfig | None = None
) -> KernelCall:
    """The read slots: dM[s] += sum of weight dy_i, rounded once.

    Args:
        reads: weights are q_w. dy: [P, C, D] float32. Contiguous.
        dq_w: receives [P, parts, C * R] float32, the parts of <bank[s], dy_i> of every read.
    """
    return _slot_rows_call(banks, reads, dy, None, dq_w, dq_w, dq_w, config)


def _slot_rows_call(
    banks: Banks,
    entries: SlotEntries,
    x: Tensor,
    rows: StepRows | None,
    decay: Tensor,
    ddecay: Tensor,
    dots: Tensor,
    config: SlotRowsConfig | None,
) -> KernelCall:
    streams, chunk, each = entries.idx.shape
    num_slots, width = banks.dM.shape
    config = config or SlotRowsConfig.from_shapes(chunk, width)
    table = banks.dM if banks.table is None else banks.table
    payload, scales, mode = rows or (banks.bank, banks.bank, None)
    tensors = (banks.dM, banks.bank, table, addressable(payload), scales, entries.idx, entries.weights, x)
    groups = (entries.order, entries.start, entries.slot, decay, ddecay, dots)
    options = dict(
        C=chunk,
        N=each,
        G=config.groups,
        BD=config.columns,
        TABLE=banks.table is not None,
        MODE=mode,
        SCALED=mode in SCALED_MODES,
        num_warps=config.warps,
        enable_fp_fusion=True,
    )
    # One dimension of a grid takes more than 65535 programs.
    grid = (streams * triton.cdiv(chunk * each, config.groups) * config.parts(width),)
    return KernelCall(_slot_rows_kernel, grid, (*tensors, *groups, num_slots, width, payload.shape[1]), options)


def sum_parts_call(parts: Tensor, out: Tensor) -> KernelCall:
    """Fills out [n, N] with the sums, in order, of parts [n, parts, N]; float32, contiguous."""
    block = 256
    grid = (triton.cdiv(out.numel(), block),)
    args = (parts, out, out.numel(), out.shape[1], parts.shape[1])
    return KernelCall(_sum_parts_kernel, grid, args, dict(B=block, num_warps=4, enable_fp_fusion=False))
