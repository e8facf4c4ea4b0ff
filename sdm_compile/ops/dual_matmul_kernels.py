"""Triton kernels of the dual matmul: delta = X u inside the loop, readings = QX u + inter for many steps at once.

Of its backward too: X^T a within a step or for many, and what a chunk's matrices and values are sent back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall

# Tiles are not loaded ahead of their products: a backward's steps run beside these kernels, and in between, and what
# a kernel takes of a processor's shared memory its cache loses, where the steps' rows arrive. Measured on an H200, ms
# per train step as graph replay with three stages and with one, here and in the solve: 33.9 and 33.4 with 2 streams
# of 1024 columns, 29.8 and 29.3 with 8, 25.8 and 23.8 at a chunk of 256.
STAGES = 1


@triton.jit(do_not_specialize=["tokens", "first_token"])
def _lower_matmul_kernel(
    p_X,
    p_u,
    p_v,
    p_beta,
    p_plus,
    p_out,
    D,
    tokens,
    first_token,
    streams,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PLUS: tl.constexpr,
    UNSTAGE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UPPER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = X u (+ plus), X lower triangular, or upper with UPPER, one tile of one chunk per program.

    RESIDUAL: p_u holds the retrieved rows, u = beta (v - retrieved). PLUS: add p_plus. UNSTAGE: out is [P, T, D], and
    the chunks begin at token `first_token`; otherwise out has the chunks' own layout. TRANSPOSED: X^T instead of X.
    """
    chunk = tl.program_id(2).to(tl.int64)
    block = tl.program_id(1)  # long rows first
    if not (TRANSPOSED or UPPER):
        block = tl.num_programs(1) - 1 - block
    o_m = block * BM + tl.arange(0, BM)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    first, end = 0, tl.minimum(C, (block + 1) * BM)
    if TRANSPOSED or UPPER:
        first, end = block * BM, C
    for k in range(first, end, BK):
        o_k = k + tl.arange(0, BK)
        m_x = (o_m < C)[:, None] & (o_k < C)[None, :]
        m_u = (o_k < C)[:, None] & (o_n < D)[None, :]
        if TRANSPOSED:
            x = tl.load(p_X + (chunk * C + o_k)[None, :] * C + o_m[:, None], mask=m_x, other=0.0)
        else:
            x = tl.load(p_X + (chunk * C + o_m)[:, None] * C + o_k[None, :], mask=m_x, other=0.0)
        at = (chunk * C + o_k)[:, None] * D + o_n[None, :]
        u = tl.load(p_u + at, mask=m_u, other=0.0).to(tl.float32)
        if RESIDUAL:
            beta = tl.load(p_beta + chunk * C + o_k, mask=o_k < C, other=0.0)
            u = beta[:, None] * (tl.load(p_v + at, mask=m_u, other=0.0).to(tl.float32) - u)
        total = tl.dot(x, u, total, input_precision=PRECISION)
    m_out = (o_m < C)[:, None] & (o_n < D)[None, :]
    row = chunk * C + o_m
    if PLUS:
        total += tl.load(p_plus + row[:, None] * D + o_n[None, :], mask=m_out, other=0.0)
    if UNSTAGE:
        t = first_token + (chunk // streams) * C + o_m
        m_out &= (t < tokens)[:, None]
        row = (chunk % streams) * tokens + t
    tl.store(p_out + row[:, None] * D + o_n[None, :], total.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _outer_product_kernel(
    p_a,
    p_b,
    p_out,
    D,
    C: tl.constexpr,
    B: tl.constexpr,
    BD: tl.constexpr,
    DIAGONAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = a b^T [C, C] or minus that, one tile of one chunk per program, summed over the columns in their order.

    What lies above the diagonal of that number, counted as `torch.tril` does, is zero.
    """
    blocks: tl.constexpr = (C + B - 1) // B
    tile = tl.program_id(0) % (blocks * blocks)
    chunk = (tl.program_id(0) // (blocks * blocks)).to(tl.int64)
    first_row, first_column = (tile // blocks) * B, (tile % blocks) * B
    o_m = first_row + tl.arange(0, B)
    o_n = first_column + tl.arange(0, B)
    total = tl.zeros([B, B], tl.float32)
    above = first_column - (first_row + B - 1) > DIAGONAL  # the whole tile
    for d in range(0, tl.where(above, 0, D), BD):
        o_d = d + tl.arange(0, BD)
        m_a = (o_m < C)[:, None] & (o_d < D)[None, :]
        m_b = (o_d < D)[:, None] & (o_n < C)[None, :]
        a = tl.load(p_a + (chunk * C + o_m)[:, None] * D + o_d[None, :], mask=m_a, other=0.0).to(tl.float32)
        b = tl.load(p_b + (chunk * C + o_n)[None, :] * D + o_d[:, None], mask=m_b, other=0.0).to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if NEGATIVE:
        total = -total
    total = tl.where(o_n[None, :] - o_m[:, None] > DIAGONAL, 0.0, total)
    m_out = (o_m < C)[:, None] & (o_n < C)[None, :]
    tl.store(p_out + (chunk * C + o_m)[:, None] * C + o_n[None, :], total, mask=m_out)


@triton.jit(do_not_specialize=["rows", "tokens", "first_token"])
def _values_backward_kernel(
    p_du,
    p_v,
    p_beta,
    p_retrieved,
    p_dv,
    p_dbeta,
    p_dretrieved,
    p_plus,
    D,
    rows,
    tokens,
    first_token,
    streams,
    C: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    DV: tl.constexpr,
    DBETA: tl.constexpr,
    DRETRIEVED: tl.constexpr,
    PLUS: tl.constexpr,
    UNSTAGE: tl.constexpr,
):
    """Back through u = beta (v - retrieved), BT of `rows` tokens per program; DV, DBETA and DRETRIEVED: what is wanted.

    PLUS: add p_plus to dbeta. UNSTAGE: as in the lower matmul, for dv.
    """
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    m_row = row < rows
    beta = tl.load(p_beta + row, mask=m_row, other=0.0)[:, None]
    dv_row, m_dv = row, m_row
    if UNSTAGE:
        chunk = row // C
        t = first_token + (chunk // streams) * C + row % C
        dv_row = (chunk % streams) * tokens + t
        m_dv = m_row & (t < tokens)
    total = tl.zeros([BT, BD], tl.float32)
    for d in range(0, D, BD):
        o_d = d + tl.arange(0, BD)
        m_d = (o_d < D)[None, :]
        m = m_row[:, None] & m_d
        at = row[:, None] * D + o_d[None, :]
        du = tl.load(p_du + at, mask=m, other=0.0)
        if DV:
            dv = tl.where(beta == 0.0, 0.0, beta * du)  # of a token without a write nothing is left, NaN neither
            p_dv_rows = p_dv + dv_row[:, None] * D + o_d[None, :]
            tl.store(p_dv_rows, dv.to(p_dv.dtype.element_ty), mask=m_dv[:, None] & m_d)
        if DRETRIEVED:
            tl.store(p_dretrieved + at, -beta * du, mask=m)
        if DBETA:
            v = tl.load(p_v + at, mask=m, other=0.0).to(tl.float32)
            total += (v - tl.load(p_retrieved + at, mask=m, other=0.0)) * du
    if DBETA:
        dbeta = tl.sum(total, axis=1)
        if PLUS:
            dbeta += tl.load(p_plus + row, mask=m_row, other=0.0)
        tl.store(p_dbeta + row, dbeta, mask=m_row)


@dataclass(frozen=True)
class DualMatmulConfig:
    rows: int
    columns: int
    inner: int
    precision: str

    @staticmethod
    def from_shapes(chunk: int, head_dim: int, dtype: torch.dtype, many: bool) -> DualMatmulConfig:
        """`many`: the readings of many steps, where wide tiles pay; else one step's deltas, where programs are few."""
        block = min(64, max(16, triton.next_power_of_2(chunk)))
        # Measured on an H200, ms per call with 16, 32 and 64 columns: 13.07, 12.92 and 13.88 at a chunk of 64 and 2
        # streams of 1024 columns, 12.05, 11.86 and 11.98 at 8 streams; us per step at a chunk of 256: 33, 28 and 34.
        return DualMatmulConfig(
            rows=block,
            columns=min(64 if many else 32, max(16, triton.next_power_of_2(head_dim))),
            inner=block,
            precision=matmul_precision(dtype),
        )


@dataclass(frozen=True)
class OuterProductConfig:
    block: int  # rows and columns
    inner: int
    precision: str

    @staticmethod
    def from_shapes(chunk: int, head_dim: int, dtype: torch.dtype) -> OuterProductConfig:
        block, precision = min(32, max(16, triton.next_power_of_2(chunk))), matmul_precision(dtype)
        # Measured on an H200, ms per train step with tiles of 64 by 32 and steps of 64, and with 32 by 32 and steps of
        # 64 and of 128: 32.40, 32.38 and 32.24 with 2 streams of 1024 columns; 3.23, 3.02 and 3.11 with 4 of 256 in
        # float32, not TF32.
        inner = 64 if precision == "ieee" else 128
        return OuterProductConfig(block, min(inner, max(16, triton.next_power_of_2(head_dim))), precision)


@dataclass(frozen=True)
class ValuesBackwardConfig:
    tokens: int
    columns: int

    @staticmethod
    def from_shapes(head_dim: int) -> ValuesBackwardConfig:
        columns = min(1024, triton.next_power_of_2(head_dim))
        return ValuesBackwardConfig(tokens=min(32, 1024 // columns), columns=columns)


def matmul_precision(dtype: torch.dtype) -> str:
    """Of a float32 matmul around a bank of `dtype`."""
    exact = dtype != torch.bfloat16 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def lower_matmul_call(
    X: Tensor,
    u: Tensor,
    out: Tensor,
    dtype: torch.dtype,
    residual: tuple[Tensor, Tensor] | None = None,
    plus: Tensor | None = None,
    unstage: tuple[int, int] | None = None,
    transposed: bool = False,
    upper: bool = False,
    many: bool | None = None,
) -> KernelCall:
    """out = X u (+ plus) for contiguous X [N, C, C] and u [N, C, D] of a bank of `dtype`.

    With `residual` = (v, beta) `u` holds retrieved rows. With `unstage` = (first token, streams) out is [P, T, D], and
    the chunks are those of the tokens from the first on, step after step. `many`: see the config; None for where there
    is a `plus`. `transposed`: see `transposed_lower_matmul_call`. `upper`: X is upper triangular.
    """
    chunks, chunk, width = u.shape
    config = DualMatmulConfig.from_shapes(chunk, width, dtype, plus is not None if many is None else many)
    v, beta = residual or (u, u)
    first_token, streams = unstage or (0, 1)
    tensors = (X, u, v, beta, u if plus is None else plus, out)
    options = dict(
        C=chunk,
        BM=config.rows,
        BN=config.columns,
        BK=config.inner,
        RESIDUAL=residual is not None,
        PLUS=plus is not None,
        UNSTAGE=unstage is not None,
        TRANSPOSED=transposed,
        UPPER=upper,
        PRECISION=config.precision,
        num_warps=4,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
    grid = (triton.cdiv(width, config.columns), triton.cdiv(chunk, config.rows), chunks)
    return KernelCall(_lower_matmul_kernel, grid, (*tensors, width, out.shape[1], first_token, streams), options)


def transposed_lower_matmul_call(
    X: Tensor,
    a: Tensor,
    out: Tensor,
    dtype: torch.dtype,
    plus: Tensor | None = None,
    many: bool = False,
) -> KernelCall:
    """out = X^T a (+ plus) for contiguous X [N, C, C], lower triangular, and a [N, C, D] of a bank of `dtype`.

    `plus` and `out` [N, C, D] are float32 and may be the same tensor. `many`: see the config.
    """
    return lower_matmul_call(X, a, out, dtype, plus=plus, transposed=True, many=many)


def outer_product_call(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    dtype: torch.dtype,
    tril: int | None = None,
    negative: bool = False,
) -> KernelCall:
    """out [N, C, C] = a b^T, or minus that, for contiguous a and b [N, C, D] of a bank of `dtype`.

    Both float32 or bfloat16. `tril`: zero above that diagonal, counted as `torch.tril` does.
    """
    chunks, chunk, width = a.shape
    config = OuterProductConfig.from_shapes(chunk, width, dtype)
    tiles = triton.cdiv(chunk, config.block) ** 2
    options = dict(
        C=chunk,
        B=config.block,
        BD=config.inner,
        DIAGONAL=chunk if tril is None else tril,
        NEGATIVE=negative,
        PRECISION=config.precision,
        num_warps=4,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
    return KernelCall(_outer_product_kernel, (chunks * tiles,), (a, b, out, width), options)


def values_backward_call(
    du: Tensor,
    v: Tensor,
    beta: Tensor,
    retrieved: Tensor,
    dv: Tensor | None = None,
    dbeta: Tensor | None = None,
    dretrieved: Tensor | None = None,
    plus: Tensor | None = None,
    unstage: tuple[int, int] | None = None,
) -> KernelCall:
    """dv = beta du, dbeta = sum of (v - retrieved) du over the columns, dretrieved = -beta du; None: not wanted.

    With `plus`, which may be dbeta itself, that is added to dbeta.

    All contiguous [N, C, D], beta and dbeta [N, C, 1]; v in the bank's dtype, dv in any, the rest float32. `unstage`:
    as `lower_matmul_call` has it, for dv [P, T, D].
    """
    chunks, chunk, width = du.shape
    outs = (dv, dbeta, dretrieved)
    first_token, streams = unstage or (0, 1)
    tokens = chunk if dv is None else dv.shape[1]
    config = ValuesBackwardConfig.from_shapes(width)
    options = dict(
        C=chunk,
        BT=config.tokens,
        BD=config.columns,
        DV=dv is not None,
        DBETA=dbeta is not None,
        DRETRIEVED=dretrieved is not None,
        PLUS=plus is not None,
        UNSTAGE=unstage is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    tensors = (du, v, beta, retrieved, *(du if out is None else out for out in (*outs, plus)))
    args = (*tensors, width, chunks * chunk, tokens, first_token, streams)
    return KernelCall(_values_backward_kernel, (triton.cdiv(chunks * chunk, config.tokens),), args, options)
