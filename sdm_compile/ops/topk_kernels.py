"""Triton kernels of product-key top-k: one factor, the fold of two lists, the backward.

Best means smallest here: kernels work on losses, negated scores, so that every order is ascending. Sorts are bitonic
networks over keys without ties. A fold (`_fold_kernel`) of a list of prefixes and the columns of a factor

1. ranks both: a key is a loss and a column, and the best K of each list are kept;
2. adds up the pairs of ranks (i, j) that can be among the k best, and sorts their losses: the k-th is the last to be
   kept. Losses ascend along the rows and columns of the table of pairs, so a hook of it, row h from (h, h) on and
   column h below that, needs but a merge;
3. keeps what is better, and of the pairs as good as the last one those with the smallest slots;
4. sorts the kept slots and reads their scores again.

Keys are positive float32 numbers wherever they fit in, as a warp compares those fastest. Every row is computed by
itself: launch shapes do not reach the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_INF = tl.constexpr(math.inf)
_NAN = tl.constexpr(math.nan)
_MAX_INT32 = tl.constexpr(2**31 - 1)
_MAX_INT64 = tl.constexpr(2**63 - 1)
_NO_SLOT = tl.constexpr(2**30)  # above every slot that is an int32
PACKED_COLUMNS = 2**14  # how many fit under a bfloat16 loss in a float32 key
MAX_COLUMNS = 256  # ranked at once; no less than k may be
MAX_PROGRAMS = 4224


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def _upper(DIM: tl.constexpr, RANK: tl.constexpr):
    """Which elements are in the upper half of a cube's dimension: 0 is the innermost of RANK."""
    return tl.reshape(tl.arange(0, 2), [1] * (RANK - DIM - 1) + [2] + [1] * DIM) == 1


@triton.jit
def _partner(cube, DIM: tl.constexpr, RANK: tl.constexpr):
    """Every element's neighbour along a dimension."""
    if cube.dtype == tl.float32:
        bits = cube.to(tl.int32, bitcast=True)
        return (bits ^ tl.xor_sum(bits, RANK - 1 - DIM, True)).to(tl.float32, bitcast=True)
    else:
        return cube ^ tl.xor_sum(cube, RANK - 1 - DIM, True)


@triton.jit
def _merge(cube, STAGE: tl.constexpr, RANK: tl.constexpr, FLIP: tl.constexpr, DESCENDING: tl.constexpr):
    """Sorts the bitonic sequences along the STAGE innermost dimensions.

    FLIP: those in the upper half of dimension STAGE, which then exists, are sorted in descending order.
    """
    if cube.dtype == tl.float32:
        # Elements that are to become the larger of a pair change their sign, so that all take a minimum; the change
        # from one step's signs to the next one's is a multiplication, which a warp does beside its comparisons.
        order = -1.0 if DESCENDING else 1.0
        if FLIP:
            order = tl.where(_upper(STAGE, RANK), -1.0, 1.0)
        cube = cube * order
        signs = 1.0
        for i in tl.static_range(STAGE):
            new_signs = tl.where(_upper(STAGE - 1 - i, RANK), -1.0, 1.0)
            change = signs * new_signs  # a partner has the other sign
            cube = tl.minimum(cube * change, _partner(cube, STAGE - 1 - i, RANK) * change)
            signs = new_signs
        cube = cube * (signs * order)
    else:
        for i in tl.static_range(STAGE):
            other = _partner(cube, STAGE - 1 - i, RANK)
            larger = _upper(STAGE - 1 - i, RANK) != DESCENDING
            if FLIP:
                larger = larger != _upper(STAGE, RANK)
            cube = tl.where(larger, tl.maximum(cube, other), tl.minimum(cube, other))
    return cube


@triton.jit
def _smallest(keys, K: tl.constexpr, DESCENDING: tl.constexpr, FROM: tl.constexpr):
    """The K smallest of [ROWS, N] keys, sorted. ROWS, N >= 2 and K >= 2 are powers of two.

    FROM: the stage to start from, log2(length) of the bitonic sequences that the rows consist of.
    """
    log_n: tl.constexpr = _log2(keys.shape[1])
    log_k: tl.constexpr = _log2(K)
    rank: tl.constexpr = _log2(keys.shape[0]) + log_n
    cube = tl.reshape(keys, [2] * rank)
    for stage in tl.static_range(FROM, log_k + 1):
        cube = _merge(cube, stage, rank, stage < log_n, DESCENDING and stage == log_n)
    for half in tl.static_range(1, log_n - log_k + 1):
        # An ascending and a descending run of K: the smaller of each pair are the K smallest, and bitonic.
        cube = tl.min(cube, axis=rank - half - log_k)
        cube = _merge(cube, log_k, rank - half, half < log_n - log_k, DESCENDING and half == log_n - log_k)
    return tl.reshape(cube, [keys.shape[0], K])


@triton.jit
def _place(N: tl.constexpr, ROWS: tl.constexpr):
    """The place in `_to_rows` of each element of [LANES, ROWS, N / LANES], which a warp loads lane by lane."""
    LANES: tl.constexpr = min(N, 32 // ROWS)
    lane = tl.arange(0, LANES)[:, None, None]
    n = tl.arange(0, N // LANES)[None, None, :]
    if N // LANES >= 4:
        place = (n // (N // LANES // 2)) * (N // 2) + lane * (N // LANES // 2) + n % (N // LANES // 2)
    else:
        place = lane * (N // LANES) + n
    return tl.broadcast_to(place, [LANES, ROWS, N // LANES])


@triton.jit
def _to_rows(x):
    """[LANES, ROWS, N / LANES] to [ROWS, N], neighbours in one thread where a sort meets them most. Moves nothing."""
    LANES: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    if x.shape[2] >= 4:
        x = tl.permute(tl.reshape(x, [LANES, ROWS, 2, x.shape[2] // 2]), [1, 2, 0, 3])
    else:
        x = tl.permute(x, [1, 0, 2])
    return tl.reshape(x, [ROWS, x.numel // ROWS])


@triton.jit
def _order(loss):
    """int32 in the order of float32 losses that are not -0.0; NaN last, all equal."""
    bits = loss.to(tl.int32, bitcast=True)
    return tl.where(loss == loss, bits ^ ((bits >> 31) & _MAX_INT32), _MAX_INT32)


@triton.jit
def _key(loss, column, PACKED: tl.constexpr):
    """A key in the order of loss and column, not the largest one of its dtype.

    PACKED: of a bfloat16 loss and 14 bits of the column, as a positive float32. Else int64.
    """
    if PACKED:
        bits = ((_order(loss) >> 2) & -16384) + 2**29
        return (bits | column).to(tl.float32, bitcast=True)
    else:
        return (_order(loss).to(tl.int64) << 32) | column


@triton.jit
def _key_column(key, PACKED: tl.constexpr):
    if PACKED:
        return key.to(tl.int32, bitcast=True) & 16383
    else:
        return key.to(tl.int32)


@triton.jit
def _key_word(key, PACKED: tl.constexpr):
    """What a list holds: the column; if PACKED, the bfloat16 loss's bits above it."""
    column = _key_column(key, PACKED)
    if PACKED:
        order = (key.to(tl.int32, bitcast=True) - 2**29) << 2
        return ((order ^ ((order >> 31) & _MAX_INT32)) & -65536) | column
    else:
        return column


@triton.jit
def _rank(
    p_x, o_row, widths, WIDTH: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr
):
    """The K (or N, if fewer) best of each row's columns as sorted keys; a row's first column is at p_x + o_row.

    widths: the number of each row's columns; WIDTH: the largest of them. N: how many to sort at once. FULL: all
    widths are N. Keys past a row's width are the largest.
    """
    INNER: tl.constexpr = min(N, 8 * (32 // min(o_row.shape[0], 32)))
    o_n = tl.arange(0, N // INNER)[None, :, None] * INNER + tl.arange(0, INNER)[None, None, :]
    if WIDTH <= N:
        return _rank_tile(p_x, o_row, o_n, widths, N, K, PACKED, FULL, False)
    else:
        best = tl.full([o_row.shape[0], K], _INF if PACKED else _MAX_INT64, tl.float32 if PACKED else tl.int64)
        for start in range(0, WIDTH, N):
            tile = _rank_tile(p_x, o_row, start + o_n, widths, N, K, PACKED, FULL, True)
            best = _smallest(tl.minimum(best, tile), K, False, _log2(K))
        return best


@triton.jit
def _rank_tile(
    p_x,
    o_row,
    o_n,
    widths,
    N: tl.constexpr,
    K: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
    DESCENDING: tl.constexpr,
):
    """The best of the columns o_n [1, N / INNER, INNER] of each row."""
    p_x = p_x + o_row[:, None, None] + o_n
    m_n = o_n < widths[:, None, None]
    if FULL:
        x = tl.load(p_x)
    else:
        x = tl.load(p_x, mask=m_n, other=0.0)
    keys = _key(0.0 - x.to(tl.float32), o_n, PACKED)
    if not FULL:
        keys = tl.where(m_n, keys, _INF if PACKED else _MAX_INT64)
    return _smallest(tl.reshape(keys, [o_row.shape[0], N]), min(K, N), DESCENDING, 1)


@triton.jit
def _hook_pairs(place, FIRST: tl.constexpr, HALF: tl.constexpr):
    """Pairs (h, j >= h), best first, in the lower half of 2 HALF places, and (i > h, h), best last, in the upper half.

    h counts from FIRST, one to 2 HALF places; see `_valid` for the result.
    """
    h = FIRST + place // (2 * HALF)
    n = place % (2 * HALF)
    rest = tl.where(n < HALF, n, 2 * HALF - n)
    return tl.where(n < HALF, 256 * h + h + rest, 256 * (h + rest) + h)


@triton.jit
def _other_pairs(place, FIRST: tl.constexpr, k: tl.constexpr, ROOT: tl.constexpr):
    """The pairs of the hooks h = FIRST .. ROOT - 1, one after the other; see `_valid` for the result."""
    pair = 0 * place + 65535
    start = 0
    for h in tl.static_range(FIRST, ROOT):
        pair = tl.where(place >= start, 257 * h + place - start, pair)
        start += k // (h + 1) - h
        pair = tl.where(place >= start, 257 * h + 256 * (place - start + 1), pair)
        start += k // (h + 1) - h - 1
    return tl.where(place < start, pair, 65535)


@triton.jit
def _valid(pair, k: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr):
    """A pair of ranks (i, j) is 256 i + j; negative if it is none of the k best, or i or j no rank."""
    i, j = pair >> 8, pair & 255
    return tl.where(((i + 1) * (j + 1) <= k) & (i < N0) & (j < N1), pair, -1)


@triton.jit
def _candidates(
    p_lists, p_prefix, p_factor, pairs, N1: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr
):
    """Losses, NaN where there is no pair, and slots, numbered within this fold. The pointers are [1, ROWS, 1]."""
    m_c = pairs >= 0
    i = tl.load(p_lists + (pairs >> 8), mask=m_c, other=0).to(tl.int32)
    j = tl.load(p_lists + K + (pairs & 255), mask=m_c, other=0).to(tl.int32)
    if PACKED:
        loss = (i & -65536).to(tl.float32, bitcast=True) + (j & -65536).to(tl.float32, bitcast=True)
        i &= 16383
        j &= 16383
    else:
        a = tl.load(p_prefix + i, mask=m_c, other=0.0).to(tl.float32)
        b = tl.load(p_factor + j, mask=m_c, other=0.0).to(tl.float32)
        loss = 0.0 - (a + b)
    return tl.where(m_c, loss, _NAN), i.to(dtype) * N1 + j


@triton.jit
def _infinite_or_nan(loss, pairs, last):
    """Losses of rows whose last one is not finite, as numbers: 0 finite, 1 infinite, 2 NaN, 3 no pair."""
    grade = tl.where(loss == _INF, 1.0, tl.where(pairs >= 0, 2.0, 3.0))
    return tl.where(last == _INF, tl.where(loss < _INF, 0.0, grade), loss)


@triton.jit
def _count(loss, last):
    """[LANES, ROWS]: how many are better than the last one, and, in units of 65536, how many as good as it."""
    return tl.sum(tl.where(loss < last, 1, tl.where(loss == last, 65536, 0)), axis=2)


@triton.jit
def _keep(p_work, loss, slot, last, before, better):
    """Stores the slots better than the last one from p_work on, those as good as it from p_work + better on.

    before: how many there are [LANES, ROWS] before those of each lane, counted as _count does.
    """
    count = tl.where(loss < last, 1, tl.where(loss == last, 65536, 0))
    count = before[:, :, None] + tl.cumsum(count, axis=2)
    place = tl.where(loss < last, count & 65535, better + (count >> 16)) - 1
    tl.store(p_work + place, slot, mask=loss <= last)


@triton.jit
def _smallest_slots(slots, K: tl.constexpr, DESCENDING: tl.constexpr, FROM: tl.constexpr):
    """`_smallest` of slots: int64, or int32 of 0 .. _NO_SLOT, whose bits sort as float32 too."""
    if slots.dtype == tl.int32:
        return _smallest(slots.to(tl.float32, bitcast=True), K, DESCENDING, FROM).to(tl.int32, bitcast=True)
    else:
        return _smallest(slots, K, DESCENDING, FROM)


@triton.jit
def _smallest_ties_first(p_ties, ties, wanted, K: tl.constexpr, no_slot: tl.constexpr):
    """Puts the smallest of each row's slots [ties] first, as many as wanted; p_ties, ties, wanted: [ROWS, 1]."""
    o_k = tl.arange(0, K)[None, :]
    best = tl.full([ties.shape[0], K], no_slot, p_ties.dtype.element_ty)
    for start in range(0, tl.max(tl.max(ties, axis=1), axis=0), K):
        some = tl.load(p_ties + start + o_k, mask=start + o_k < ties, other=no_slot)
        best = _smallest_slots(tl.minimum(best, _smallest_slots(some, K, True, 1)), K, False, _log2(K))
    tl.debug_barrier()
    tl.store(p_ties + o_k, best, mask=o_k < wanted)
    tl.debug_barrier()


@triton.jit
def _fold_kernel(
    p_prefix,
    p_prefix_ids,
    p_scores,
    p_values,
    p_ids,
    p_work,
    rows,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    BN0: tl.constexpr,
    BN1: tl.constexpr,
    k: tl.constexpr,
    ROOT: tl.constexpr,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    HOOKS: tl.constexpr,
    OTHERS: tl.constexpr,
    FIRST: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The COUNT best of N0 prefixes and the N1 columns at OFFSET in scores [rows, WIDTH], by ascending id.

    p_prefix, p_prefix_ids: the prefixes' scores and ids [rows, N0], by ascending id; but if FIRST, they are the columns
    before OFFSET. p_work: [programs, ROWS, (2 + HOOKS) K + OTHERS] int32 if N0 * N1 is at most 2**30, else int64. K: k
    as a power of two. HOOKS: how many hooks after the first are sorted as such; OTHERS: places for all other pairs.
    BN0, BN1: how many to rank at once; equal if FIRST.
    """
    WORK: tl.constexpr = (2 + HOOKS) * K + OTHERS
    log_k: tl.constexpr = _log2(K)
    dtype: tl.constexpr = p_work.dtype.element_ty
    no_slot: tl.constexpr = _NO_SLOT if dtype == tl.int32 else _MAX_INT64
    o_r = tl.arange(0, ROWS)
    o_k = tl.arange(0, K)[None, :]
    pairs = (_valid(_hook_pairs(_place(2 * K, ROWS), 0, K), k, N0, N1),)
    pairs += (_valid(_hook_pairs(_place(HOOKS * K, ROWS), 1, K // 2), k, N0, N1),)
    if OTHERS:
        pairs += (_valid(_other_pairs(_place(OTHERS, ROWS), 1 + HOOKS, k, ROOT), k, N0, N1),)
    p_work += tl.program_id(0).to(tl.int64) * (ROWS * WORK)
    p_work_row = p_work + o_r[:, None] * WORK
    p_work_spread = p_work + o_r[None, :, None] * WORK

    for batch in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.minimum(batch * ROWS + o_r.to(tl.int64), rows - 1)  # what is past the end repeats the last row
        o_prefix = row * (WIDTH if FIRST else N0)
        o_factor = row * WIDTH + OFFSET
        tl.debug_barrier()  # the batch before has read its slots
        if FIRST:
            o_list = tl.arange(0, 2 * ROWS)
            widths = N0 + (o_list % 2) * (N1 - N0)
            o_both = tl.minimum(batch * ROWS + (o_list // 2).to(tl.int64), rows - 1) * WIDTH + (o_list % 2) * OFFSET
            keys = _rank(p_scores, o_both, widths, max(N0, N1), BN0, K, PACKED, FULL)
            p_list = p_work + (o_list // 2 * WORK + o_list % 2 * K)[:, None]
            tl.store(p_list + tl.arange(0, min(K, BN0))[None, :], _key_word(keys, PACKED))
        else:
            keys = _rank(p_prefix, o_prefix, N0 + 0 * o_r, N0, BN0, K, False, False)
            tl.store(p_work_row + tl.arange(0, min(K, BN0))[None, :], _key_word(keys, False))
            keys = _rank(p_scores, o_factor, N1 + 0 * o_r, N1, BN1, K, False, False)
            tl.store(p_work_row + K + tl.arange(0, min(K, BN1))[None, :], _key_word(keys, False))
        tl.debug_barrier()

        loss, slot, keys = (), (), ()
        for n in tl.static_range(len(pairs)):
            p_a = p_prefix + o_prefix[None, :, None]
            p_b = p_scores + o_factor[None, :, None]
            some, slots = _candidates(p_work_spread, p_a, p_b, pairs[n], N1, K, PACKED, dtype)
            loss += (some,)
            slot += (slots,)
            keys += (_to_rows(tl.where(some == some, some, _INF)),)
        # Rows and columns of pairs ascend even with infinities of both signs, as NaN counts as infinite here.
        best = _smallest(keys[0], K, False, log_k + 1)
        best = tl.minimum(best, _smallest(keys[1], K, True, log_k))
        if OTHERS:
            best = _smallest(best, K, False, log_k)
            best = tl.minimum(best, _smallest(keys[2], K, True, 1))
        if COUNT < K:
            best = _smallest(best, K, False, log_k)
        last = tl.max(tl.where(o_k < COUNT, best, -_INF), axis=1)[None, :, None]
        if tl.max(tl.max(tl.max(last, axis=2), axis=1), axis=0) == _INF:
            graded = ()
            finite_or_infinite = tl.zeros([ROWS], tl.int32)
            for n in tl.static_range(len(pairs)):
                some = _infinite_or_nan(loss[n], pairs[n], last)
                finite_or_infinite += tl.sum(tl.sum((some < 2.0).to(tl.int32), axis=2), axis=0)
                graded += (some,)
            loss = graded
            last = tl.where(last == _INF, tl.where(finite_or_infinite >= COUNT, 1.0, 2.0)[None, :, None], last)

        tl.debug_barrier()  # the slots go where the lists were
        before = ()
        total = tl.zeros([ROWS], tl.int32)
        for n in tl.static_range(len(pairs)):
            count = _count(loss[n], last)
            before += (total[None, :] + tl.cumsum(count, axis=0) - count,)
            total += tl.sum(count, axis=0)
        better = total & 65535
        for n in tl.static_range(len(pairs)):
            _keep(p_work_spread, loss[n], slot[n], last, before[n], better[None, :, None])
        tl.debug_barrier()
        ties = total >> 16
        if tl.max(better + ties, axis=0) > COUNT:
            _smallest_ties_first(p_work_row + better[:, None], ties[:, None], COUNT - better[:, None], K, no_slot)
        kept = _smallest_slots(tl.load(p_work_row + o_k, mask=o_k < COUNT, other=no_slot), K, False, 1)

        m_out = o_k < COUNT
        i, j = kept // N1, kept % N1
        a = tl.load(p_prefix + o_prefix[:, None] + i, mask=m_out, other=0.0).to(tl.float32)
        b = tl.load(p_scores + o_factor[:, None] + j, mask=m_out, other=0.0).to(tl.float32)
        if FIRST:
            ids = kept.to(tl.int64)
        else:
            ids = tl.load(p_prefix_ids + row[:, None] * N0 + i, mask=m_out, other=0) * N1 + j
        o_out = row[:, None] * COUNT + o_k
        tl.store(p_values + o_out, (a + b).to(p_values.dtype.element_ty), mask=m_out)
        tl.store(p_ids + o_out, ids, mask=m_out)


@triton.jit
def _one_factor_kernel(
    p_scores,
    p_values,
    p_ids,
    rows,
    N: tl.constexpr,
    BN: tl.constexpr,
    k: tl.constexpr,
    K: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The k best columns of scores [rows, N], ascending."""
    o_k = tl.arange(0, min(K, BN))[None, :]
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_out = o_k < k
    o_row = tl.minimum(o_row, rows - 1)  # what is past the end repeats the last row
    keys = _rank(p_scores, o_row * N, N + tl.zeros([ROWS], tl.int32), N, BN, K, PACKED, False)
    columns = _smallest_slots(tl.where(o_k < k, _key_column(keys, PACKED), _NO_SLOT), min(K, BN), False, 1)
    values = tl.load(p_scores + o_row[:, None] * N + columns, mask=m_out, other=0.0)
    tl.store(p_values + o_row[:, None] * k + o_k, values, mask=m_out)
    tl.store(p_ids + o_row[:, None] * k + o_k, columns.to(tl.int64), mask=m_out)


@triton.jit
def _topk_bwd_kernel(
    p_dvalues,
    p_ids,
    p_dscores,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    STRIDE: tl.constexpr,
    k: tl.constexpr,
    BN: tl.constexpr,
):
    """A row's gradients added to the N columns at OFFSET that its slots were chosen by, in the order of the slots.

    STRIDE: how many slots share a column of this and the factors before it.
    """
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for n in range(k):
        column = tl.load(p_ids + row * k + n) // STRIDE
        if OFFSET > 0:
            column %= N
        total += tl.where(o_n == column, tl.load(p_dvalues + row * k + n).to(tl.float32), 0.0)
    tl.store(p_dscores + row * WIDTH + OFFSET + o_n, total.to(p_dscores.dtype.element_ty), mask=o_n < N)


@dataclass(frozen=True)
class FoldConfig:
    """How one fold, or the ranking of a single factor, is launched."""

    k: int  # of the ranks and places, a power of two
    hooks: int  # hooks after the first that are sorted as such
    others: int  # places for the pairs of all other hooks
    columns: tuple[int, int]  # ranked at once, of the prefixes and of the factor
    rows: int  # of scores, at a time and program
    programs: int

    @classmethod
    def from_shapes(cls, rows: int, widths: tuple[int, int], k: int) -> FoldConfig:
        places = max(2, triton.next_power_of_2(k))
        hooks = 1 if k <= 32 else 2 if k <= 128 else 4  # the fewest places to sort, by counting comparisons
        others = sum(2 * (k // h - h) + 1 for h in range(hooks + 2, math.isqrt(k) + 1))
        columns = tuple(min(MAX_COLUMNS, max(2, triton.next_power_of_2(n))) for n in widths)
        return cls(
            k=places,
            hooks=hooks,
            others=max(places, triton.next_power_of_2(others)) if others else 0,
            columns=(columns[0], columns[1]),
            rows=1,
            programs=min(MAX_PROGRAMS, rows),
        )


def launch_topk(
    scores: Tensor,
    factors: Sequence[int],
    k: int,
    values: Tensor,
    ids: Tensor,
    configure: Callable[[int, tuple[int, int], int], FoldConfig] = FoldConfig.from_shapes,
) -> None:
    """Fills values and ids [rows, k] from contiguous scores [rows, sum(factors)]."""
    rows, width = scores.shape
    if not rows:
        return
    packed = scores.dtype == torch.bfloat16 and max(factors) <= PACKED_COLUMNS
    if len(factors) == 1:
        config = configure(rows, (width, 1), k)
        _one_factor_kernel[(triton.cdiv(rows, config.rows),)](
            *(scores, values, ids, rows),
            N=width,
            BN=config.columns[0],
            k=k,
            K=config.k,
            PACKED=packed,
            ROWS=config.rows,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return
    prefix, prefix_ids, slots = scores, ids, factors[0]
    for f, n in enumerate(factors[1:], 1):
        first, count = f == 1, min(k, slots * n)
        if f == len(factors) - 1:
            fold_values, fold_ids = values, ids
        else:
            fold_values = scores.new_empty((rows, count), dtype=torch.float32)
            fold_ids = ids.new_empty((rows, count))
        config = configure(rows, (slots, n), k)
        columns = (max(config.columns),) * 2 if first else config.columns
        places = (2 + config.hooks) * config.k + config.others
        work = ids.new_empty(
            (config.programs, config.rows, places), dtype=torch.int32 if slots * n <= _NO_SLOT.value else torch.int64
        )
        _fold_kernel[(config.programs,)](
            *(prefix, prefix_ids, scores, fold_values, fold_ids, work, rows),
            WIDTH=width,
            OFFSET=sum(factors[:f]),
            N0=slots,
            N1=n,
            BN0=columns[0],
            BN1=columns[1],
            k=k,
            ROOT=math.isqrt(k),
            COUNT=count,
            K=config.k,
            HOOKS=config.hooks,
            OTHERS=config.others,
            FIRST=first,
            PACKED=packed and first,
            FULL=slots == n == columns[0],
            ROWS=config.rows,
            num_warps=1,
            enable_fp_fusion=False,
        )
        prefix, prefix_ids, slots = fold_values, fold_ids, count


def launch_topk_bwd(dvalues: Tensor, ids: Tensor, factors: Sequence[int], dscores: Tensor) -> None:
    """Fills dscores [rows, sum(factors)] from contiguous dvalues and ids [rows, k]."""
    rows, k = dvalues.shape
    if not rows:
        return
    offset, stride = 0, math.prod(factors)
    for n in factors:
        stride //= n
        columns = min(MAX_COLUMNS, triton.next_power_of_2(n))
        _topk_bwd_kernel[(rows, triton.cdiv(n, columns))](
            *(dvalues, ids, dscores),
            WIDTH=dscores.shape[1],
            OFFSET=offset,
            N=n,
            STRIDE=stride,
            k=k,
            BN=columns,
            num_warps=1,
            enable_fp_fusion=False,
        )
        offset += n
