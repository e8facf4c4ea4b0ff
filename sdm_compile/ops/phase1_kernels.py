"""Triton kernels of Phase 1: sort a chunk's write entries by slot, then walk the groups.

    sort     tiles of a chunk's entries by the key (slot << 32 | entry)
    merge    sorted runs into longer ones, each entry finding its place by binary search; the last pass also carries
             weights and gates along
    groups   ordinals, starts and slots of the groups; gate sums over later entries by a segmented scan
    pairs    rows of A and QK, all of a token's entries walking their groups backwards together

A key is unique, its order is (slot, token, write), and entries without a slot have the key `NO_ENTRY`, the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import ChunkFields, empty

NO_ENTRY = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _sort_kernel(p_k_idx, p_keys, entries, TILE: tl.constexpr):
    chunk = tl.program_id(1).to(tl.int64)
    o_e = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = tl.load(p_k_idx + chunk * entries + o_e, mask=o_e < entries, other=-1).to(tl.int64)
    keys = tl.where(ids >= 0, (ids << 32) | o_e.to(tl.int64), NO_ENTRY)
    tl.store(p_keys + chunk * entries + o_e, tl.sort(keys), mask=o_e < entries)


@triton.jit
def _first_at_least(p_keys, low, high, key, STEPS: tl.constexpr):
    """Binary search: the first place in [low, high) whose key is not below `key`, or high. 2**STEPS > high - low."""
    for _ in tl.static_range(STEPS):
        open_ = low < high
        middle = (low + high) // 2
        below = tl.load(p_keys + middle, mask=open_, other=0) < key
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    return low


@triton.jit
def _merge_kernel(
    p_keys,
    p_merged,
    p_k_val,
    p_g,
    p_weight,
    p_gate,
    entries,
    run,
    W: tl.constexpr,
    GATES: tl.constexpr,
    WAYS: tl.constexpr,
    STEPS: tl.constexpr,
    LAST: tl.constexpr,
    B: tl.constexpr,
):
    """Merges every WAYS neighbouring sorted runs of `run` entries. LAST: carry each entry's weight and gate along."""
    chunk = tl.program_id(1).to(tl.int64)
    o_e = tl.program_id(0) * B + tl.arange(0, B)
    m_e = o_e < entries
    key = tl.load(p_keys + chunk * entries + o_e, mask=m_e, other=NO_ENTRY)
    own = o_e // run
    first = own // WAYS * WAYS
    # Entries without a slot share one key: they keep their order, being placed behind the equal ones of earlier runs.
    other = first[:, None] + tl.arange(0, WAYS)[None, :]
    low = tl.minimum(other * run, entries)
    high = tl.where(other == own[:, None], low, tl.minimum(low + run, entries))
    found = _first_at_least(p_keys + chunk * entries, low, high, key[:, None], STEPS)
    behind = (key == NO_ENTRY)[:, None] & (other < own[:, None])
    place = first * run + o_e % run + tl.sum(tl.where(behind, high, found) - low, axis=1)
    tl.store(p_merged + chunk * entries + place, key, mask=m_e)
    if LAST:
        held = m_e & (key != NO_ENTRY)
        entry = key.to(tl.int32)
        weight = tl.load(p_k_val + chunk * entries + entry, mask=held, other=0.0).to(tl.float32)
        gate_at = chunk * entries + entry if GATES == W else chunk * (entries // W) + entry // W
        gate = tl.load(p_g + gate_at, mask=held, other=0.0)
        tl.store(p_weight + chunk * entries + place, weight, mask=held)
        tl.store(p_gate + chunk * entries + place, gate, mask=held)


@triton.jit
def _segment_add(sum_a, starts_a, sum_b, starts_b):
    return tl.where(starts_b != 0, sum_b, sum_a + sum_b), starts_a | starts_b


@triton.jit
def _groups_kernel(
    p_keys,
    p_weight,
    p_gate,
    p_order,
    p_write_w,
    p_group_start,
    p_group_slot,
    p_group_decay,
    p_first_weight,
    p_first_token,
    entries,
    W: tl.constexpr,
    TILES: tl.constexpr,
    B: tl.constexpr,
):
    """One chunk. Each group's first weight and token are stored beside its ordinal as well."""
    chunk = tl.program_id(0).to(tl.int64)
    p_keys += chunk * entries
    p_weight += chunk * entries
    p_gate += chunk * entries
    p_order += chunk * entries
    p_write_w += chunk * entries
    p_group_start += chunk * (entries + 1)
    p_group_slot += chunk * entries
    p_group_decay += chunk * entries
    p_first_weight += chunk * entries
    p_first_token += chunk * entries

    groups = tl.zeros([], tl.int32)
    held_count = tl.zeros([], tl.int32)
    for tile in range(TILES):
        o_e = tile * B + tl.arange(0, B)
        m_e = o_e < entries
        key = tl.load(p_keys + o_e, mask=m_e, other=NO_ENTRY)
        before = tl.load(p_keys + o_e - 1, mask=m_e & (o_e > 0), other=-1)
        held = key != NO_ENTRY
        first = held & ((key >> 32) != (before >> 32))
        ordinal = groups + tl.cumsum(first.to(tl.int32), 0) - 1
        tl.store(p_order + o_e, tl.where(held, key.to(tl.int32), -1), mask=m_e)
        tl.store(p_group_start + ordinal, o_e, mask=first)
        tl.store(p_group_slot + ordinal, (key >> 32).to(tl.int32), mask=first)
        groups += tl.sum(first.to(tl.int32), 0)
        held_count += tl.sum(held.to(tl.int32), 0)
    for tile in range(TILES):
        o_e = tile * B + tl.arange(0, B)
        unused = (o_e >= groups) & (o_e < entries)
        tl.store(p_group_start + o_e, held_count + tl.zeros([B], tl.int32), mask=unused)
        tl.store(p_group_slot + o_e, tl.full([B], -1, tl.int32), mask=unused)
        tl.store(p_group_decay + o_e, tl.full([B], 1.0, tl.float32), mask=unused)
        tl.store(p_write_w + o_e, tl.zeros([B], tl.float32), mask=o_e < entries)  # entries without a slot keep it
    tl.store(p_group_start + entries, held_count)

    tl.debug_barrier()
    # Backwards: the sum of the gates of the group's later entries, scanned within groups, carried from tile to tile.
    carry = tl.zeros([], tl.float32)
    ordinal_end = groups
    for back in range(TILES):
        o_b = tl.arange(0, B)
        o_e = (TILES - 1 - back) * B + (B - 1 - o_b)
        m_e = o_e < entries
        key = tl.load(p_keys + o_e, mask=m_e, other=NO_ENTRY)
        before = tl.load(p_keys + o_e - 1, mask=m_e & (o_e > 0), other=-1)
        after = tl.load(p_keys + o_e + 1, mask=o_e + 1 < entries, other=NO_ENTRY)
        held = key != NO_ENTRY
        slot = key >> 32
        more = held & (slot == (after >> 32))
        gate = tl.load(p_gate + o_e, mask=held, other=0.0)
        gate_after = tl.load(p_gate + o_e + 1, mask=more, other=0.0)
        weight = tl.load(p_weight + o_e, mask=held, other=0.0)
        later, ended = tl.associative_scan((gate_after, (~more).to(tl.int32)), 0, _segment_add)
        later = tl.where(ended == 0, later + carry, later)
        carry = tl.sum(tl.where(o_b == B - 1, later, 0.0), 0)
        entry = key.to(tl.int32)
        write_w = weight * tl.exp(later)
        tl.store(p_write_w + entry, write_w, mask=held)
        first = held & (slot != (before >> 32))
        ordinal = ordinal_end - tl.cumsum(first.to(tl.int32), 0)
        tl.store(p_group_decay + ordinal, tl.exp(gate + later), mask=first)
        tl.store(p_first_weight + ordinal, write_w, mask=first)
        tl.store(p_first_token + ordinal, entry // W, mask=first)
        ordinal_end -= tl.sum(first.to(tl.int32), 0)


@triton.jit
def _walk_rows(
    p_idx,
    p_val,
    p_keys,
    p_weight,
    p_gate,
    p_effective,
    p_out,
    entries,
    chunk,
    token,
    C: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    READ: tl.constexpr,
    BI: tl.constexpr,
    BN: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Rows token to token + BI - 1 of A (or QK), and their k_eff (or q_w): their N entries walk backwards together."""
    o_i = token + tl.arange(0, BI)
    o_n = tl.arange(0, BN)
    m_i = o_i < C
    m_in = m_i[:, None] & (o_n < N)[None, :]
    at = chunk * C * N + o_i[:, None] * N + o_n[None, :]
    p_keys += chunk * entries
    p_weight += chunk * entries
    p_gate += chunk * entries
    ids = tl.load(p_idx + at, mask=m_in, other=-1)
    val = tl.load(p_val + at, mask=m_in, other=0.0).to(tl.float32)
    valid = m_in & (ids >= 0)
    slot = ids.to(tl.int64)
    # A read starts at the last write at or before its token; a write at the one before itself, with its own gate.
    entry = (o_i[:, None] + 1) * W + tl.zeros_like(o_n)[None, :] if READ else o_i[:, None] * W + o_n[None, :]
    key = (slot << 32) | entry.to(tl.int64)
    low = tl.zeros([BI, BN], tl.int32)
    found = _first_at_least(p_keys, low, tl.where(valid, entries, 0), key, STEPS)
    total = tl.zeros([BI, BN], tl.float32)
    if not READ:
        total = tl.load(p_gate + found, mask=valid, other=0.0)
    place = found - 1
    there = tl.load(p_keys + place, mask=valid & (place >= 0), other=-1)
    inside = valid & (place >= 0) & ((there >> 32) == slot)
    stands = tl.where(inside, there.to(tl.int32) // W, -1)  # the token whose write the entry stands at
    weight = tl.load(p_weight + place, mask=inside, other=0.0)
    gate = tl.load(p_gate + place, mask=inside, other=0.0)
    decay = tl.exp(total)
    columns = tl.minimum(token + BI, C)
    for back in range(columns):
        j = columns - 1 - back
        here = stands == j
        pair = tl.sum(tl.where(here, val * weight * decay, 0.0), axis=1)
        tl.store(p_out + (chunk * C + o_i) * C + j, pair, mask=m_i)
        if tl.max(tl.max(here.to(tl.int32), axis=1), axis=0) > 0:
            total = tl.where(here, total + gate, total)
            decay = tl.exp(total)
            place = tl.where(here, place - 1, place)
            there = tl.load(p_keys + place, mask=here & (place >= 0), other=-1)
            inside = here & (place >= 0) & ((there >> 32) == slot)
            stands = tl.where(here, tl.where(inside, there.to(tl.int32) // W, -1), stands)
            weight = tl.where(here, tl.load(p_weight + place, mask=inside, other=0.0), weight)
            gate = tl.where(here, tl.load(p_gate + place, mask=inside, other=0.0), gate)
    for j in range(columns, C):
        tl.store(p_out + (chunk * C + o_i) * C + j, tl.zeros([BI], tl.float32), mask=m_i)
    tl.store(p_effective + at, tl.where(valid, val * decay, 0.0), mask=m_in)


@triton.jit
def _pairs_kernel(
    p_k_idx,
    p_k_val,
    p_q_idx,
    p_q_val,
    p_keys,
    p_weight,
    p_gate,
    p_k_eff,
    p_q_w,
    p_A,
    p_QK,
    entries,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BI_W: tl.constexpr,
    BI_R: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
    STEPS: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late tokens first: they walk longest
    write_blocks: tl.constexpr = (C + BI_W - 1) // BI_W
    if block < write_blocks:
        _walk_rows(
            p_k_idx, p_k_val, p_keys, p_weight, p_gate, p_k_eff, p_A, entries, chunk, block * BI_W,
            C, W, W, False, BI_W, BW, STEPS,
        )  # fmt: skip
    else:
        _walk_rows(
            p_q_idx, p_q_val, p_keys, p_weight, p_gate, p_q_w, p_QK, entries, chunk, (block - write_blocks) * BI_R,
            C, R, W, True, BI_R, BR, STEPS,
        )  # fmt: skip


@dataclass(frozen=True)
class Phase1Config:
    """Launch shapes of Phase 1, from a chunk's shape alone."""

    tile: int  # entries sorted by one program
    ways: int  # runs merged per pass
    merge: int  # entries per program of a merge, which search all runs at once
    scan: int  # entries scanned at once by the groups kernel
    scan_warps: int
    rows_w: int  # tokens per program of the pairs kernel, for writes and for reads
    rows_r: int

    @staticmethod
    def from_shapes(chunk: int, writes: int, reads: int) -> Phase1Config:
        entries = triton.next_power_of_2(chunk * writes)
        # Measured on an H200, ms per whole call at 4096 and 32,768 entries a chunk: tiles of 1024 merged four at a time
        # 13.73 and 11.76, of 512 eight at a time 13.85 and 11.93. Scans of 1024 with four warps win where chunks fill
        # the device (0.080 against 0.115 at 4096 entries), and lose where they are long (0.196 against 0.115 at 32,768)
        # or few, as in a slab.
        scan = min(entries, 4096)
        return Phase1Config(
            tile=min(entries, 1024),
            ways=4,
            merge=min(entries, 128),
            scan=scan,
            scan_warps=4 if scan <= 1024 else 8,
            rows_w=_rows(writes, chunk),
            rows_r=_rows(reads, chunk),
        )


def _rows(width: int, chunk: int) -> int:
    """Tokens per one-warp program: about 128 walking entries (measured: 128 at 64 and 128 wide, 64 to 128 at 16)."""
    return max(1, min(128 // triton.next_power_of_2(width), triton.next_power_of_2(chunk)))


class Phase1Scratch(NamedTuple):
    """Memory that Phase 1 needs while it runs, and that the decay-and-write reads afterwards (the last two)."""

    keys: Tensor  # [N, E] int64
    merged: Tensor  # [N, E] int64
    weight: Tensor  # [N, E] float32, sorted
    gate: Tensor  # [N, E] float32, sorted
    first_weight: Tensor  # [N, E] float32, by group ordinal
    first_token: Tensor  # [N, E] int32, by group ordinal


def empty_phase1_scratch(chunks: int, entries: int, like: Tensor) -> Phase1Scratch:
    dtypes = (torch.int64, torch.int64, torch.float32, torch.float32, torch.float32, torch.int32)
    return Phase1Scratch(*(empty((chunks, entries), like, dtype) for dtype in dtypes))


def launch_phase1(
    k_idx: Tensor,
    k_val: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    fields: ChunkFields,
    scratch: Phase1Scratch,
) -> None:
    """Fills `fields` and the scratch's first writes from staged, contiguous [steps, P, C, *] inputs."""
    steps, streams, chunk, writes = k_idx.shape
    reads, gates = q_idx.shape[3], g.shape[3]
    chunks, entries = steps * streams, chunk * writes
    if not chunks:
        return
    config = Phase1Config.from_shapes(chunk, writes, reads)
    _sort_kernel[(triton.cdiv(entries, config.tile), chunks)](
        k_idx, scratch.keys, entries, TILE=config.tile, num_warps=4, enable_fp_fusion=True
    )
    keys, merged, run = scratch.keys, scratch.merged, config.tile
    while True:
        ways = min(config.ways, triton.next_power_of_2(triton.cdiv(entries, run)))
        last = run * ways >= entries
        _merge_kernel[(triton.cdiv(entries, config.merge), chunks)](
            *(keys, merged, k_val, g, scratch.weight, scratch.gate, entries, run),
            W=writes,
            GATES=gates,
            WAYS=ways,
            STEPS=run.bit_length(),
            LAST=last,
            B=config.merge,
            num_warps=4,
            enable_fp_fusion=True,
        )
        keys, merged, run = merged, keys, run * ways
        if last:
            break
    _groups_kernel[(chunks,)](
        *(keys, scratch.weight, scratch.gate, fields.order, fields.write_w),
        *(fields.group_start, fields.group_slot, fields.group_decay, scratch.first_weight, scratch.first_token),
        entries,
        W=writes,
        TILES=triton.cdiv(entries, config.scan),
        B=config.scan,
        num_warps=config.scan_warps,
        enable_fp_fusion=True,
    )
    blocks = triton.cdiv(chunk, config.rows_w) + triton.cdiv(chunk, config.rows_r)
    _pairs_kernel[(blocks, chunks)](
        *(k_idx, k_val, q_idx, q_val, keys, scratch.weight, scratch.gate),
        *(fields.k_eff, fields.q_w, fields.A, fields.QK, entries),
        C=chunk,
        W=writes,
        R=reads,
        BI_W=config.rows_w,
        BI_R=config.rows_r,
        BW=triton.next_power_of_2(writes),
        BR=triton.next_power_of_2(reads),
        STEPS=entries.bit_length(),
        num_warps=1,
        enable_fp_fusion=True,
    )
