"""Bitonic networks, for kernels: the smallest keys of each row, sorted.

Rows are cubes, a dimension of two for each bit of a place, so that every step of a network compares neighbours along
one dimension. Keys have no ties.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def upper(DIM: tl.constexpr, RANK: tl.constexpr):
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
def smallest(keys, K: tl.constexpr, DESCENDING: tl.constexpr, FROM: tl.constexpr):
    """The K smallest of [ROWS, N] keys, sorted. ROWS, N >= 2 and K >= 2 are powers of two.

    FROM: the stage to start from, log2(length) of the bitonic sequences that the rows consist of.
    """
    log_n: tl.constexpr = log2(keys.shape[1])
    log_k: tl.constexpr = log2(K)
    rank: tl.constexpr = log2(keys.shape[0]) + log_n
    cube = tl.reshape(keys, [2] * rank)
    negative = False
    for stage in tl.static_range(FROM, log_k + 1):
        cube, negative = _merge(cube, negative, stage, rank, stage < log_n, DESCENDING and stage == log_n)
    for half in tl.static_range(1, log_n - log_k + 1):
        # An ascending and a descending run of K: the smaller of each pair are the K smallest, and bitonic.
        cube = tl.min(_negate(cube, negative), axis=rank - half - log_k)
        cube, negative = _merge(
            cube, False, log_k, rank - half, half < log_n - log_k, DESCENDING and half == log_n - log_k
        )
    return tl.reshape(_negate(cube, negative), [keys.shape[0], K])


@triton.jit
def _negate(cube, where):
    return cube * tl.where(where, -1.0, 1.0) if cube.dtype == tl.float32 else cube


@triton.jit
def _merge(cube, negative, STAGE: tl.constexpr, RANK: tl.constexpr, FLIP: tl.constexpr, DESCENDING: tl.constexpr):
    """Sorts the bitonic sequences along the STAGE innermost dimensions.

    FLIP: those in the upper half of dimension STAGE, which then exists, are sorted in descending order.

    Of float32, elements that are to become the larger of a pair change their sign, so that all take a minimum: a
    multiplication, which a warp does beside its comparisons, and free within a thread. negative: where they have.
    """
    for i in tl.static_range(STAGE):
        larger = upper(STAGE - 1 - i, RANK) ^ DESCENDING
        if FLIP:
            larger ^= upper(STAGE, RANK)
        if cube.dtype == tl.float32:
            cube = _negate(cube, larger ^ negative)
            # A partner has the other sign. This is the negative minimum, without a change of what a warp exchanges.
            cube = tl.maximum(cube * -1.0, _partner(cube, STAGE - 1 - i, RANK))
            negative = larger ^ True
        else:
            other = _partner(cube, STAGE - 1 - i, RANK)
            cube = tl.where(larger, tl.maximum(cube, other), tl.minimum(cube, other))
    return cube, negative
