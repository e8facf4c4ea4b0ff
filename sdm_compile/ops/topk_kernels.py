"""Triton kernels of product-key top-k: one factor, the fold of two lists, the backward.

Best means smallest here: kernels work on losses, negated scores, so that every order is ascending. Sorts, see
`bitonic`, are over keys without ties. A fold (`_fold_kernel`) of a list of prefixes and the columns of a factor

1. ranks both: a key is a loss and a column, and the best K of each list are kept;
2. adds up the pairs of ranks (i, j) that can be among the k best, and sorts their losses: the k-th is the last to be
   kept. Losses ascend along the rows and columns of the table of pairs, so a hook of it, row h from (h, h) on and
   column h below that, needs but a merge. Pairs that cannot be among the k best do no harm: none is better than the
   k-th, and those as good as it are sorted out in step 3;
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

from .bitonic import log2, smallest
from .bound import KernelCall
from .topk_ranks import MAX_INT64, entry, entry_loss, key_column, rank

_INF = tl.constexpr(math.inf)
_NO_SLOT = tl.constexpr(2**30)  # above every slot that is an int32
PACKED_COLUMNS = 2**14  # how many fit under a bfloat16 loss in a float32 key
MAX_COLUMNS = 256  # ranked at once; no less than k may be
MAX_PROGRAMS = 8448


@triton.constexpr_function
def _half(h, k):
    """The places of the row of hook h, and of its column: no fewer than k for hook 0, k / (h + 1) - h for others."""
    return k if h == 0 else k // 2 if h < 3 else k // 4


@triton.jit
def _other_pairs(place, FIRST: tl.constexpr, k: tl.constexpr, ROOT: tl.constexpr):
    """The pairs of ranks (i, j), as 256 i + j, of the hooks h = FIRST .. ROOT - 1, one after the other; else 65535."""
    pair = 0 * place + 65535
    start = 0
    for h in tl.static_range(FIRST, ROOT):
        pair = tl.where(place >= start, 257 * h + place - start, pair)
        start += k // (h + 1) - h
        pair = tl.where(place >= start, 257 * h + 256 * (place - start + 1), pair)
        start += k // (h + 1) - h - 1
    return tl.where(place < start, pair, 65535)


@triton.jit
def _is_pair(i, j, k: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr):
    """Whether there are the ranks i and j, and their pair can be among the k best."""
    return ((i + 1) * (j + 1) <= k) & (i < N0) & (j < N1)


@triton.jit
def _pairs(p_a, p_b, i, j, N1: tl.constexpr, dtype: tl.constexpr):
    """Losses, and slots numbered within this fold."""
    a, b = tl.load(p_a + i), tl.load(p_b + j)
    return entry_loss(a) + entry_loss(b), a.to(tl.int32).to(dtype) * N1 + b.to(tl.int32)


@triton.jit
def _infinite_or_nan(loss, is_pair):
    """Losses of rows whose last one is not finite, as numbers: 0 finite, 1 infinite, 2 NaN, 3 no pair."""
    return tl.where(is_pair, tl.where(loss < _INF, 0.0, tl.where(loss == _INF, 1.0, 2.0)), 3.0)


@triton.jit
def _below(x):
    """The largest float32 below x, NaN for -inf."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0.0, bits - 1, tl.where(x < 0.0, bits + 1, -(2**31) + 1))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_chosen(p_slots, before, slot, chosen):
    """Stores the chosen of slots [32, n]; before: how many have been [32] before those of each lane, then after."""
    count = chosen.to(tl.int32)
    tl.store(p_slots + (before[:, None] + tl.cumsum(count, axis=1) - 1), slot, mask=chosen)
    return before + tl.sum(count, axis=1)


@triton.jit
def _smallest_slots(slots, K: tl.constexpr, DESCENDING: tl.constexpr, FROM: tl.constexpr):
    """`smallest` of slots: int64, or int32 of 0 .. _NO_SLOT, whose bits sort as float32 too."""
    if slots.dtype == tl.int32:
        return smallest(slots.to(tl.float32, bitcast=True), K, DESCENDING, FROM).to(tl.int32, bitcast=True)
    else:
        return smallest(slots, K, DESCENDING, FROM)


@triton.jit
def _store_smallest(p_slots, p_ties, ties, wanted, K: tl.constexpr, no_slot: tl.constexpr):
    """Stores the smallest slots of p_ties [ties], as many as wanted."""
    dtype: tl.constexpr = p_ties.dtype.element_ty
    if ties <= 32:
        o_few = tl.arange(0, 32)[None, :]
        few = tl.load(p_ties + o_few, mask=o_few < ties, other=no_slot)
        tl.store(p_slots + o_few, _smallest_slots(few, 32, False, 1), mask=o_few < wanted)
    else:
        o_k = tl.arange(0, K)[None, :]
        best = tl.full([1, K], no_slot, dtype)
        for start in range(0, ties, K):
            some = tl.load(p_ties + start + o_k, mask=start + o_k < ties, other=no_slot)
            best = _smallest_slots(tl.minimum(best, _smallest_slots(some, K, True, 1)), K, False, log2(K))
        tl.store(p_slots + o_k, best, mask=o_k < wanted)


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
    WORK: tl.constexpr,
    FIRST: tl.constexpr,
    PACKED: tl.constexpr,
    FULL: tl.constexpr,
):
    """The COUNT best of N0 prefixes and the N1 columns at OFFSET in scores [rows, WIDTH], by ascending id.

    p_prefix, p_prefix_ids: the prefixes' scores and ids [rows, N0], by ascending id; but if FIRST, they are the columns
    before OFFSET. p_work: [programs, WORK] int64. K: k as a power of two. HOOKS: how many hooks are sorted as such;
    OTHERS: places for all other pairs. BN0, BN1: how many to rank at once; equal if FIRST.
    """
    log_k: tl.constexpr = log2(K)
    dtype: tl.constexpr = tl.int32 if N0 * N1 <= _NO_SLOT else tl.int64
    no_slot: tl.constexpr = _NO_SLOT if dtype == tl.int32 else MAX_INT64
    o_k = tl.arange(0, K)[None, :]
    # The list of prefixes and, after an entry for places without a pair, that of columns; then the chosen slots and the
    # tied ones. WORK is odd, lest lanes load more than one entry each, which would mix up their places in a list.
    p_a = p_work + tl.program_id(0).to(tl.int64) * WORK
    o_list = tl.arange(0, 4 * K)
    tl.store(p_a + o_list, tl.full([4 * K], 0x7F800000 << 32, tl.int64), mask=o_list < 2 * K + 1)

    i, j = (), ()
    for h in tl.static_range(HOOKS):
        o_h = tl.arange(0, 32)[:, None] + tl.arange(0, _half(h, K) // 32)[None, :] * 32
        i += (h, h + _half(h, K) - o_h)
        j += (h + o_h, h)
    if OTHERS:
        pairs = _other_pairs(tl.reshape(tl.arange(0, OTHERS), [32, OTHERS // 32]), HOOKS, k, ROOT)
        i += (tl.where(pairs < 65535, pairs >> 8, K),)
        j += (tl.where(pairs < 65535, pairs & 255, 0),)
    LANES: tl.constexpr = min(32, K)
    unsigned: tl.constexpr = tl.uint32 if dtype == tl.int32 else tl.uint64
    o_out = tl.reshape(tl.arange(0, K), [LANES, K // LANES])
    m_out = o_out < COUNT

    for batch in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full([], batch, tl.int64)
        # The same p_a, but of each row: its addresses need not be kept in registers all along.
        p_a = p_work + (tl.full([], batch, tl.uint32) % tl.num_programs(0).to(tl.uint32)).to(tl.int64) * WORK
        p_b = p_a + K + 1
        p_slots = (p_b + K).to(tl.pointer_type(dtype))
        p_ties = p_slots + K
        o_prefix = row * (WIDTH if FIRST else N0)
        o_factor = row * WIDTH + OFFSET
        tl.debug_barrier()  # the row before has read its slots
        if FIRST:
            o_both = tl.arange(0, 2)
            keys = rank(
                *(p_scores, row * WIDTH + o_both * OFFSET, N0 + o_both * (N1 - N0), max(N0, N1), BN0, K, PACKED, FULL)
            )
            o_n = o_both[:, None] * (K + 1) + tl.arange(0, min(K, BN0))[None, :]
            tl.store(p_a + o_n, entry(keys, PACKED))
        else:
            o_one = tl.zeros([1], tl.int64)
            keys = rank(p_prefix, o_prefix + o_one, N0 + o_one, N0, BN0, K, False, False)
            tl.store(p_a + tl.arange(0, min(K, BN0))[None, :], entry(keys, False))
            keys = rank(p_scores, o_factor + o_one, N1 + o_one, N1, BN1, K, False, False)
            tl.store(p_b + tl.arange(0, min(K, BN1))[None, :], entry(keys, False))
        tl.debug_barrier()

        # Rows and columns of pairs ascend even with infinities of both signs, as NaN counts as infinite here.
        keys, loss, slot = (), (), ()
        for n in tl.static_range(len(i)):
            some, slots = _pairs(p_a, p_b, i[n], j[n], N1, dtype)
            keys += (tl.reshape(tl.trans(tl.minimum(some, _INF)), [1, some.numel]),)
            loss += (some,)
            slot += (slots,)
        if HOOKS:
            best = tl.minimum(keys[0], keys[1])
        for h in tl.static_range(1, min(HOOKS, 3)):
            hook = tl.reshape(tl.permute(tl.join(keys[2 * h], keys[2 * h + 1]), [0, 2, 1]), [1, K])
            best = tl.minimum(smallest(best, K, False, log_k), smallest(hook, K, True, log_k))
        if HOOKS > 3:
            two = tl.join(tl.join(keys[6], keys[8]), tl.join(keys[7], keys[9]))  # [1, K / 4, hook, row or column]
            two = tl.reshape(tl.permute(two, [0, 2, 3, 1]), [1, K])
            best = tl.minimum(smallest(best, K, False, log_k), smallest(two, K, True, log_k - 1))
        if OTHERS:
            others = tl.reshape(keys[2 * HOOKS], [OTHERS // 32, 32])
            if OTHERS > K and OTHERS >= 128:  # halves that meet in a thread
                others = tl.permute(tl.reshape(others, [2, OTHERS // 64, 32]), [0, 2, 1])
            else:
                others = tl.trans(others)
            others = smallest(tl.reshape(others, [1, OTHERS]), K, True, 1)
            if HOOKS:
                best = tl.minimum(smallest(best, K, False, log_k), others)
            else:
                best = others
        if COUNT < K:
            best = smallest(best, K, False, 1 if HOOKS == 0 else log_k)
        last = tl.max(tl.max(tl.where(o_k < COUNT, best, -_INF), axis=1), axis=0)
        if last == _INF:
            graded = ()
            finite_or_infinite = 0
            for n in tl.static_range(len(i)):
                some = _infinite_or_nan(loss[n], _is_pair(i[n], j[n], k, N0, N1))
                finite_or_infinite += tl.sum(tl.sum((some < 2.0).to(tl.int32), axis=1), axis=0)
                graded += (some,)
            loss = graded
            last = tl.where(finite_or_infinite >= COUNT, 1.0, 2.0)

        lanes = tl.zeros([32], tl.int32)
        for n in tl.static_range(len(loss)):
            lanes += tl.sum((loss[n] <= last).to(tl.int32), axis=1)
        limit = last
        if tl.sum(lanes, axis=0) > COUNT:
            limit = _below(last)
            lanes = tl.zeros([32], tl.int32)
            ties = tl.zeros([32], tl.int32)
            for n in tl.static_range(len(loss)):
                lanes += tl.sum((loss[n] < last).to(tl.int32), axis=1)
                ties += tl.sum(((loss[n] == last) & _is_pair(i[n], j[n], k, N0, N1)).to(tl.int32), axis=1)
            before = tl.cumsum(ties, axis=0) - ties
            for n in tl.static_range(len(loss)):
                tie = (loss[n] == last) & _is_pair(i[n], j[n], k, N0, N1)
                before = _store_chosen(p_ties, before, slot[n], tie)
            tl.debug_barrier()
            better = tl.sum(lanes, axis=0)
            _store_smallest(p_slots + better, p_ties, tl.sum(ties, axis=0), COUNT - better, K, no_slot)
        before = tl.cumsum(lanes, axis=0) - lanes
        for n in tl.static_range(len(loss)):
            before = _store_chosen(p_slots, before, slot[n], loss[n] <= limit)
        tl.debug_barrier()
        kept = _smallest_slots(tl.load(p_slots + o_k, mask=o_k < COUNT, other=no_slot), K, False, 1)

        # [LANES, K / LANES], as lane by lane is how a warp loads what is anywhere.
        kept = tl.reshape(kept, [LANES, K // LANES])
        prefix = kept.to(unsigned) // N1
        column = kept.to(unsigned) % N1
        a = tl.load(p_prefix + o_prefix + prefix, mask=m_out, other=0.0).to(tl.float32)
        b = tl.load(p_scores + o_factor + column, mask=m_out, other=0.0).to(tl.float32)
        if FIRST:
            ids = kept.to(tl.int64)
        else:
            ids = tl.load(p_prefix_ids + row * N0 + prefix, mask=m_out, other=0) * N1 + column.to(tl.int64)
        tl.store(p_values + row * COUNT + o_out, (a + b).to(p_values.dtype.element_ty), mask=m_out)
        tl.store(p_ids + row * COUNT + o_out, ids, mask=m_out)


@triton.jit
def _one_factor_kernel(
    p_scores,
    p_values,
    p_ids,
    N: tl.constexpr,
    BN: tl.constexpr,
    k: tl.constexpr,
    K: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The k best columns of scores [rows, N], ascending."""
    o_k = tl.arange(0, min(K, BN))[None, :]
    o_row = tl.program_id(0) + tl.zeros([1], tl.int64)
    m_out = o_k < k
    keys = rank(p_scores, o_row * N, N + tl.zeros([1], tl.int32), N, BN, K, PACKED, False)
    columns = _smallest_slots(tl.where(o_k < k, key_column(keys, PACKED), _NO_SLOT), min(K, BN), False, 1)
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
    hooks: int  # that are sorted as such
    others: int  # places for the pairs of all other hooks
    columns: tuple[int, int]  # ranked at once, of the prefixes and of the factor
    programs: int
    registers: int  # of a thread, for bfloat16, so that many programs run at once

    @classmethod
    def from_shapes(cls, rows: int, widths: tuple[int, int], k: int) -> FoldConfig:
        places = max(2, triton.next_power_of_2(k))
        hooks = 0 if places < 32 else 1 if places < 64 else 3 if places < 128 else 5  # as far as they fill a warp
        others = sum(2 * (k // h - h) + 1 for h in range(hooks + 1, math.isqrt(k) + 1))
        columns = tuple(min(MAX_COLUMNS, max(2, triton.next_power_of_2(n))) for n in widths)
        # Measured on an H200, us at two factors of 256: 65,536 rows and k = 64 219 with 96 registers and 8448 programs,
        # 233 with 4224, 230 with no limit to the registers; 32,768 rows and k = 128 216 with 128 registers and 8448
        # programs, 223 with 4224, 234 with 168 registers, 259 with no limit.
        return cls(
            k=places,
            hooks=hooks,
            others=max(32, places, triton.next_power_of_2(others)) if others else 0,
            columns=(columns[0], columns[1]),
            programs=min(MAX_PROGRAMS, rows),
            registers=96 if places <= 64 else 128 if places <= 128 else 255,
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
        KernelCall(
            _one_factor_kernel,
            (rows,),
            (scores, values, ids),
            dict(
                N=width,
                BN=config.columns[0],
                k=k,
                K=config.k,
                PACKED=packed,
                num_warps=1,
                enable_fp_fusion=False,
            ),
        ).launch()
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
        # Lists of k ranks, slots and ties; of slots beyond int32, one takes as much as an entry of a list.
        places = (1 + config.hooks) * config.k + config.k + config.others
        size = 2 * config.k + 1 + (places // 2 if slots * n <= _NO_SLOT.value else places)
        work = ids.new_empty((config.programs, size | 1))
        KernelCall(
            _fold_kernel,
            (config.programs,),
            (prefix, prefix_ids, scores, fold_values, fold_ids, work, rows),
            dict(
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
                WORK=work.shape[1],
                FIRST=first,
                PACKED=packed and first,
                FULL=slots == n == columns[0],
                num_warps=1,
                maxnreg=config.registers if packed and first else None,
                enable_fp_fusion=False,
            ),
        ).launch()
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
        KernelCall(
            _topk_bwd_kernel,
            (rows, triton.cdiv(n, columns)),
            (dvalues, ids, dscores),
            dict(
                WIDTH=dscores.shape[1],
                OFFSET=offset,
                N=n,
                STRIDE=stride,
                k=k,
                BN=columns,
                num_warps=1,
                enable_fp_fusion=False,
            ),
        ).launch()
        offset += n
