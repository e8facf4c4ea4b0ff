"""Triton kernels of Phase 1's backward: the gradients of k_val, g and q_val, without an atomic operation.

    (sort    the joined entries by slot: the kernels of `slot_groups_kernels`)
    walk     every entry against the others of its slot: its weight's gradient, and dL or dLq
    gates    sums of dL and dLq over the entries of a slot that a write's gate counts in
    tokens   sums over a token's writes, where it has one gate

Sorted, a slot's writes and reads stand together by token, a token's write before its reads. A gate lies between
two entries if its write comes after the first one and no later than the second. Every place of the order is one element
of a program and walks its slot's places away from itself, backwards and forwards, gates added on the way; a program's
elements walk together, as long as one of them is inside its slot. Every output has one writer, every sum one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .layout import empty
from .phase1_kernels import rows_per_program
from .slot_groups_kernels import JoinedSort, any_of, empty_joined_sort, entry_at, entry_parts, launch_joined_sort

MAX_CHUNKS = 65535  # of one launch: CUDA's limit on that axis of a grid
MAX_ENTRIES = 2**23  # of one launch, so that the scratch, about 35 bytes an entry, does not grow with the call


@triton.jit
def _load_either(p_write, p_read, at, read, mask):
    """What stands at p_read for reads and at p_write for writes; zero outside the mask."""
    write = tl.load(p_write + at, mask=mask & ~read, other=0.0).to(tl.float32)
    return tl.where(read, tl.load(p_read + at, mask=mask & read, other=0.0).to(tl.float32), write)


@triton.jit
def _walk_kernel(
    p_keys,
    p_dk_eff,
    p_dq_w,
    p_dwrite_w,
    p_dA,
    p_dQK,
    p_k_val,
    p_g,
    p_q_val,
    p_dk_val,
    p_dq_val,
    p_dL,
    p_dlater,
    p_decay,
    p_firsts,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    GATES: tl.constexpr,
    B: tl.constexpr,
):
    """B places. p_dL: dL of a write without its write_w's part, dLq of a read. p_dlater: dwrite_w write_w.

    p_decay: exp(Lt). p_firsts: how many of the places hold the first write of a slot.
    """
    entries: tl.constexpr = C * (W + R)
    chunk = tl.program_id(1).to(tl.int64)
    p_keys += chunk * entries
    p_dA += chunk * (C * C)
    p_dQK += chunk * (C * C)
    p_k_val += chunk * (C * W)
    p_q_val += chunk * (C * R)
    p_g += chunk * (C * GATES)
    o_e = tl.program_id(0) * B + tl.arange(0, B)
    key = tl.load(p_keys + o_e, mask=o_e < entries, other=-1)
    slot = (key >> 32).to(tl.int32)
    entry = key.to(tl.int32)
    held = entry >= 0
    token, read, own = entry_parts(entry, W, R)
    write = held & ~read
    value = _load_either(p_k_val, p_q_val, own, read, held)
    dvalue = tl.zeros([B], tl.float32)
    dL = tl.zeros([B], tl.float32)

    # Backwards over the writes: the entry's own row of A or QK. `until` ends as L or Lq.
    until = tl.load(p_g + (own if GATES == W else token), mask=write, other=0.0)
    first = write
    distance = 1
    other, on = entry_at(p_keys, o_e - distance, slot, held, entries)
    while any_of(on):
        token_o, read_o, own_o = entry_parts(other, W, R)
        pair = on & ~read_o
        weight = tl.load(p_k_val + own_o, mask=pair, other=0.0).to(tl.float32)
        grad = _load_either(p_dA, p_dQK, token * C + token_o, read, pair) * tl.exp(until)
        dvalue += weight * grad
        dL += value * weight * grad
        until += tl.load(p_g + (own_o if GATES == W else token_o), mask=pair, other=0.0)
        first &= ~pair
        distance += 1
        other, on = entry_at(p_keys, o_e - distance, slot, on, entries)

    # Forwards from a write over all that comes later: its column of A and QK. `later` ends as Lt - L.
    later = tl.zeros([B], tl.float32)
    distance = 1
    other, on = entry_at(p_keys, o_e + distance, slot, write, entries)
    while any_of(on):
        token_o, read_o, own_o = entry_parts(other, W, R)
        later += tl.load(p_g + (own_o if GATES == W else token_o), mask=on & ~read_o, other=0.0)
        weight = _load_either(p_k_val, p_q_val, own_o, read_o, on)
        grad = _load_either(p_dA, p_dQK, token_o * C + token, read_o, on) * tl.exp(later)
        dvalue += weight * grad
        dL -= value * weight * grad
        distance += 1
        other, on = entry_at(p_keys, o_e + distance, slot, on, entries)

    deffective = _load_either(p_dk_eff + chunk * (C * W), p_dq_w + chunk * (C * R), own, read, held) * tl.exp(until)
    dwrite = tl.load(p_dwrite_w + chunk * (C * W) + own, mask=write, other=0.0) * tl.exp(later)
    dvalue += deffective + dwrite
    tl.store(p_dk_val + chunk * (C * W) + own, dvalue, mask=write)
    tl.store(p_dq_val + chunk * (C * R) + own, dvalue, mask=held & read)
    at = chunk * entries + o_e
    tl.store(p_dL + at, dL + deffective * value, mask=held)
    tl.store(p_dlater + at, dwrite * value, mask=write)
    tl.store(p_decay + at, tl.exp(until + later), mask=write)
    tl.store(p_firsts + chunk * tl.num_programs(0) + tl.program_id(0), tl.sum(first.to(tl.int32), axis=0))


@triton.jit
def _gates_kernel(
    p_keys,
    p_dL,
    p_dlater,
    p_decay,
    p_firsts,
    p_dgroup_decay,
    p_dgate,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    B: tl.constexpr,
):
    """B places. A write's gate counts in L and Lq from the write on, in Lt - L before it, and in Lt.

    So dLt - dL, whose dwrite_w write_w cancel from the write on, is never taken. TILES: at least the number of a
    chunk's programs, a power of two.
    """
    entries: tl.constexpr = C * (W + R)
    tile = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    o_t = tl.arange(0, TILES)
    earlier = tl.sum(tl.load(p_firsts + chunk * tl.num_programs(0) + o_t, mask=o_t < tile, other=0), axis=0)

    p_keys += chunk * entries
    o_e = tile * B + tl.arange(0, B)
    at = chunk * entries + o_e
    key = tl.load(p_keys + o_e, mask=o_e < entries, other=-1)
    slot = (key >> 32).to(tl.int32)
    entry = key.to(tl.int32)
    _, read, own = entry_parts(entry, W, R)
    write = (entry >= 0) & ~read

    total = tl.load(p_dL + at, mask=write, other=0.0)
    distance = 1
    _, on = entry_at(p_keys, o_e + distance, slot, write, entries)
    while any_of(on):
        total += tl.load(p_dL + at + distance, mask=on, other=0.0)
        distance += 1
        _, on = entry_at(p_keys, o_e + distance, slot, on, entries)

    first = write
    distance = 1
    other, on = entry_at(p_keys, o_e - distance, slot, write, entries)
    while any_of(on):
        _, read_o, _ = entry_parts(other, W, R)
        pair = on & ~read_o
        total += tl.load(p_dlater + at - distance, mask=pair, other=0.0)
        first &= ~pair
        distance += 1
        other, on = entry_at(p_keys, o_e - distance, slot, on, entries)

    group = earlier + tl.cumsum(first.to(tl.int32), axis=0) - 1  # the ordinal of the write's slot
    ddecay = tl.load(p_dgroup_decay + chunk * (C * W) + group, mask=write, other=0.0)
    total += ddecay * tl.load(p_decay + at, mask=write, other=0.0)
    tl.store(p_dgate + chunk * (C * W) + own, total, mask=write)


@triton.jit
def _tokens_kernel(p_dgate, p_k_idx, p_dg, C: tl.constexpr, W: tl.constexpr, BI: tl.constexpr, BW: tl.constexpr):
    chunk = tl.program_id(1).to(tl.int64)
    o_i = tl.program_id(0) * BI + tl.arange(0, BI)
    o_w = tl.arange(0, BW)
    m = (o_i < C)[:, None] & (o_w < W)[None, :]
    at = chunk * (C * W) + o_i[:, None] * W + o_w[None, :]
    held = tl.load(p_k_idx + at, mask=m, other=-1) >= 0
    dgate = tl.load(p_dgate + at, mask=held, other=0.0)
    tl.store(p_dg + chunk * C + o_i, tl.sum(dgate, axis=1), mask=o_i < C)


@dataclass(frozen=True)
class Phase1BwdConfig:
    """Launch shapes of Phase 1's backward, from a chunk's shape alone."""

    places: int  # entries per one-warp program
    rows: int  # tokens per program of the sums over tokens' writes

    @staticmethod
    def from_shapes(chunk: int, writes: int) -> Phase1BwdConfig:
        return Phase1BwdConfig(places=128, rows=rows_per_program(writes, chunk))


class Phase1BwdScratch(NamedTuple):
    """Memory that Phase 1's backward needs while it runs on N chunks of F = C * (W + R) sorted entries each."""

    dL: Tensor  # [N, F] float32, sorted, like the two that follow
    dlater: Tensor  # [N, F] float32
    decay: Tensor  # [N, F] float32
    firsts: Tensor  # [N, F / places] int32
    dgate: Tensor  # [N, C * W] float32, of each write's gate


def empty_phase1_bwd_sorted_scratch(chunks: int, chunk: int, writes: int, reads: int, like: Tensor) -> Phase1BwdScratch:
    entries = chunk * (writes + reads)
    tiles = triton.cdiv(entries, Phase1BwdConfig.from_shapes(chunk, writes).places)
    widths = {"firsts": tiles, "dgate": chunk * writes}
    dtypes = {"firsts": torch.int32}
    return Phase1BwdScratch(
        *(
            empty((chunks, widths.get(name, entries)), like, dtypes.get(name, torch.float32))
            for name in Phase1BwdScratch._fields
        )
    )


def empty_phase1_bwd_scratch(k_idx: Tensor, q_idx: Tensor) -> tuple[JoinedSort, Phase1BwdScratch]:
    """Scratch for ids [steps, P, C, W] and [steps, P, C, R], of so many of their chunks as one launch takes."""
    steps, streams, chunk, writes = k_idx.shape
    reads = q_idx.shape[3]
    entries = chunk * (writes + reads)
    chunks = min(steps * streams, MAX_CHUNKS, max(1, MAX_ENTRIES // entries))
    sort = empty_joined_sort(chunks, entries, k_idx)
    return sort, empty_phase1_bwd_sorted_scratch(chunks, chunk, writes, reads, k_idx)


def launch_phase1_bwd(
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outs: Sequence[Tensor],
    scratch: tuple[JoinedSort, Phase1BwdScratch],
) -> None:
    """Fills dk_val, dg and dq_val. All as the op has them, contiguous [steps, P, C, *]."""
    sides = [[x.flatten(0, 1) for x in side] for side in (grads, inputs, outs)]
    chunks, most = sides[0][0].shape[0], len(scratch[0].keys)
    for start in range(0, chunks, max(1, most)):
        count = min(most, chunks - start)
        sort = JoinedSort(*(x[:count] for x in scratch[0]))
        rest = Phase1BwdScratch(*(x[:count] for x in scratch[1]))
        some_grads, some_inputs, some_outs = ([x[start : start + count] for x in side] for side in sides)
        for x in some_outs:
            x.zero_()  # the kernels meet no entry without a slot
        launch_joined_sort(some_inputs[0], some_inputs[3], sort)
        launch_phase1_bwd_sorted(sort.keys, some_grads, some_inputs, some_outs, rest)


def launch_phase1_bwd_sorted(
    keys: Tensor,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outs: Sequence[Tensor],
    scratch: Phase1BwdScratch,
) -> None:
    """Fills dk_val, dg and dq_val of N chunks, at most 65,535, whose writes and reads are sorted already.

    What they hold for entries without a slot stays.

    Args:
        keys: [N, F] int64, as `launch_joined_sort` and `launch_slot_groups` sort them.
        grads: dk_eff, dq_w, dwrite_w, dA, dQK [N, C, *] and dgroup_decay [N, C * W], float32.
        inputs: k_idx, k_val, g, q_idx, q_val [N, C, *]. outs: dk_val, dg, dq_val. All contiguous.
        scratch: as `empty_phase1_bwd_sorted_scratch` has it for N chunks.
    Note: launches only, so that it can be captured.
    """
    dk_eff, dq_w, dwrite_w, dA, dQK, dgroup_decay = grads
    k_idx, k_val, g, q_idx, q_val = inputs
    dk_val, dg, dq_val = outs
    chunks, chunk, writes = k_idx.shape
    if not chunks:
        return
    reads, gates = q_idx.shape[2], g.shape[2]
    config = Phase1BwdConfig.from_shapes(chunk, writes)
    sizes = {"C": chunk, "W": writes, "R": reads, "B": config.places}
    tiles = scratch.firsts.shape[1]
    dgate = dg if gates == writes else scratch.dgate
    KernelCall(
        _walk_kernel,
        (tiles, chunks),
        (
            *(keys, dk_eff, dq_w, dwrite_w, dA, dQK, k_val, g, q_val, dk_val, dq_val),
            *(scratch.dL, scratch.dlater, scratch.decay, scratch.firsts),
        ),
        dict(**sizes, GATES=gates, num_warps=1, enable_fp_fusion=True),
    ).launch()
    KernelCall(
        _gates_kernel,
        (tiles, chunks),
        (keys, scratch.dL, scratch.dlater, scratch.decay, scratch.firsts, dgroup_decay, dgate),
        dict(**sizes, TILES=triton.next_power_of_2(tiles), num_warps=1, enable_fp_fusion=True),
    ).launch()
    if dgate is not dg:
        KernelCall(
            _tokens_kernel,
            (triton.cdiv(chunk, config.rows), chunks),
            (dgate, k_idx, dg),
            dict(
                C=chunk,
                W=writes,
                BI=config.rows,
                BW=triton.next_power_of_2(writes),
                num_warps=1,
                enable_fp_fusion=True,
            ),
        ).launch()
