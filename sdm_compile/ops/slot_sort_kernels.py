"""Triton kernels that sort the entries of chunks by slot: what Phase 1 and every backward pass begin with.

    sort     tiles of a chunk's entries by the key (slot << 32 | entry)
    merge    pairs of sorted runs

A key is unique, its order is (slot, entry), and entries without a slot have the key `NO_ENTRY`, the largest. Sorts and
merges are bitonic networks.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .bitonic import log2, upper
from .bound import KernelCall

NO_ENTRY = tl.constexpr(0x7FFFFFFFFFFFFFFF)
PROBES = tl.constexpr(32)  # keys compared at once in a search for one place
PLACES = 256  # places of one program of the order and groups kernels


@triton.jit
def inside(o_e, ENTRIES: tl.constexpr, B: tl.constexpr):
    """Which of the places there are: all of them where blocks of B fit the entries, and then no mask costs anything."""
    return o_e < ENTRIES if ENTRIES % B else tl.full(o_e.shape, True, tl.int1)


@triton.jit
def _merge_halves(cube, STAGE: tl.constexpr, RANK: tl.constexpr):
    """Sorts the bitonic sequences along the STAGE innermost of a cube's dimensions, every second one descending."""
    for i in tl.static_range(STAGE):
        other = cube ^ tl.xor_sum(cube, RANK - STAGE + i, True)  # each element's neighbour along the dimension
        larger = upper(STAGE - 1 - i, RANK)
        if STAGE < RANK:
            larger = larger != upper(STAGE, RANK)
        cube = tl.where((other < cube) != larger, other, cube)
    return cube


@triton.jit
def _sort_kernel(p_ids, p_keys, p_write_w, ENTRIES: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr):
    """Sorts TILE entries. RUN: how many neighbours likely ascend already, as a top-k gives them; a power of two.

    Entries without a slot belong to no group, so that their write_w, if one is wanted, is stored here.
    """
    rank: tl.constexpr = log2(TILE)
    chunk = tl.program_id(1).to(tl.int64)
    o_t = tl.arange(0, TILE)
    place = tl.program_id(0) * TILE + o_t
    # Every second run is taken backwards, which makes bitonic sequences of two.
    o_e = place ^ tl.where((o_t & RUN) != 0, RUN - 1, 0) if RUN > 1 else place
    m_e = inside(o_e, ENTRIES, TILE)
    p_ids += chunk * ENTRIES
    ids = tl.load(p_ids + o_e, mask=m_e, other=-1)
    after = tl.load(p_ids + tl.where(o_e % RUN == RUN - 1, o_e, o_e + 1), mask=m_e, other=-1) if RUN > 1 else ids
    key = tl.where(ids >= 0, (ids.to(tl.int64) << 32) | o_e.to(tl.int64), NO_ENTRY)
    cube = tl.reshape(key, [2] * rank)
    if tl.min(tl.minimum(ids, after - ids), axis=0) < 0:  # a missing slot, or a run that does not ascend
        if p_write_w is not None:
            tl.store(p_write_w + chunk * ENTRIES + o_e, tl.zeros([TILE], tl.float32), mask=m_e & (ids < 0))
        for stage in tl.static_range(1, log2(RUN) + 1):
            cube = _merge_halves(cube, stage, rank)
    for stage in tl.static_range(log2(RUN) + 1, rank + 1):
        cube = _merge_halves(cube, stage, rank)
    key = tl.reshape(cube, [TILE])
    tl.store(p_keys + chunk * ENTRIES + place, key, mask=inside(place, ENTRIES, TILE))


@triton.jit
def _split(p_a, p_b, count_a, count_b, ends, run):
    """How many of the `ends` [N] smallest keys of two sorted runs, of at most `run` keys each, the first one has."""
    low = tl.maximum(ends - count_b, 0)
    high = tl.minimum(ends, count_a)
    o_p = tl.arange(0, PROBES)[None, :] + 1
    left = run  # at least high - low; PROBES + 1 times less with every round
    while left > 0:
        step = (left + PROBES - 1) // PROBES
        probe = low[:, None] + o_p * step - 1
        m_p = probe < high[:, None]
        a = tl.load(p_a + probe, mask=m_p, other=NO_ENTRY)
        b = tl.load(p_b + ends[:, None] - 1 - probe, mask=m_p, other=-1)
        low += tl.sum((a < b).to(tl.int32), axis=1) * step
        high = tl.minimum(high, low + step - 1)
        left = step - 1
    return low


@triton.jit
def _merge_kernel(p_keys, p_merged, run, ENTRIES: tl.constexpr, B: tl.constexpr):
    """B entries of two neighbouring sorted runs' merger. A run has `run` entries, a power of two and at least B / 2."""
    chunk = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * B
    first = start & (-2 * run)
    count_a = tl.minimum(run, ENTRIES - first)
    count_b = tl.minimum(run, ENTRIES - first - count_a)
    p_a = p_keys + chunk * ENTRIES + first
    ends = tl.minimum(start - first + tl.arange(0, 2) * B, count_a + count_b)
    split = _split(p_a, p_a + count_a, count_a, count_b, ends, run)
    begin_a, end_a = tl.min(split, axis=0), tl.max(split, axis=0)
    begin_b, end_b = tl.min(ends, axis=0) - begin_a, tl.max(ends, axis=0) - end_a
    # What comes from the first run ascends, and behind it descends what comes from the second one: a bitonic sequence.
    o_b = tl.arange(0, B)
    from_a = begin_a + o_b
    from_b = begin_b + (B - 1 - o_b)
    m_a = from_a < end_a
    m_b = from_b < end_b if ENTRIES % B else ~m_a
    key = tl.load(p_a + tl.where(m_a, from_a, count_a + from_b), mask=m_a | m_b, other=NO_ENTRY)
    key = tl.reshape(_merge_halves(tl.reshape(key, [2] * log2(B)), log2(B), log2(B)), [B])
    place = start + o_b
    tl.store(p_merged + chunk * ENTRIES + place, key, mask=inside(place, ENTRIES, B))


@triton.jit
def token_of(entry, W: tl.constexpr):
    """The tokens of entries, which are not negative: an unsigned division is the shorter one."""
    return (entry.to(tl.uint32, bitcast=True) // W).to(tl.int32, bitcast=True)


@dataclass(frozen=True)
class SortConfig:
    """Launch shapes of a sort, from the number of a chunk's entries alone."""

    tile: int  # entries sorted by one program
    merge: int  # entries of a merge's result per program

    @staticmethod
    def from_shapes(entries: int) -> SortConfig:
        return SortConfig(tile=min(max(2, triton.next_power_of_2(entries)), 512), merge=512)

    def merges(self, entries: int) -> int:
        """How many rounds of merges follow."""
        return (max(1, triton.cdiv(entries, self.tile)) - 1).bit_length()


def sort_by_slot(ids: Tensor, keys: Tensor, scratch: Tensor, run: int, write_w: Tensor | None = None) -> None:
    """Fills keys [N, E] int64 with the sorted keys of ids: contiguous, E of each of the N chunks.

    scratch: like keys. run: how many neighbours likely ascend already; helps if it is a power of two. write_w: becomes
    zero where there is no slot.
    """
    chunks, entries = keys.shape
    config = SortConfig.from_shapes(entries)
    merges = config.merges(entries)
    source, target = (scratch, keys) if merges % 2 else (keys, scratch)  # every merge goes from one to the other
    KernelCall(
        _sort_kernel,
        (triton.cdiv(entries, config.tile), chunks),
        (ids, source, write_w),
        dict(
            ENTRIES=entries,
            RUN=min(run, config.tile) if run == triton.next_power_of_2(run) else 1,
            TILE=config.tile,
            num_warps=1,
            enable_fp_fusion=True,
        ),
    ).launch()
    block = min(config.merge, 2 * config.tile)
    for i in range(merges):
        KernelCall(
            _merge_kernel,
            (triton.cdiv(entries, block), chunks),
            (source, target, config.tile << i),
            dict(ENTRIES=entries, B=block, num_warps=1, enable_fp_fusion=True),
        ).launch()
        source, target = target, source
