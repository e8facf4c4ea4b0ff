"""Triton kernels that group a chunk's writes and reads by slot, for backward passes.

    join     a chunk's ids, those of a token's reads behind those of its writes
    (sort    the joined entries by slot: the forward's kernels)
    kinds    which places of the order start a group, and which of these groups have a write
    groups   starts of the groups, and their ordinals among those with a write

A chunk of C tokens has F = C * (W + R) joined entries: entry i * (W + R) + c is write c of token i, or its read c - W.
A key is (slot << 32 | entry), or `NO_ENTRY` without a slot. Sorted, a slot's entries stand together by token, a token's
writes before its reads. Every element has one writer; nothing here is atomic, allocates or waits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .layout import empty
from .slot_sort_kernels import NO_ENTRY, PLACES, inside, sort_by_slot, token_of

_ONE_WARP = {"num_warps": 1, "enable_fp_fusion": True}


@triton.jit
def entry_parts(entry, W: tl.constexpr, R: tl.constexpr):
    """Of joined entries: the token, whether it is a read, and the entry among the chunk's writes or among its reads."""
    token = token_of(entry, W + R)
    column = entry - token * (W + R)
    read = column >= W
    return token, read, tl.where(read, token * R + column - W, token * W + column)


@triton.jit
def entry_at(p_keys, place, slot, walking, ENTRIES: tl.constexpr):
    """The entries at sorted places, and who of those `walking` is still inside its slot there."""
    key = tl.load(p_keys + place, mask=walking & (place >= 0) & (place < ENTRIES), other=-1)
    entry = key.to(tl.int32)
    return entry, (entry >= 0) & ((key >> 32).to(tl.int32) == slot)


@triton.jit
def any_of(mask):
    return tl.max(mask.to(tl.int32), axis=0) > 0


@triton.jit
def _join_kernel(p_k_idx, p_q_idx, p_ids, C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """B joined entries."""
    entries: tl.constexpr = C * (W + R)
    chunk = tl.program_id(1).to(tl.int64)
    o_e = tl.program_id(0) * B + tl.arange(0, B)
    m_e = inside(o_e, entries, B)
    _, read, own = entry_parts(o_e, W, R)
    written = tl.load(p_k_idx + chunk * (C * W) + own, mask=m_e & ~read, other=-1)
    ids = tl.where(read, tl.load(p_q_idx + chunk * (C * R) + own, mask=m_e & read, other=-1), written)
    tl.store(p_ids + chunk * entries + o_e, ids, mask=m_e)


@triton.jit
def _kinds_kernel(
    p_keys,
    p_kind,
    p_firsts,
    p_written,
    p_held,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """B places. p_kind: 2 where a group with a write starts, 1 where one without does, 0 elsewhere.

    p_firsts, p_written, p_held: how many of the places start a group, start one with a write, and hold an entry.
    """
    entries: tl.constexpr = C * (W + R)
    chunk = tl.program_id(1).to(tl.int64)
    p_keys += chunk * entries
    # Taken as scattered places, so that loads and stores of all kinds keep one layout.
    o_e = tl.max_contiguous(tl.program_id(0) * B + tl.arange(0, B), 1)
    m_e = inside(o_e, entries, B)
    key = tl.load(p_keys + o_e, mask=m_e, other=NO_ENTRY)
    before = tl.load(p_keys + o_e - 1, mask=m_e & (o_e > 0), other=-1)
    slot = (key >> 32).to(tl.int32)
    entry = key.to(tl.int32)
    held = entry >= 0
    first = held & (slot != (before >> 32).to(tl.int32))

    # From the group's first entry on until a write, or until the group ends.
    _, read, _ = entry_parts(entry, W, R)
    written = first & ~read
    distance = 1
    other, on = entry_at(p_keys, o_e + distance, slot, first & read, entries)
    while any_of(on):
        _, read, _ = entry_parts(other, W, R)
        written |= on & ~read
        distance += 1
        other, on = entry_at(p_keys, o_e + distance, slot, on & read, entries)

    tl.store(p_kind + chunk * entries + o_e, first.to(tl.int8) + written.to(tl.int8), mask=m_e)
    tile = chunk * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_firsts + tile, tl.sum(first.to(tl.int32), axis=0))
    tl.store(p_written + tile, tl.sum(written.to(tl.int32), axis=0))
    tl.store(p_held + tile, tl.sum(held.to(tl.int32), axis=0))


@triton.jit
def _slot_groups_kernel(
    p_keys,
    p_kind,
    p_firsts,
    p_written,
    p_held,
    p_start,
    p_slot,
    p_lead,
    p_ordinal,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    B: tl.constexpr,
):
    """B places of one chunk. Each fills one group: its own if it starts one, else an unused one, from the end on.

    TILES: at least the number of a chunk's programs, a power of two.
    """
    ENTRIES: tl.constexpr = C * (W + R)
    tile = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    o_t = tl.arange(0, TILES)
    at_tile = chunk * tl.num_programs(0) + o_t
    groups_before = tl.sum(tl.load(p_firsts + at_tile, mask=o_t < tile, other=0), axis=0)
    written_before = tl.sum(tl.load(p_written + at_tile, mask=o_t < tile, other=0), axis=0)
    held_count = tl.sum(tl.load(p_held + at_tile, mask=o_t < tl.num_programs(0), other=0), axis=0)

    o_e = tl.max_contiguous(tile * B + tl.arange(0, B), 1)
    m_e = inside(o_e, ENTRIES, B)
    key = tl.load(p_keys + chunk * ENTRIES + o_e, mask=m_e, other=0)
    kind = tl.load(p_kind + chunk * ENTRIES + o_e, mask=m_e, other=0)
    first = kind > 0
    written = kind > 1
    groups = groups_before + tl.cumsum(first.to(tl.int32), axis=0)  # until each place, inclusive
    ordinal = written_before + tl.cumsum(written.to(tl.int32), axis=0) - 1
    group = tl.where(first, groups - 1, ENTRIES - 1 - (o_e - groups))
    tl.store(p_start + chunk * (ENTRIES + 1) + group, tl.where(first, o_e, held_count), mask=m_e)
    tl.store(p_slot + chunk * ENTRIES + group, tl.where(first, (key >> 32).to(tl.int32), -1), mask=m_e)
    token, read, _ = entry_parts(tl.maximum(key.to(tl.int32), 0), W, R)
    tl.store(p_lead + chunk * ENTRIES + group, tl.where(first, 2 * token + read.to(tl.int32), -1), mask=m_e)
    tl.store(p_ordinal + chunk * ENTRIES + group, tl.where(written, ordinal, -1), mask=m_e)
    if tile == 0:
        tl.store(p_start + chunk * (ENTRIES + 1) + ENTRIES, held_count)


class JoinedSort(NamedTuple):
    """The sorted keys of N chunks' F joined entries each, and what the sort needs."""

    keys: Tensor  # [N, F] int64
    ids: Tensor  # [N, F] int32
    merged: Tensor  # [N, F] int64


def empty_joined_sort(chunks: int, entries: int, like: Tensor) -> JoinedSort:
    dtypes = (torch.int64, torch.int32, torch.int64)
    return JoinedSort(*(empty((chunks, entries), like, dtype) for dtype in dtypes))


def launch_joined_sort(k_idx: Tensor, q_idx: Tensor, sort: JoinedSort) -> None:
    """Fills sort.keys, ascending, from contiguous ids [..., C, W] and [..., C, R] int32 of N <= 65,535 chunks."""
    if not sort.keys.numel():
        return
    _join_call(k_idx, q_idx, sort.ids).launch()
    sort_by_slot(sort.ids, sort.keys, sort.merged, math.gcd(k_idx.shape[-1], q_idx.shape[-1]))


def _join_call(k_idx: Tensor, q_idx: Tensor, ids: Tensor) -> KernelCall:
    return KernelCall(_join_kernel, _grid(ids), (k_idx, q_idx, ids), {**_sizes(k_idx, q_idx), "B": PLACES, **_ONE_WARP})


class SlotGroups(NamedTuple):
    """A chunk's writes and reads grouped by slot, groups in ascending slot order; of N chunks, F entries each."""

    keys: Tensor  # [N, F] int64 sorted (slot << 32 | entry); `NO_ENTRY` for entries without a slot, last
    start: Tensor  # [N, F + 1] int32, group o is keys[start[o] : start[o + 1]]; unused groups are empty, at the end
    slot: Tensor  # [N, F] int32, -1 if unused
    lead: Tensor  # [N, F] int32, 2 * the token of the group's first entry, and one more for a read; -1 if unused
    ordinal: Tensor  # [N, F] int32, the slot's ordinal in `ChunkFields.group_slot`; -1 if only read, or unused


class SlotGroupsScratch(NamedTuple):
    """Memory that the grouping needs while it runs."""

    ids: Tensor  # [N, F] int32
    merged: Tensor  # [N, F] int64
    kind: Tensor  # [N, F] int8, sorted: 2 where a group with a write starts, 1 where one without does, else 0
    firsts: Tensor  # [N, F / PLACES] int32, how many places start a group
    written: Tensor  # [N, F / PLACES] int32, how many places start a group with a write
    held: Tensor  # [N, F / PLACES] int32, how many places hold an entry


def empty_slot_groups(
    chunks: int, chunk: int, writes: int, reads: int, like: Tensor
) -> tuple[SlotGroups, SlotGroupsScratch]:
    """Memory for the groups of N = `chunks` chunks of C = `chunk` tokens. All of it has N as its first size."""
    entries = chunk * (writes + reads)
    sort = empty_joined_sort(chunks, entries, like)
    tiles = [empty((chunks, triton.cdiv(entries, PLACES)), like, torch.int32) for _ in range(3)]
    groups = SlotGroups(
        keys=sort.keys,
        start=empty((chunks, entries + 1), like, torch.int32),
        **{name: empty((chunks, entries), like, torch.int32) for name in ("slot", "lead", "ordinal")},
    )
    return groups, SlotGroupsScratch(sort.ids, sort.merged, empty((chunks, entries), like, torch.int8), *tiles)


def launch_slot_groups(k_idx: Tensor, q_idx: Tensor, groups: SlotGroups, scratch: SlotGroupsScratch) -> None:
    """Fills `groups`.

    Args:
        k_idx, q_idx: contiguous [..., C, W] and [..., C, R] int32, of N chunks; negative means no slot.
        groups, scratch: as `empty_slot_groups` has them for N chunks.
    Raises:
        UnsupportedConfigurationError: more than 65,535 chunks; callers cut.
    Note: launches only, so that it can be captured; the same bits every time.
    """
    launch_joined_sort(k_idx, q_idx, JoinedSort(groups.keys, scratch.ids, scratch.merged))
    for call in _group_calls(k_idx, q_idx, groups, scratch):
        call.launch()


def _group_calls(
    k_idx: Tensor, q_idx: Tensor, groups: SlotGroups, scratch: SlotGroupsScratch
) -> tuple[KernelCall, KernelCall]:
    """What follows the sort."""
    grid = _grid(groups.keys)
    counts = (scratch.kind, scratch.firsts, scratch.written, scratch.held)
    kinds = {**_sizes(k_idx, q_idx), "B": PLACES, **_ONE_WARP}
    starts = {**_sizes(k_idx, q_idx), "TILES": triton.next_power_of_2(grid[0]), "B": PLACES, **_ONE_WARP}
    return (
        KernelCall(_kinds_kernel, grid, (groups.keys, *counts), kinds),
        KernelCall(_slot_groups_kernel, grid, (groups.keys, *counts, *groups[1:]), starts),
    )


def _grid(entries: Tensor) -> tuple[int, int]:
    """PLACES of [N, F] per program."""
    return triton.cdiv(entries.shape[1], PLACES), entries.shape[0]


def _sizes(k_idx: Tensor, q_idx: Tensor) -> dict[str, int]:
    chunk, writes = k_idx.shape[-2:]
    return {"C": chunk, "W": writes, "R": q_idx.shape[-1]}
