"""How top-k kernels rank a row's columns: keys in the order of losses and columns, and the smallest of them, sorted.

A loss is a negated score; NaN comes last, and ties go to the smaller column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bitonic import log2, smallest

_NO_KEY = tl.constexpr(2.0 - 2.0**-23)  # PACKED, the last column's NaN: no other key is above it
_MAX_INT32 = tl.constexpr(2**31 - 1)
MAX_INT64 = tl.constexpr(2**63 - 1)


@triton.jit
def _order(loss):
    """int32 in the order of float32 losses that are not -0.0; NaN last, all equal."""
    bits = loss.to(tl.int32, bitcast=True)
    return tl.where(loss == loss, bits ^ ((bits >> 31) & _MAX_INT32), _MAX_INT32)


@triton.jit
def _key(loss, column, PACKED: tl.constexpr):
    """A key in the order of loss and column.

    PACKED: of a bfloat16 loss and 14 bits of the column, as a positive float32. Else int64.
    """
    if PACKED:
        bits = ((_order(loss) >> 2) & -16384) + 2**29
        return (bits | column).to(tl.float32, bitcast=True)
    else:
        return (_order(loss).to(tl.int64) << 32) | column


@triton.jit
def key_column(key, PACKED: tl.constexpr):
    if PACKED:
        return key.to(tl.int32, bitcast=True) & 16383
    else:
        return key.to(tl.int32)


@triton.jit
def entry(key, PACKED: tl.constexpr):
    """What a list holds, as int64: the loss's bits above the column."""
    if PACKED:
        order = (key.to(tl.int32, bitcast=True) - 2**29) << 2
        loss = (order ^ ((order >> 31) & _MAX_INT32)) & -65536
    else:
        order = (key >> 32).to(tl.int32)
        loss = order ^ ((order >> 31) & _MAX_INT32)
    return (loss.to(tl.int64) << 32) | key_column(key, PACKED)


@triton.jit
def entry_loss(entry):
    return (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def rank(
    p_x, o_row, widths, WIDTH: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr
):
    """The K (or N, if fewer) best of each row's columns as sorted keys; a row's first column is at p_x + o_row.

    widths: the number of each row's columns; WIDTH: the largest of them. N: how many to sort at once. FULL: all
    widths are N. Keys past a row's width are the largest, of a NaN.
    """
    INNER: tl.constexpr = min(N, 8 * (32 // min(o_row.shape[0], 32)))
    o_n = tl.arange(0, N // INNER)[None, :, None] * INNER + tl.arange(0, INNER)[None, None, :]
    if WIDTH <= N:
        return _rank_tile(p_x, o_row, o_n, widths, N, K, PACKED, FULL, False)
    else:
        best = tl.full([o_row.shape[0], K], _NO_KEY if PACKED else MAX_INT64, tl.float32 if PACKED else tl.int64)
        for start in range(0, WIDTH, N):
            tile = _rank_tile(p_x, o_row, start + o_n, widths, N, K, PACKED, FULL, True)
            best = smallest(tl.minimum(best, tile), K, False, log2(K))
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
        keys = tl.where(m_n, keys, _NO_KEY if PACKED else MAX_INT64)
    return smallest(tl.reshape(keys, [o_row.shape[0], N]), min(K, N), DESCENDING, 1)
