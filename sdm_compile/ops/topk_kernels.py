"""Triton kernels of product-key top-k: ranking, the folds, the backward.

Best means smallest here: kernels work on losses, negated scores, which makes every order ascending. A loss orders as an
integer does (`_order`), and all sorts are bitonic networks over integer keys that have no ties, so that nothing but
the keys decides. A fold (`_fold_kernel`) of a prefix list and one factor

1. ranks both: key = (loss, column), the best K of them kept;
2. adds up the candidate pairs of ranks and sorts their losses: the k-th is the last one that is in;
3. keeps all smaller losses, and of those that equal the last one as many as still fit, by slot;
4. sorts the kept slots and reads their scores again.

Every row is computed by itself; launch shapes do not reach the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

MAX_INT32: tl.constexpr = tl.constexpr(2**31 - 1)
MAX_INT64: tl.constexpr = tl.constexpr(2**63 - 1)


@triton.jit
def _upper(DIM: tl.constexpr, RANK: tl.constexpr):
    """Which elements are in the upper half of a cube's dimension: 0 is the innermost of RANK."""
    return tl.reshape(tl.arange(0, 2), [1] * (RANK - DIM - 1) + [2] + [1] * DIM) == 1


@triton.jit
def _exchange(cube, DIM: tl.constexpr, RANK: tl.constexpr):
    """Puts the smaller of each pair along a dimension first."""
    other = cube ^ tl.xor_sum(cube, RANK - 1 - DIM, True)
    return tl.where(_upper(DIM, RANK), tl.maximum(cube, other), tl.minimum(cube, other))


@triton.jit
def _merge(cube, STAGE: tl.constexpr, RANK: tl.constexpr):
    """Sorts the bitonic sequences along the STAGE innermost dimensions."""
    for s in tl.static_range(STAGE):
        cube = _exchange(cube, STAGE - 1 - s, RANK)
    return cube


@triton.jit
def _merge_towards(cube, STAGE: tl.constexpr, RANK: tl.constexpr, LAST: tl.constexpr, DESCENDING: tl.constexpr):
    """`_merge`, descending in the upper half of dimension STAGE, or throughout: what the next stage needs."""
    if not LAST:
        flip = tl.where(_upper(STAGE, RANK), -1, 0).to(cube.dtype)
        cube = _merge(cube ^ flip, STAGE, RANK) ^ flip
    elif DESCENDING:
        cube = ~_merge(~cube, STAGE, RANK)
    else:
        cube = _merge(cube, STAGE, RANK)
    return cube


@triton.jit
def _smallest(keys, K: tl.constexpr, DESCENDING: tl.constexpr):
    """The K smallest of [ROWS, N] keys, sorted. ROWS, N >= 2 and K >= 2 are powers of two."""
    ROWS: tl.constexpr = keys.shape[0]
    log_rows: tl.constexpr = ROWS.bit_length() - 1
    log_n: tl.constexpr = keys.shape[1].bit_length() - 1
    log_k: tl.constexpr = K.bit_length() - 1
    rank: tl.constexpr = log_rows + log_n
    cube = tl.reshape(keys, [2] * rank)
    for stage in tl.static_range(1, log_k + 1):
        cube = _merge_towards(cube, stage, rank, stage == log_n, DESCENDING)
    for halving in tl.static_range(1, log_n - log_k + 1):
        # An ascending and a descending run of K: the smaller of each pair are the K smallest, and bitonic.
        cube = tl.min(cube, axis=rank - halving - log_k)
        cube = _merge_towards(cube, log_k, rank - halving, halving == log_n - log_k, DESCENDING)
    return tl.reshape(cube, [ROWS, K])


@triton.jit
def _merged(ascending, descending):
    """The K smallest of two sorted [ROWS, K], ascending."""
    ROWS: tl.constexpr = ascending.shape[0]
    log_rows: tl.constexpr = ROWS.bit_length() - 1
    log_k: tl.constexpr = ascending.shape[1].bit_length() - 1
    cube = tl.reshape(tl.minimum(ascending, descending), [2] * (log_rows + log_k))
    return tl.reshape(_merge(cube, log_k, log_rows + log_k), ascending.shape)


@triton.jit
def _order(loss):
    """int32 in the order of float32 losses that are not -0.0; NaN last, though below MAX_INT32."""
    bits = loss.to(tl.int32, bitcast=True)
    return tl.where(loss == loss, bits ^ ((bits >> 31) & MAX_INT32), MAX_INT32 - 1)


@triton.jit
def _spread(N: tl.constexpr, ROWS: tl.constexpr):
    """0 .. N - 1 for each row as [LANES, ROWS, N / LANES]: as a warp loads elements that are not neighbours."""
    LANES: tl.constexpr = min(N, 32 // ROWS)
    n = tl.arange(0, LANES)[:, None, None] + LANES * tl.arange(0, N // LANES)[None, None, :]
    return tl.broadcast_to(n, [LANES, ROWS, N // LANES])


@triton.jit
def _to_rows(x):
    """[LANES, ROWS, N / LANES] to [ROWS, N], neighbours in one thread: as a warp best sorts. Moves nothing."""
    return tl.reshape(tl.permute(x, [1, 0, 2]), [x.shape[1], x.shape[0] * x.shape[2]])


@triton.jit
def _to_spread(x, LANES: tl.constexpr):
    """Undoes _to_rows."""
    return tl.permute(tl.reshape(x, [x.shape[0], LANES, x.shape[1] // LANES]), [1, 0, 2])


@triton.jit
def _rank(
    p_x, o_row, widths, WIDTH: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr
):
    """The K (or N, if fewer) best of each row's columns as sorted keys, a row's first column at p_x + o_row.

    PACKED: int32 keys of a bfloat16 loss above 16 bits of the column; else int64 keys, loss and column of 32 bits each.
    Keys past a row's width are the largest. WIDTH: the largest of the widths. FULL: all are N, and rows aligned.
    """
    ROWS: tl.constexpr = o_row.shape[0]
    INNER: tl.constexpr = min(N, 8 * (32 // min(ROWS, 32)))
    o_n = tl.arange(0, N // INNER)[None, :, None] * INNER + tl.arange(0, INNER)[None, None, :]
    best = _tile_best(p_x, o_row, o_n, widths, N, K, PACKED, FULL, False)
    for start in range(N, WIDTH, N):
        best = _merged(best, _tile_best(p_x, o_row, start + o_n, widths, N, K, PACKED, FULL, True))
    return best


@triton.jit
def _tile_best(
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
    order = _order(0.0 - x.to(tl.float32))
    if PACKED:
        keys = (order & -65536) | o_n
        big: tl.constexpr = MAX_INT32
    else:
        keys = (order.to(tl.int64) << 32) | o_n
        big: tl.constexpr = MAX_INT64
    if not FULL:
        keys = tl.where(m_n, keys, big)
    return _smallest(tl.reshape(keys, [o_row.shape[0], N]), min(K, N), DESCENDING)


@triton.jit
def _columns(keys, PACKED: tl.constexpr):
    if PACKED:
        columns = keys & 65535
    else:
        columns = keys.to(tl.int32)
    return columns


@triton.jit
def _store_ranks(p_ranks, keys, PACKED: tl.constexpr):
    """Ranked keys [ROWS, KR] as words: the loss's bits and the column if PACKED, else the column."""
    if PACKED:
        words = keys ^ ((keys >> 31) & 0x7FFF0000)  # undoes _order
    else:
        words = keys.to(tl.int32)
    tl.store(p_ranks + tl.arange(0, keys.shape[1])[None, :], words)


@triton.jit
def _pairs(c, k: tl.constexpr, ROOT: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr):
    """The c-th pair of ranks (i, j) with (i + 1)(j + 1) <= k as 256 i + j; negative: no such pair, or no such rank.

    ROOT: the integer square root of k. Either i < ROOT: rows of pairs come first; or j < ROOT: columns follow.
    """
    pair = c
    start = k
    for i in tl.static_range(1, ROOT):
        pair = tl.where(c >= start, 256 * i + c - start, pair)
        start += k // (i + 1)
    for j in tl.static_range(ROOT):
        pair = tl.where(c >= start, 256 * (ROOT + c - start) + j, pair)
        start += k // (j + 1) - ROOT
    return tl.where((c < start) & ((pair >> 8) < N0) & ((pair & 255) < N1), pair, -1)


@triton.jit
def _candidates(
    p_work, p_prefix, p_factor, pairs, N1: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr
):
    """Order and slot, as a number in this fold, of spread candidate pairs. The pointers are [1, ROWS, 1]."""
    m_c = pairs >= 0
    i = tl.load(p_work + (pairs >> 8), mask=m_c, other=0).to(tl.int32)
    j = tl.load(p_work + K + (pairs & 255), mask=m_c, other=0).to(tl.int32)
    if PACKED:
        loss = (i & -65536).to(tl.float32, bitcast=True) + (j & -65536).to(tl.float32, bitcast=True)
        i &= 65535
        j &= 65535
    else:
        a = tl.load(p_prefix + i, mask=m_c, other=0.0).to(tl.float32)
        b = tl.load(p_factor + j, mask=m_c, other=0.0).to(tl.float32)
        loss = 0.0 - (a + b)
    return tl.where(m_c, _order(loss), MAX_INT32), i.to(dtype) * N1 + j


@triton.jit
def _keep(p_work, order, slot, last, before, better):
    """Stores the slots better than the last one from p_work on, those as good as it from p_work + better on.

    order, slot: spread. p_work: [1, ROWS, 1]. before: how many there are before these, as _count counts them.
    """
    count = _to_rows((order < last[None]).to(tl.int32) + ((order == last[None]).to(tl.int32) << 16))
    count = _to_spread(before + tl.cumsum(count, axis=1), order.shape[0])
    place = tl.where(order < last[None], count & 65535, better[None] + (count >> 16)) - 1
    tl.store(p_work + place, slot, mask=order <= last[None])


@triton.jit
def _count(order, last):
    """How many are better than the last one, and, in units of 65536, how many as good as it: [ROWS, 1]."""
    count = (order < last[None]).to(tl.int32) + ((order == last[None]).to(tl.int32) << 16)
    return tl.sum(_to_rows(count), axis=1, keep_dims=True)


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
    TAIL: tl.constexpr,
    FIRST: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The COUNT best of N0 prefixes and the N1 columns at OFFSET in scores [rows, WIDTH], by ascending id.

    p_prefix: the prefixes' scores [rows, N0]; or, if FIRST, they are the columns before OFFSET. p_prefix_ids [rows, N0]
    ascend. p_work: [programs, ROWS, 4 K + TAIL]; int32 if N0 * N1 fits in it, else int64. K: k as a power of two;
    4 K + TAIL: no less than the number of pairs. BN0, BN1: how many columns to sort at once; equal ones if FIRST.
    """
    WORK: tl.constexpr = 4 * K + TAIL
    dtype: tl.constexpr = p_work.dtype.element_ty
    big: tl.constexpr = MAX_INT32 if dtype == tl.int32 else MAX_INT64
    o_k = tl.arange(0, K)[None, :]
    main = _pairs(_spread(4 * K, ROWS), k, ROOT, N0, N1)
    if TAIL:
        tail = _pairs(4 * K + _spread(TAIL, ROWS), k, ROOT, N0, N1)
    p_work += tl.program_id(0).to(tl.int64) * (ROWS * WORK) + tl.arange(0, ROWS)[:, None] * WORK

    for batch in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        o_row = batch.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        m_row = o_row < rows
        o_row = tl.minimum(o_row, rows - 1)
        o_factor = o_row * WIDTH + OFFSET
        tl.debug_barrier()  # the last batch has read its slots
        if FIRST:
            o_prefix = o_row * WIDTH
            o_both = tl.arange(0, 2 * ROWS)
            widths = N0 + (o_both % 2) * (N1 - N0)
            o_both = tl.minimum(batch.to(tl.int64) * ROWS + o_both // 2, rows - 1) * WIDTH + (o_both % 2) * OFFSET
            keys = _rank(p_scores, o_both, widths, max(N0, N1), BN0, K, PACKED, FULL)
            p_both = p_work + tl.arange(0, 2)[None, :] * K
            _store_ranks(tl.reshape(p_both, [2 * ROWS, 1]), keys, PACKED)
        else:
            o_prefix = o_row * N0
            same = tl.zeros([ROWS], tl.int32)
            _store_ranks(p_work, _rank(p_prefix, o_prefix, N0 + same, N0, BN0, K, False, False), False)
            _store_ranks(p_work + K, _rank(p_scores, o_factor, N1 + same, N1, BN1, K, False, False), False)
        tl.debug_barrier()
        p_prefix_row = p_prefix + o_prefix[:, None]
        p_factor_row = p_scores + o_factor[:, None]

        order, slot = _candidates(p_work[None], p_prefix_row[None], p_factor_row[None], main, N1, K, PACKED, dtype)
        best = _smallest(_to_rows(order), K, False)
        if TAIL:
            tail_order, tail_slot = _candidates(
                p_work[None], p_prefix_row[None], p_factor_row[None], tail, N1, K, PACKED, dtype
            )
            best = _merged(best, _smallest(_to_rows(tail_order), K, True))
        last = tl.max(tl.where(o_k < COUNT, best, -MAX_INT32), axis=1, keep_dims=True)

        counts = _count(order, last)
        before = tl.zeros([ROWS, 1], tl.int32)
        if TAIL:
            counts += _count(tail_order, last)
        better = counts & 65535
        ties = counts >> 16
        tl.debug_barrier()  # the slots go where the ranks were
        _keep(p_work[None], order, slot, last, before, better)
        if TAIL:
            _keep(p_work[None], tail_order, tail_slot, last, _count(order, last), better)
        tl.debug_barrier()
        if tl.max(tl.max(better + ties, axis=1), axis=0) > COUNT:
            _smallest_ties_first(p_work + better, ties, COUNT - better, K, big)
        slot = _smallest(tl.load(p_work + o_k, mask=o_k < COUNT, other=big), K, False)

        m_out = (o_k < COUNT) & m_row[:, None]
        i, j = slot // N1, slot % N1
        a = tl.load(p_prefix_row + i, mask=m_out, other=0.0).to(tl.float32)
        b = tl.load(p_factor_row + j, mask=m_out, other=0.0).to(tl.float32)
        if FIRST:
            ids = slot.to(tl.int64)
        else:
            ids = tl.load(p_prefix_ids + o_row[:, None] * N0 + i, mask=m_out, other=0) * N1 + j
        o_out = o_row[:, None] * COUNT + o_k
        tl.store(p_values + o_out, (a + b).to(p_values.dtype.element_ty), mask=m_out)
        tl.store(p_ids + o_out, ids, mask=m_out)


@triton.jit
def _smallest_ties_first(p_ties, ties, wanted, K: tl.constexpr, big: tl.constexpr):
    """Puts the smallest of each row's slots [ties] first, as many as wanted; ties, wanted: [ROWS, 1]."""
    ROWS: tl.constexpr = ties.shape[0]
    o_k = tl.arange(0, K)[None, :]
    best = tl.full([ROWS, K], big, p_ties.dtype.element_ty)
    for start in range(0, tl.max(tl.max(ties, axis=1), axis=0), K):
        some = tl.load(p_ties + start + o_k, mask=start + o_k < ties, other=big)
        best = _merged(best, _smallest(some, K, True))
    tl.debug_barrier()
    tl.store(p_ties + o_k, best, mask=o_k < wanted)
    tl.debug_barrier()


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
    o_k = tl.arange(0, K)[None, :]
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_out = (o_k < k) & (o_row < rows)[:, None]
    o_row = tl.minimum(o_row, rows - 1)
    keys = _rank(p_scores, o_row * N, N + tl.zeros([ROWS], tl.int32), N, BN, K, PACKED, False)
    columns = _smallest(tl.where(o_k < k, _columns(keys, PACKED), MAX_INT32), K, False)
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
    """A row's gradients added to its columns OFFSET .. OFFSET + N - 1 of one factor, one after the other as stored.

    STRIDE: the number of slots to a column. OFFSET of 0 marks the first factor.
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
class TopkConfig:
    """How a fold is launched: `rows` rows to a program of one warp, and no more than `programs` programs."""

    rows: int
    programs: int

    @classmethod
    def from_shapes(cls, rows: int, k: int) -> TopkConfig:
        return cls(rows=2 if k <= 64 else 1, programs=min(4096, triton.cdiv(rows, 2)))
