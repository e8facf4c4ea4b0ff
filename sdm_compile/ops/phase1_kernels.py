"""Triton kernels of Phase 1: sort a chunk's write entries by slot, then walk the groups.

    (sort    the entries by slot: `slot_sort_kernels`)
    order    the entries' places in the order, and their weights and gates in it
    groups   ordinals, starts and slots of the groups; gate sums over later entries
    pairs    rows of A and QK, all of a token's entries walking their groups backwards together

A key's order is (slot, token, write); entries without a slot come last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .layout import ChunkFields, empty
from .slot_sort_kernels import NO_ENTRY, PLACES, inside, sort_by_slot, token_of


@triton.constexpr_function
def _halvings(n):
    return (n - 1).bit_length()


@triton.constexpr_function
def _half(n, i):
    """Half of what is left of n after i halvings."""
    return ((n + (1 << i) - 1) >> i) // 2


@triton.jit
def _count_below(p_keys, key, N: tl.constexpr):
    """How many of N ascending keys are below each `key`. Pointers move, as that takes the fewest instructions."""
    p_low = p_keys + tl.zeros_like(key)
    for i in tl.static_range(_halvings(N)):
        p_middle = p_low + _half(N, i)
        p_low = tl.where(tl.load(p_middle - 1) < key, p_middle, p_low)
    count = ((p_low.to(tl.int64) - p_keys.to(tl.int64)) // 8).to(tl.int32)  # keys have 8 bytes
    return count + (tl.load(p_low) < key).to(tl.int32)


@triton.jit
def _order_kernel(
    p_keys,
    p_k_val,
    p_g,
    p_order,
    p_weight,
    p_gate,
    p_place,
    p_before,
    p_firsts,
    p_held,
    W: tl.constexpr,
    GATES: tl.constexpr,
    ENTRIES: tl.constexpr,
    B: tl.constexpr,
):
    """B places of one chunk. p_firsts, p_held: how many of them start a group, and how many hold an entry."""
    chunk = tl.program_id(1).to(tl.int64)
    # Taken as scattered places, so that loads and stores of all kinds keep one layout.
    o_e = tl.max_contiguous(tl.program_id(0) * B + tl.arange(0, B), 1)
    m_e = inside(o_e, ENTRIES, B)
    p_keys += chunk * ENTRIES
    key = tl.load(p_keys + o_e, mask=m_e, other=NO_ENTRY)
    before = tl.load(p_keys + o_e - 1, mask=m_e & (o_e > 0), other=-1)
    entry = key.to(tl.int32)
    held = entry >= 0
    first = held & ((key >> 32).to(tl.int32) != (before >> 32).to(tl.int32))
    weight = tl.load(p_k_val + chunk * ENTRIES + entry, mask=held, other=0.0).to(tl.float32)
    gate_at = chunk * ENTRIES + entry if GATES == W else chunk * (ENTRIES // W) + token_of(entry, W)
    gate = tl.load(p_g + gate_at, mask=held, other=0.0)
    tl.store(p_order + chunk * ENTRIES + o_e, entry, mask=m_e)
    tl.store(p_weight + chunk * ENTRIES + o_e, weight, mask=m_e)
    tl.store(p_gate + chunk * ENTRIES + o_e, gate, mask=m_e)
    tl.store(p_before + chunk * ENTRIES + o_e, tl.where(held & ~first, token_of(before.to(tl.int32), W), -1), mask=m_e)
    tl.store(p_place + chunk * ENTRIES + entry, tl.where(first, -1, o_e), mask=held)
    tile = chunk * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_firsts + tile, tl.sum(first.to(tl.int32), axis=0))
    tl.store(p_held + tile, tl.sum(held.to(tl.int32), axis=0))


@triton.jit
def _groups_kernel(
    p_keys,
    p_order,
    p_weight,
    p_gate,
    p_before,
    p_firsts,
    p_held,
    p_write_w,
    p_group_start,
    p_group_slot,
    p_group_decay,
    p_lead_value,
    p_lead_index,
    p_ordinal,
    W: tl.constexpr,
    BY_ENTRY: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILES: tl.constexpr,
    B: tl.constexpr,
):
    """B places of one chunk. Each fills one group: its own if it starts one, else an unused one, from the end on.

    TILES: at least the number of a chunk's programs, a power of two. BY_ENTRY: see Phase1Scratch. p_ordinal: by entry,
    the group's ordinal at its first entry, -1 at the others; None if nobody asks.
    """
    tile = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    o_t = tl.arange(0, TILES)
    at_tile = chunk * tl.num_programs(0) + o_t
    earlier = tl.sum(tl.load(p_firsts + at_tile, mask=o_t < tile, other=0), axis=0)
    held_count = tl.sum(tl.load(p_held + at_tile, mask=o_t < tl.num_programs(0), other=0), axis=0)

    o_e = tl.max_contiguous(tile * B + tl.arange(0, B), 1)
    m_e = inside(o_e, ENTRIES, B)
    at = chunk * ENTRIES + o_e
    entry = tl.load(p_order + at, mask=m_e, other=-1)
    before = tl.load(p_before + at, mask=m_e, other=0)
    slot = (tl.load(p_keys + at, mask=m_e, other=0) >> 32).to(tl.int32)
    first = (entry >= 0) & (before < 0)

    later = tl.zeros([B], tl.float32)
    distance = 1
    more = tl.load(p_before + at + 1, mask=o_e + 1 < ENTRIES, other=-1) >= 0
    following = tl.load(p_order + at + 1, mask=more, other=-1)
    while tl.max(more.to(tl.int32), axis=0) > 0:
        later += tl.load(p_gate + at + distance, mask=more, other=0.0)
        distance += 1
        more = tl.load(p_before + at + distance, mask=more & (o_e + distance < ENTRIES), other=-1) >= 0
    write_w = tl.load(p_weight + at, mask=m_e, other=0.0) * tl.exp(later)
    decay = tl.exp(tl.load(p_gate + at, mask=m_e, other=0.0) + later)
    tl.store(p_write_w + chunk * ENTRIES + entry, write_w, mask=entry >= 0)

    groups = earlier + tl.cumsum(first.to(tl.int32), axis=0)  # until each place, inclusive
    ordinal = tl.where(first, groups - 1, ENTRIES - 1 - (o_e - groups))
    tl.store(p_group_start + chunk * (ENTRIES + 1) + ordinal, tl.where(first, o_e, held_count), mask=m_e)
    tl.store(p_group_slot + chunk * ENTRIES + ordinal, tl.where(first, slot, -1), mask=m_e)
    tl.store(p_group_decay + chunk * ENTRIES + ordinal, tl.where(first, decay, 1.0), mask=m_e)
    if BY_ENTRY:
        tl.store(p_lead_value + chunk * ENTRIES + entry, tl.where(first, decay, -1.0), mask=entry >= 0)
        tl.store(p_lead_index + chunk * ENTRIES + entry, following, mask=entry >= 0)
    else:
        tl.store(p_lead_value + chunk * ENTRIES + ordinal, write_w, mask=m_e)
        tl.store(p_lead_index + chunk * ENTRIES + ordinal, token_of(entry, W), mask=m_e)
    if p_ordinal is not None:
        tl.store(p_ordinal + chunk * ENTRIES + entry, tl.where(first, ordinal, -1), mask=entry >= 0)
    if tile == 0:
        tl.store(p_group_start + chunk * (ENTRIES + 1) + ENTRIES, held_count)


@triton.jit
def _largest(x):
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def _walk_rows(
    p_idx,
    p_val,
    p_g,
    p_keys,
    p_weight,
    p_gate,
    p_place,
    p_before,
    p_effective,
    p_out,
    chunk,
    token,
    C: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    GATES: tl.constexpr,
    READ: tl.constexpr,
    BI: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """Rows token to token + BI - 1 of A (or QK), and their k_eff (or q_w): their N entries walk backwards together."""
    o_i = token + tl.arange(0, BI)
    o_n = tl.arange(0, BN)
    o_c = tl.arange(0, BC)
    m_i = o_i < C
    m_in = m_i[:, None] & (o_n < N)[None, :]
    # Taken as scattered entries, so that loads and stores of all kinds keep one layout.
    at = tl.max_contiguous(chunk * C * N + o_i[:, None] * N + o_n[None, :], [1, 1])
    p_row = p_out + (chunk * C + o_i) * C
    m_row = m_i[:, None] & (o_c < C)[None, :]
    tl.store(p_row[:, None] + o_c[None, :], tl.zeros([BI, BC], tl.float32), mask=m_row)
    p_keys += chunk * (C * W)
    p_weight += chunk * (C * W)
    p_gate += chunk * (C * W)
    p_before += chunk * (C * W)
    ids = tl.load(p_idx + at, mask=m_in, other=-1)
    val = tl.load(p_val + at, mask=m_in, other=0.0).to(tl.float32)
    valid = m_in & (ids >= 0)
    # An entry stands at the write of some token, or at none (-1). A read starts at the last write at or before its
    # token; a write at the one before itself, with its own gate.
    if READ:
        slot = ids.to(tl.int64)
        key = (slot << 32) | ((o_i[:, None] + 1) * W).to(tl.int64)
        place = _count_below(p_keys, key, C * W) - 1
        there = tl.load(p_keys + place, mask=valid & (place >= 0), other=-1)
        stands = tl.where(valid & (there >> 32 == slot), token_of(there.to(tl.int32), W), -1)
        total = tl.zeros([BI, BN], tl.float32)
    else:
        place = tl.load(p_place + at, mask=valid, other=-1)
        stands = tl.load(p_before + place, mask=place >= 0, other=-1)
        place -= 1
        if GATES == W:
            total = tl.load(p_g + at, mask=valid, other=0.0)
        else:
            total = tl.where(valid, tl.load(p_g + chunk * C + o_i, mask=m_i, other=0.0)[:, None], 0.0)
    weight = tl.load(p_weight + place, mask=stands >= 0, other=0.0)
    gate = tl.load(p_gate + place, mask=stands >= 0, other=0.0)
    product = val * weight * tl.exp(total)
    tl.debug_barrier()  # other threads stored the zeros
    left = _largest(stands)
    while left >= 0:
        column = tl.max(stands, axis=1) if BI > 1 else tl.full([1], left, tl.int32)  # -1: the row is done
        here = stands == tl.maximum(column, 0)[:, None]
        pair = tl.sum(tl.where(here, product, 0.0), axis=1)
        tl.store(p_row + column, pair, mask=m_i & (column >= 0))
        total = tl.where(here, total + gate, total)
        before = tl.load(p_before + place, mask=here, other=-1)
        stands = tl.where(here, before, stands)
        if _largest(before) >= 0:
            on = before >= 0
            place = tl.where(on, place - 1, place)
            weight = tl.load(p_weight + place, mask=on, other=0.0)
            gate = tl.where(on, tl.load(p_gate + place, mask=on, other=0.0), gate)
            product = tl.where(on, val * weight * tl.exp(total), product)
        left = _largest(stands)
    tl.store(p_effective + at, tl.where(valid, val * tl.exp(total), 0.0), mask=m_in)


@triton.jit
def _pairs_kernel(
    p_k_idx,
    p_k_val,
    p_g,
    p_q_idx,
    p_q_val,
    p_keys,
    p_weight,
    p_gate,
    p_place,
    p_before,
    p_k_eff,
    p_q_w,
    p_A,
    p_QK,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    GATES: tl.constexpr,
    BI_W: tl.constexpr,
    BI_R: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late tokens first: they walk longest
    write_blocks: tl.constexpr = (C + BI_W - 1) // BI_W
    if block < write_blocks:
        _walk_rows(
            p_k_idx, p_k_val, p_g, p_keys, p_weight, p_gate, p_place, p_before, p_k_eff, p_A, chunk, block * BI_W,
            C, W, W, GATES, False, BI_W, BW, BC,
        )  # fmt: skip
    else:
        _walk_rows(
            p_q_idx, p_q_val, p_g, p_keys, p_weight, p_gate, p_place, p_before, p_q_w, p_QK, chunk,
            (block - write_blocks) * BI_R, C, R, W, GATES, True, BI_R, BR, BC,
        )  # fmt: skip


@dataclass(frozen=True)
class Phase1Config:
    """Launch shapes of Phase 1's rows, from a chunk's shape alone."""

    rows_w: int  # tokens per program of the pairs kernel, for writes and for reads
    rows_r: int

    @staticmethod
    def from_shapes(chunk: int, writes: int, reads: int) -> Phase1Config:
        return Phase1Config(rows_w=rows_per_program(writes, chunk), rows_r=rows_per_program(reads, chunk))


def rows_per_program(width: int, chunk: int) -> int:
    """Tokens per one-warp program: about 128 walking entries.

    Measured on an H200, ms of a train step as graph replay with 128 and with 64: 5.37 and 5.43 with 16 writes of 64
    columns, 32.55 and 32.58 with 64 of 1024, 6.34 and 6.39 with 64 of 768.
    """
    return max(1, min(128 // triton.next_power_of_2(width), triton.next_power_of_2(chunk)))


class Phase1Scratch(NamedTuple):
    """Memory that Phase 1 needs while it runs, and that the writes of rows read afterwards (the last two)."""

    keys: Tensor  # [N, E] int64
    merged: Tensor  # [N, E] int64
    weight: Tensor  # [N, E] float32, sorted
    gate: Tensor  # [N, E] float32, sorted
    place: Tensor  # [N, E] int32, of each entry in the order; -1 for the first write of a slot
    before: Tensor  # [N, E] int32, sorted: the token of the slot's write before; -1 for the first write of a slot
    firsts: Tensor  # [N, E / PLACES] int32, how many places start a group
    held: Tensor  # [N, E / PLACES] int32, how many places hold an entry
    # What the decay-and-write asks for first. By group ordinal: the group's first weight and token. By entry: its
    # group's exp(Lt), or -1 if it is not the group's first one; and the group's next entry, or -1.
    lead_value: Tensor  # [N, E] float32
    lead_index: Tensor  # [N, E] int32


LEADS = ("lead_value", "lead_index")  # what of it is read after Phase 1


def empty_phase1_scratch(chunks: int, entries: int, like: Tensor) -> Phase1Scratch:
    dtypes = {"keys": torch.int64, "merged": torch.int64}
    dtypes |= dict.fromkeys(("weight", "gate", "lead_value"), torch.float32)
    tiles = triton.cdiv(entries, PLACES)
    widths = {"firsts": tiles, "held": tiles}
    return Phase1Scratch(
        *(
            empty((chunks, widths.get(name, entries)), like, dtypes.get(name, torch.int32))
            for name in Phase1Scratch._fields
        )
    )


def launch_phase1(
    k_idx: Tensor,
    k_val: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    fields: ChunkFields,
    scratch: Phase1Scratch,
    by_entry: bool = False,
    ordinals: Tensor | None = None,
) -> None:
    """Fills `fields` and the scratch's leads, by entry or by group, from contiguous [steps, P, C, *] staged inputs.

    ordinals: receives [steps, P, C, W] int32, the group's ordinal at its slot's first write and -1 at the others; what
    stands where there is no slot stays.
    """
    steps, streams, chunk, writes = k_idx.shape
    reads, gates = q_idx.shape[3], g.shape[3]
    chunks, entries = steps * streams, chunk * writes
    if not chunks:
        return
    config = Phase1Config.from_shapes(chunk, writes, reads)
    keys = scratch.keys
    sort_by_slot(k_idx, keys, scratch.merged, writes, fields.write_w)
    tiles = triton.cdiv(entries, PLACES)
    KernelCall(
        _order_kernel,
        (tiles, chunks),
        (
            *(keys, k_val, g, fields.order, scratch.weight, scratch.gate),
            *(scratch.place, scratch.before, scratch.firsts, scratch.held),
        ),
        dict(
            W=writes,
            GATES=gates,
            ENTRIES=entries,
            B=PLACES,
            num_warps=1,
            enable_fp_fusion=True,
        ),
    ).launch()
    KernelCall(
        _groups_kernel,
        (tiles, chunks),
        (
            *(keys, fields.order, scratch.weight, scratch.gate, scratch.before, scratch.firsts, scratch.held),
            *(fields.write_w, fields.group_start, fields.group_slot, fields.group_decay),
            *(scratch.lead_value, scratch.lead_index, ordinals),
        ),
        dict(
            W=writes,
            BY_ENTRY=by_entry,
            ENTRIES=entries,
            TILES=triton.next_power_of_2(tiles),
            B=PLACES,
            num_warps=1,
            enable_fp_fusion=True,
        ),
    ).launch()
    blocks = triton.cdiv(chunk, config.rows_w) + triton.cdiv(chunk, config.rows_r)
    KernelCall(
        _pairs_kernel,
        (blocks, chunks),
        (
            *(k_idx, k_val, g, q_idx, q_val, keys, scratch.weight, scratch.gate, scratch.place, scratch.before),
            *(fields.k_eff, fields.q_w, fields.A, fields.QK),
        ),
        dict(
            C=chunk,
            W=writes,
            R=reads,
            GATES=gates,
            BI_W=config.rows_w,
            BI_R=config.rows_r,
            BW=triton.next_power_of_2(writes),
            BR=triton.next_power_of_2(reads),
            BC=triton.next_power_of_2(chunk),
            num_warps=1,
            enable_fp_fusion=True,
        ),
    ).launch()
