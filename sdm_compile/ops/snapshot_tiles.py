"""Tiles of bank rows in a snapshot's forms, for kernels: bit for bit what `snapshot` does on the CPU.

A tile is [R, B], columns `start` .. `start + B - 1` of R rows, so that a stage that holds one can store it, or load it,
in a snapshot's form. Roundings are integer arithmetic on the float's bits where a cast would not do: Triton's to float8
does not assemble on sm_80, and its interpreter truncates to bfloat16. A division is IEEE's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import INTERPRETED

_NO_SIGN = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)  # of float32; a magnitude above is NaN


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def convert(x, dtype: tl.constexpr):
    """x, float32 or bfloat16, as the other one, to nearest even; as it is, NaN's bits too, where it has the dtype."""
    if x.dtype == dtype:
        return x
    elif dtype == tl.float32 and (INTERPRETED or x.shape[-1] == 1):  # a tile of one element has no two
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif dtype == tl.float32:
        # Two at a time, as they come, in two instructions; the compiler takes them apart first, in three.
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        bits = _bits(x)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        high = tl.where((bits & _NO_SIGN) > _INF_BITS, 0x7FC0, high)
        return high.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def magnitude(x):
    """|x| of float32 as int32 in the same order, NaN above all: a largest one is NaN where there is one."""
    return _bits(x) & _NO_SIGN


@triton.jit
def row_scale(magnitudes, TOP: tl.constexpr):
    """[R] scales of rows that have the same largest magnitude as this tile [R, B]."""
    largest = tl.max(magnitudes, axis=1).to(tl.float32, bitcast=True)
    return tl.math.div_rn(largest, TOP)


@triton.jit
def _scaled(x, scale):
    """What is to be encoded: x [R, B] in units of its rows' scales [R]."""
    return tl.math.div_rn(x, tl.where(scale == 0.0, 1.0, scale)[:, None])


@triton.jit
def _encode_fp8(x):
    """float32 to the nearest float8_e4m3fn's code, as int32: ties to even, beyond 448 to 448, NaN to NaN."""
    bits = _bits(x)
    magnitude = bits & _NO_SIGN
    clamped = tl.minimum(magnitude, 0x43E00000)  # 448
    # From 2**-6 on: 20 of 23 bits behind the point go, and the exponent's bias becomes 7 instead of 127.
    code = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (120 << 3)
    # Below, codes count steps of 2**-9, which are those of float32 from 2**14 on.
    steps = _bits(clamped.to(tl.float32, bitcast=True) + 16384.0) - 0x46800000
    code = tl.where(clamped < 0x3C800000, steps, code)
    code = tl.where(magnitude > _INF_BITS, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _decode_fp8(code):
    """The float32 of a float8_e4m3fn's code, an int32."""
    low = code & 0x7F
    normal = ((low << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where(low < 8, low.to(tl.float32) * 0.001953125, normal)  # 2**-9, exact
    bits = tl.where(low == 0x7F, 0x7FC00000, _bits(magnitude))
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_int4(x):
    """float32 to the nearest of -7 .. 7, plus 8, as int32: ties to even; NaN to 0, as on the CPU."""
    clamped = tl.minimum(tl.maximum(x, -7.0), 7.0)
    code = _bits(clamped + 12582912.0) - 0x4B400000 + 8  # from 2**23 on, float32 has the integers alone
    return tl.where(x == x, code, 0)


@triton.jit
def _decode_int4(code):
    return (code - 8).to(tl.float32)


@triton.jit
def _pack_int4(codes):
    """[R, B] codes as [R, B // 2] bytes: the low nibble is the first of two columns."""
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return low | (high << 4)


@triton.jit
def _unpack_int4(bytes):
    """[R, B // 2] bytes as [R, B] codes."""
    return tl.reshape(tl.join(bytes & 15, bytes >> 4), [bytes.shape[0], bytes.shape[1] * 2])


@triton.jit
def load_tile(p_base, rows, m_rows, start, D, B: tl.constexpr):
    """Columns of rows [n, D], 0 where there is no row or no column. rows: [R] int64."""
    o_d = start + tl.arange(0, B)
    return tl.load(p_base + rows[:, None] * D + o_d[None, :], mask=m_rows[:, None] & (o_d < D)[None, :], other=0)


@triton.jit
def store_tile(p_base, rows, m_rows, start, x, D):
    o_d = start + tl.arange(0, x.shape[1])
    x = x.to(p_base.dtype.element_ty)
    tl.store(p_base + rows[:, None] * D + o_d[None, :], x, mask=m_rows[:, None] & (o_d < D)[None, :])


@triton.jit
def store_quantized(p_payload, rows, m_rows, start, x, scale, D, DP, MODE: tl.constexpr):
    """A tile x [R, B] of bank rows into rows `rows` [R] int64 of a payload in MODE's form; float8 is uint8 here.

    scale: [R], `row_scale` of the whole rows; anything for a mode without. start: even. DP: the payload's columns.
    """
    if MODE == "fp8":
        store_tile(p_payload, rows, m_rows, start, _encode_fp8(_scaled(convert(x, tl.float32), scale)), DP)
    elif MODE == "int4":
        codes = _encode_int4(_scaled(convert(x, tl.float32), scale))
        m_d = start + tl.arange(0, x.shape[1]) < D
        codes = tl.where(m_d[None, :], codes, 8)
        store_tile(p_payload, rows, m_rows, start // 2, _pack_int4(codes), DP)
    else:
        store_tile(p_payload, rows, m_rows, start, convert(x, p_payload.dtype.element_ty), DP)


@triton.jit
def load_quantized(p_payload, rows, m_rows, start, scale, DP, B: tl.constexpr, MODE: tl.constexpr):
    """A tile [R, B] of the rows that `store_quantized` stored: float32, or the payload's dtype without scales."""
    if MODE == "fp8":
        return _decode_fp8(load_tile(p_payload, rows, m_rows, start, DP, B).to(tl.int32)) * scale[:, None]
    elif MODE == "int4":
        pairs = load_tile(p_payload, rows, m_rows, start // 2, DP, B // 2)
        return _decode_int4(_unpack_int4(pairs.to(tl.int32))) * scale[:, None]
    else:
        return load_tile(p_payload, rows, m_rows, start, DP, B)


def addressable(payload: Tensor) -> Tensor:
    """As a dtype that kernels can take on every architecture: float8 as its codes."""
    return payload.view(torch.uint8) if payload.dtype == torch.float8_e4m3fn else payload
