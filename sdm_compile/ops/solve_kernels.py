"""Triton kernels of the solve: the inverse of a unit lower triangular matrix by blocks, always in IEEE float32.

Its backward is products of lower triangular matrices alone: what lies above a diagonal meets the zeros of another
factor, or is not wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall


@triton.jit
def _unit_inverse(p_A, p_beta, chunk, block, C: tl.constexpr, B: tl.constexpr):
    """Inverse of the diagonal block: rows one after the other, x_i = e_i - beta_i sum_{j < i} A_ij x_j."""
    o_b = tl.arange(0, B)
    x = (o_b[:, None] == o_b[None, :]).to(tl.float32)
    for i in range(1, B):
        row = block * B + i
        before = tl.where(row < C, i, 0)
        a = tl.load(p_A + (chunk * C + row) * C + block * B + o_b, mask=o_b < before, other=0.0)
        beta = tl.load(p_beta + chunk * C + row, mask=row < C, other=0.0)
        x_i = -beta * tl.sum(a[:, None] * x, axis=0)
        x += tl.where((o_b == i)[:, None], x_i[None, :], 0.0)
    return x


@triton.jit
def _tile(p_base, chunk, rows, columns, C: tl.constexpr):
    m = (rows < C)[:, None] & (columns < C)[None, :]
    return tl.load(p_base + (chunk * C + rows)[:, None] * C + columns[None, :], mask=m, other=0.0)


@triton.jit
def _lower_tile(p_base, chunk, rows, columns, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A tile of a lower triangular matrix, or of its transpose; zeros for what lies above its diagonal."""
    m = (rows < C)[:, None] & (columns < C)[None, :]
    if TRANSPOSED:
        m &= rows[:, None] <= columns[None, :]
        at = (chunk * C + columns)[None, :] * C + rows[:, None]
    else:
        m &= rows[:, None] >= columns[None, :]
        at = (chunk * C + rows)[:, None] * C + columns[None, :]
    return tl.load(p_base + at, mask=m, other=0.0)


@triton.jit
def _store_tile(p_base, chunk, rows, columns, value, C: tl.constexpr):
    m = (rows < C)[:, None] & (columns < C)[None, :]
    tl.store(p_base + (chunk * C + rows)[:, None] * C + columns[None, :], value, mask=m)


@triton.jit
def _diagonal_kernel(p_A, p_beta, p_X, C: tl.constexpr, B: tl.constexpr):
    """The inverses of all diagonal blocks into X."""
    chunk = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    rows = block * B + tl.arange(0, B)
    _store_tile(p_X, chunk, rows, rows, _unit_inverse(p_A, p_beta, chunk, block, C, B), C)


@triton.jit
def _below_kernel(p_A, p_beta, p_X, C: tl.constexpr, B: tl.constexpr):
    """One block column of X below its diagonal block, downwards; zeros above.

    X_ij = -X_ii diag(beta_i) sum_{j <= k < i} A_ik X_kj. Products pass through memory: a block of X is stored, and read
    again by this same program.
    """
    chunk = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0)
    o_b = tl.arange(0, B)
    columns = j * B + o_b
    for i in range(0, j):
        _store_tile(p_X, chunk, i * B + o_b, columns, tl.zeros([B, B], tl.float32), C)
    for i in range(j + 1, tl.cdiv(C, B)):
        rows = i * B + o_b
        total = tl.zeros([B, B], tl.float32)
        for k in range(j, i):
            inner = k * B + o_b
            a = _tile(p_A, chunk, rows, inner, C)
            x = _tile(p_X, chunk, inner, columns, C)
            total = tl.dot(a, x, total, input_precision="ieee")
        beta = tl.load(p_beta + chunk * C + rows, mask=rows < C, other=0.0)
        _store_tile(p_X, chunk, rows, columns, -beta[:, None] * total, C)
        tl.debug_barrier()
        right = _tile(p_X, chunk, rows, columns, C)
        diagonal = _tile(p_X, chunk, rows, rows, C)
        tl.debug_barrier()
        _store_tile(p_X, chunk, rows, columns, tl.dot(diagonal, right, input_precision="ieee"), C)
        tl.debug_barrier()


@triton.jit
def _lower_product_kernel(
    p_a,
    p_b,
    p_plus,
    p_out,
    C: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSE_A: tl.constexpr,
    TRANSPOSE_B: tl.constexpr,
    PLUS: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """out = the lower triangle of a b, a^T b or a b^T for lower triangular a and b, one tile of one chunk per program.

    PLUS: with p_plus added. NEGATIVE: the sign then changed.
    """
    blocks: tl.constexpr = (C + B - 1) // B
    chunk = (tl.program_id(0) // (blocks * blocks)).to(tl.int64)
    tile = tl.program_id(0) % (blocks * blocks)
    i, j = tile // blocks, tile % blocks
    o_b = tl.arange(0, B)
    rows, columns = i * B + o_b, j * B + o_b
    first, end = j * B, (i + 1) * B
    if TRANSPOSE_A:
        first, end = i * B, C
    if TRANSPOSE_B:
        first, end = 0, (j + 1) * B
    total = tl.zeros([B, B], tl.float32)
    for k in range(first, tl.where(i < j, first, tl.minimum(end, C)), BK):
        inner = k + tl.arange(0, BK)
        a = _lower_tile(p_a, chunk, rows, inner, C, TRANSPOSE_A)
        b = _lower_tile(p_b, chunk, inner, columns, C, TRANSPOSE_B)
        total = tl.dot(a, b, total, input_precision="ieee")
    if PLUS:
        total += _tile(p_plus, chunk, rows, columns, C)
    if NEGATIVE:
        total = -total
    total = tl.where(rows[:, None] >= columns[None, :], total, 0.0)
    _store_tile(p_out, chunk, rows, columns, total, C)


@triton.jit
def _beta_backward_kernel(
    p_dB,
    p_A,
    p_beta,
    p_dA,
    p_dbeta,
    num_rows,
    C: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """dA and dbeta from dB, B = diag(beta) tril(A, -1); some rows of all chunks' matrices per program."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, BC)
    m_row = row < num_rows
    m = m_row[:, None] & (column[None, :] < (row % C)[:, None])
    at = row[:, None] * C + column[None, :]
    dB = tl.load(p_dB + at, mask=m, other=0.0)
    dbeta = tl.sum(tl.load(p_A + at, mask=m, other=0.0) * dB, axis=1)
    tl.store(p_dbeta + row, dbeta, mask=m_row)
    beta = tl.load(p_beta + row, mask=m_row, other=0.0)
    tl.store(p_dA + at, beta[:, None] * dB, mask=m_row[:, None] & (column < C)[None, :])


@dataclass(frozen=True)
class SolveConfig:
    block: int
    product_block: int
    product_inner: int
    row_block: int

    @staticmethod
    def from_shapes(chunk: int) -> SolveConfig:
        return SolveConfig(
            block=16 if chunk <= 64 else 32,
            # Compiled for an H200, tiles of 64 and an inner 64 spill registers; tiles of 32 and an inner 16 take 64.
            product_block=min(32, max(16, triton.next_power_of_2(chunk))),
            product_inner=16,
            row_block=16,
        )


def launch_solve(A: Tensor, QK: Tensor, beta: Tensor, X: Tensor, QX: Tensor) -> None:
    """Fills X and QX [steps, P, C, C] from contiguous A, QK and beta [steps, P, C, 1]."""
    steps, streams, chunk, _ = A.shape
    chunks = steps * streams
    if not chunks:
        return
    config = SolveConfig.from_shapes(chunk)
    blocks = triton.cdiv(chunk, config.block)
    options = dict(C=chunk, B=config.block, num_warps=1, enable_fp_fusion=True)
    for kernel in (_diagonal_kernel, _below_kernel):
        KernelCall(kernel, (blocks, chunks), (A, beta, X), options).launch()
    lower_product_call(QK, X, QX).launch()


def launch_solve_bwd(
    grads: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    X: Tensor,
    scratch: tuple[Tensor, Tensor],
    outs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fills outs = dA, dQK, dbeta from grads = dX, dQX and inputs = A, QK, beta; `scratch` is two more like X.

    All contiguous.
    """
    dX, dQX = grads
    A, QK, beta = inputs
    dA, dQK, dbeta = outs
    one, other = scratch
    lower_product_call(dQX, X, dQK, transpose_b=True).launch()
    lower_product_call(QK, dQX, one, transpose_a=True, plus=dX).launch()  # all of X's gradient
    lower_product_call(X, one, other, transpose_a=True).launch()
    lower_product_call(other, X, one, transpose_b=True, negative=True).launch()  # dB
    beta_backward_call(one, A, beta, dA, dbeta).launch()


def lower_product_call(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    plus: Tensor | None = None,
    negative: bool = False,
) -> KernelCall:
    """out = tril(a b), tril(a^T b) or tril(a b^T) of the lower triangles of contiguous a and b [*, C, C].

    With `plus` its lower triangle is added, with `negative` the sign then changed. `out` is neither a nor b.
    """
    chunk = a.shape[-1]
    config = SolveConfig.from_shapes(chunk)
    tiles = triton.cdiv(chunk, config.product_block) ** 2
    options = dict(
        C=chunk,
        B=config.product_block,
        BK=config.product_inner,
        TRANSPOSE_A=transpose_a,
        TRANSPOSE_B=transpose_b,
        PLUS=plus is not None,
        NEGATIVE=negative,
        num_warps=4,
        enable_fp_fusion=True,
    )
    tensors = (a, b, a if plus is None else plus, out)
    return KernelCall(_lower_product_kernel, (a.shape[:-2].numel() * tiles,), tensors, options)


def beta_backward_call(dB: Tensor, A: Tensor, beta: Tensor, dA: Tensor, dbeta: Tensor) -> KernelCall:
    """dA = beta dB and dbeta = the row sums of A dB, both of the strictly lower triangles alone.

    A, dB and dA [*, C, C], beta and dbeta [*, C, 1], contiguous float32. No output is an input.
    """
    chunk = A.shape[-1]
    config = SolveConfig.from_shapes(chunk)
    options = dict(
        C=chunk,
        BM=config.row_block,
        BC=triton.next_power_of_2(chunk),
        num_warps=4,
        enable_fp_fusion=True,
    )
    rows = beta.numel()
    args = (dB, A, beta, dA, dbeta, rows)
    return KernelCall(_beta_backward_kernel, (triton.cdiv(rows, config.row_block),), args, options)
