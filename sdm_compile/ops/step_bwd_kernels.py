"""Triton kernels of one backward step that touch bank rows (SPEC section 3): the gradient's, and those before the step.

    gather    per token: the weighted sum of the gradient's rows at its writes, and each row's dot with its delta
    rows      per slot that the step writes or reads: the row's dots with the gradient and with what each write and read
              sent back; the gradient through decay, retrieval and reading

The bank is not walked back. A row as it was before the step comes from the snapshot, if it is there: saved by this
step, or, for a slot that is only read, by the next later step that writes it; with versions, made by the last earlier
step that wrote it. Otherwise it is the bank's own. Which one follows from the slots alone, and is known before the
steps: `row_numbers_call`.

A dot over D columns leaves a kernel as one part for each of its blocks of columns, a number that D and the dtypes fix,
and is the sum of those in order: `sum_parts_call`, for any number of steps at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall, eviction_hint
from .snapshot import SCALED_MODES, StepRows
from .snapshot_tiles import addressable, convert, load_quantized
from .step_table import from_table


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
        p_dM = from_table(p_dM, p_table, 0)
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
def _load_sent_back(p_du, p_dy, source, mask, o_d, m_d, D):
    """What the entries' tokens sent back, [G, BD]: du where it is a write, dy where it is a read."""
    at = (source >> 1).to(tl.int64)[:, None] * D + o_d[None, :]
    read = ((source & 1) != 0)[:, None]
    m = mask[:, None] & m_d[None, :]
    if p_dy.dtype == p_du.dtype:
        # Chosen with the columns in place: chosen addresses of rows, spread later, may be loaded element by element.
        return tl.load(tl.where(read, p_dy + at, p_du + at), mask=m, other=0.0)
    # Between addresses of two dtypes nothing can be chosen.
    du = tl.load(p_du + at, mask=m & ~read, other=0.0)
    dy = convert(tl.load(p_dy + at, mask=m & read, other=0.0), tl.float32)
    return tl.where(read, dy, du)


@triton.jit
def _next_entries(p_source, p_weight, place, mask):
    """Sources and weights of the entries at `place`, which are asked for before the work on those in front of them."""
    return tl.load(p_source + place, mask=mask, other=0), tl.load(p_weight + place, mask=mask, other=0.0)


@triton.jit
def _decoded_rows(
    p_bank, p_payload, p_scales, slot, number, start, D, DP, BD: tl.constexpr, MODE: tl.constexpr, SCALED: tl.constexpr
):
    """The rows before the step, columns from `start` on, of a payload that has not the bank's dtype."""
    o_d = start + tl.arange(0, BD)
    m_row = (slot >= 0)[:, None] & (o_d < D)[None, :]
    saved = number >= 0
    at = slot.to(tl.int64)[:, None] * D + o_d[None, :]
    row = tl.load(p_bank + at, mask=m_row & ~saved[:, None], other=0.0)
    scale = None
    if SCALED:
        scale = tl.load(p_scales + number, mask=saved, other=0.0)
    decoded = load_quantized(p_payload, number.to(tl.int64), saved, start, scale, DP, BD, MODE)
    row = tl.where(saved[:, None], convert(decoded, row.dtype), row)
    return tl.where(m_row, row, 0.0)  # codes beyond the columns are not zero


@triton.jit
def _slot_rows_kernel(
    p_dM,
    p_bank,
    p_payload,
    p_scales,
    p_table,
    p_start,
    p_slot,
    p_lead,
    p_ordinal,
    p_number,
    p_source,
    p_weight,
    p_decay,
    p_du,
    p_dy,
    p_ddecay,
    p_dots,
    num_slots,
    D: tl.constexpr,
    DP,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    BD: tl.constexpr,
    TABLE: tl.constexpr,
    MODE: tl.constexpr,
    SCALED: tl.constexpr,
    EVICT: tl.constexpr,
):
    """BD columns of the rows of TILES times G slots, each with its group of a chunk's writes and reads.

    TABLE: the addresses of the gradient, the bank, the payload and the scales stand in p_table. MODE: that of the
    payload. EVICT: the hint for rows before the step, where all have the bank's dtype.
    """
    if TABLE:
        p_dM = from_table(p_dM, p_table, 0)
        p_bank = from_table(p_bank, p_table, 1)
        p_payload = from_table(p_payload, p_table, 2)
        p_scales = from_table(p_scales, p_table, 3)
    entries: tl.constexpr = C * (W + R)
    parts, blocks = tl.cdiv(D, BD), tl.cdiv(entries, G * TILES)
    part = tl.program_id(0) % parts
    program = tl.program_id(0) // parts
    # The gather came to the last stream last, so that its rows are what the cache still holds.
    p = (tl.num_programs(0) // parts // blocks - 1 - program // blocks).to(tl.int64)
    first = program % blocks * (G * TILES)
    o_d = part * BD + tl.arange(0, BD)
    m_d = o_d < D if D % BD != 0 else tl.full([BD], True, tl.int1)
    p_start += p * (entries + 1)
    p_slot += p * entries
    p_lead += p * entries
    p_ordinal += p * entries
    p_number += p * entries
    p_source += p * entries
    p_weight += p * entries
    p_decay += p * (C * W)
    p_du += p * C * D
    p_dy += p * C * D
    p_dots += (p * parts + part) * entries
    p_ddecay += (p * parts + part) * (C * W)
    for tile in range(0, TILES):
        o_g = first + tile * G + tl.arange(0, G)
        m_g = o_g < entries
        slot = tl.load(p_slot + o_g, mask=m_g, other=-1)
        start = tl.load(p_start + o_g, mask=m_g, other=0)
        end = tl.load(p_start + o_g + 1, mask=m_g, other=0)
        source = tl.load(p_lead + o_g, mask=m_g, other=0)
        ordinal = tl.load(p_ordinal + o_g, mask=m_g, other=-1)
        number = tl.load(p_number + o_g, mask=m_g, other=-1)
        slot = tl.where(slot < num_slots, slot, -1)
        used = slot >= 0
        longest = tl.max(tl.where(used, end - start, 0), axis=0)
        if longest > 0:
            written = used & (ordinal >= 0)
            m_row = used[:, None] & m_d[None, :]
            p_row = p_dM + slot.to(tl.int64)[:, None] * D + o_d[None, :]
            total = tl.load(p_row, mask=m_row, other=0.0)
            if p_payload.dtype == p_bank.dtype:
                p_saved = p_payload + number.to(tl.int64)[:, None] * D + o_d[None, :]
                p_final = p_bank + slot.to(tl.int64)[:, None] * D + o_d[None, :]
                p_before = tl.where((number >= 0)[:, None], p_saved, p_final)
                row = tl.load(p_before, mask=m_row, other=0.0, eviction_policy=EVICT)
            else:
                row = _decoded_rows(p_bank, p_payload, p_scales, slot, number, part * BD, D, DP, BD, MODE, SCALED)
            x = _load_sent_back(p_du, p_dy, source, used, o_d, m_d, D)
            weight = tl.load(p_weight + start, mask=used, other=0.0)
            decay = tl.load(p_decay + ordinal, mask=written, other=1.0)
            place = start + 1
            more = used & (place < end)
            source, following = _next_entries(p_source, p_weight, place, more)
            row, total = convert(row, tl.float32), convert(total, tl.float32)
            tl.store(p_ddecay + ordinal, tl.sum(row * total, axis=1), mask=written)
            tl.store(p_dots + start, tl.sum(row * x, axis=1), mask=used)
            total = tl.fma(tl.broadcast_to(weight[:, None], total.shape), x, total * decay[:, None])
            for _n in range(1, longest):
                weight = following
                x = _load_sent_back(p_du, p_dy, source, more, o_d, m_d, D)
                tl.store(p_dots + place, tl.sum(row * x, axis=1), mask=more)
                added = tl.fma(tl.broadcast_to(weight[:, None], total.shape), x, total)
                total = tl.where(more[:, None], added, total)  # adding nothing would turn -0.0 into 0.0
                place += 1
                more = used & (place < end)
                source, following = _next_entries(p_source, p_weight, place, more)
            tl.store(p_row, total.to(p_dM.dtype.element_ty), mask=m_row)


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
    def from_shapes(chunk: int, writes: int, head_dim: int) -> GradientGatherConfig:
        # Measured on an H200, us per step at a chunk of 64 with 2 streams of 1024 columns, and at one of 256 with 8:
        # 6.9 and 130 with 64 columns, 8.1 and 138 with 128, 13.3 and 240 with 256. A long chunk takes half as many
        # parts of its dots, as memory bounds its slabs.
        return GradientGatherConfig(
            rows=min(32, triton.next_power_of_2(writes)),
            columns=min(64 if chunk <= 128 else 128, triton.next_power_of_2(head_dim)),
            warps=1,
        )

    def parts(self, head_dim: int) -> int:
        """How many parts a dot over the columns has."""
        return triton.cdiv(head_dim, self.columns)


@dataclass(frozen=True)
class SlotRowsConfig:
    groups: int  # at a time
    tiles: int  # one after the other
    columns: int
    warps: int
    registers: int | None = None  # per thread, at most

    @staticmethod
    def from_shapes(chunk: int, head_dim: int) -> SlotRowsConfig:
        columns = min(512, max(2, triton.next_power_of_2(head_dim)))  # int4 packs two
        if columns <= 128:
            return SlotRowsConfig(groups=512 // columns, tiles=2, columns=columns, warps=2)
        if columns <= 256:
            return SlotRowsConfig(groups=1, tiles=1, columns=columns, warps=1)
        # Measured on an H200, us per step at a chunk of 64 with 2 streams of 1024 columns, at one of 256 with 4, and at
        # one of 64 with 4 of 768: 29.7, 295 and 43.1; 30.9, 425 and 49.5 with one tile, 30.5, 329 and 48.0 with as many
        # registers as it asks for, 34.6, 400 and 47.9 with 256 columns, 31.1, 321 and 48.4 with 1024. Later, all of a
        # step: 39.2, 370 and 55.4 with four tiles, 41.8, 358 and 57.9 with eight.
        return SlotRowsConfig(groups=1, tiles=4 if chunk <= 128 else 8, columns=columns, warps=1, registers=80)

    def parts(self, head_dim: int) -> int:
        """How many parts a dot over the columns has."""
        return triton.cdiv(head_dim, self.columns)


class Banks(NamedTuple):
    """What the steps of a backward read and update; contiguous.

    With a table, kernels take the addresses of dM, the bank, the payload and the scales from its entries 0 to 3, and
    from these tensors the dtypes and shapes alone.
    """

    dM: Tensor  # [num_slots, D] the gradient, in the bank's dtype or float32; updated
    bank: Tensor  # [num_slots, D] the final one, or, of versions, the one before the call
    snapshot: StepRows  # of all steps
    table: Tensor | None = None  # [ADDRESSES] int64, multiples of 16


class SlotEntries(NamedTuple):
    """A step's writes and reads, F = C * (W + R), grouped by slot (see `SlotGroups`). Contiguous."""

    start: Tensor  # [P, F + 1] int32
    slot: Tensor  # [P, F] int32
    lead: Tensor  # [P, F] int32
    ordinal: Tensor  # [P, F] int32
    number: Tensor  # [P, F] int32, the snapshot's row of each group's slot before the step; -1: it is the bank's
    sources: Tensor  # [P, F] int32, by place: 2 * the entry's token, and one more for a read
    weights: Tensor  # [P, F] float32, by place, see `entry_weights_call`
    group_decay: Tensor  # [P, E] float32


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
    config = config or GradientGatherConfig.from_shapes(chunk, writes, width)
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


def slot_rows_call(
    banks: Banks,
    entries: SlotEntries,
    du: Tensor,
    dy: Tensor,
    dgroup_decay: Tensor,
    dots: Tensor,
    config: SlotRowsConfig | None = None,
) -> KernelCall:
    """The rows of the step's slots: dM[s] = decay dM[s] + sum of weight du_i or dy_i, rounded once.

    Args:
        du, dy: [P, C, D], contiguous, for the writes and for the reads: float32, and dy float32 or bfloat16.
        dgroup_decay: receives [P, parts, E] float32, the parts of <M0[s], dM[s]> of every written slot.
        dots: receives [P, parts, F] float32, those of <M0[s], du_i or dy_i> of every entry, in the order of the keys.

    What the last two hold for groups and entries without a slot stays.
    """
    streams, chunk, width = du.shape
    num_slots, writes = banks.dM.shape[0], entries.group_decay.shape[1] // chunk
    reads = entries.slot.shape[1] // chunk - writes
    config = config or SlotRowsConfig.from_shapes(chunk, width)
    table = banks.dM if banks.table is None else banks.table
    payload, scales, mode = banks.snapshot
    options = dict(
        C=chunk,
        W=writes,
        R=reads,
        G=config.groups,
        TILES=config.tiles,
        BD=config.columns,
        TABLE=banks.table is not None,
        MODE=mode,
        SCALED=mode in SCALED_MODES,
        EVICT=eviction_hint(banks.bank, entries.slot.numel()),
        num_warps=config.warps,
        maxnreg=config.registers,
        enable_fp_fusion=True,
    )
    # One dimension of a grid takes more than 65535 programs.
    blocks = triton.cdiv(chunk * (writes + reads), config.groups * config.tiles)
    tensors = (banks.dM, banks.bank, addressable(payload), scales, table, *entries, du, dy, dgroup_decay, dots)
    grid = (streams * blocks * config.parts(width),)
    return KernelCall(_slot_rows_kernel, grid, (*tensors, num_slots, width, payload.shape[1]), options)


def sum_parts_call(parts: Tensor, out: Tensor) -> KernelCall:
    """Fills out [n, N] with the sums, in order, of parts [n, parts, N]; float32, contiguous."""
    block = 256
    grid = (triton.cdiv(out.numel(), block),)
    args = (parts, out, out.numel(), out.shape[1], parts.shape[1])
    return KernelCall(_sum_parts_kernel, grid, args, dict(B=block, num_warps=4, enable_fp_fusion=False))
