"""Triton kernels of the solve: the inverse of a unit lower triangular matrix by blocks, always in IEEE float32."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


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
def _tile(p_base, chunk, rows, columns, C: tl.constexpr, LOWER: tl.constexpr):
    m = (rows < C)[:, None] & (columns < C)[None, :]
    if LOWER:
        m &= rows[:, None] >= columns[None, :]
    return tl.load(p_base + (chunk * C + rows)[:, None] * C + columns[None, :], mask=m, other=0.0)


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
            a = _tile(p_A, chunk, rows, inner, C, False)
            x = _tile(p_X, chunk, inner, columns, C, False)
            total = tl.dot(a, x, total, input_precision="ieee")
        beta = tl.load(p_beta + chunk * C + rows, mask=rows < C, other=0.0)
        _store_tile(p_X, chunk, rows, columns, -beta[:, None] * total, C)
        tl.debug_barrier()
        right = _tile(p_X, chunk, rows, columns, C, False)
        diagonal = _tile(p_X, chunk, rows, rows, C, False)
        tl.debug_barrier()
        _store_tile(p_X, chunk, rows, columns, tl.dot(diagonal, right, input_precision="ieee"), C)
        tl.debug_barrier()


@triton.jit
def _lower_product_kernel(p_QK, p_X, p_QX, C: tl.constexpr, B: tl.constexpr):
    """QX = tril(QK) X, one block per program; blocks above the diagonal are zero."""
    chunk = tl.program_id(2).to(tl.int64)
    i = tl.program_id(1)
    j = tl.program_id(0)
    o_b = tl.arange(0, B)
    total = tl.zeros([B, B], tl.float32)
    for k in range(j, i + 1):
        qk = _tile(p_QK, chunk, i * B + o_b, k * B + o_b, C, True)
        x = _tile(p_X, chunk, k * B + o_b, j * B + o_b, C, False)
        total = tl.dot(qk, x, total, input_precision="ieee")
    _store_tile(p_QX, chunk, i * B + o_b, j * B + o_b, total, C)


@dataclass(frozen=True)
class SolveConfig:
    block: int
    product_block: int

    @staticmethod
    def from_shapes(chunk: int) -> SolveConfig:
        product_block = min(64, max(16, triton.next_power_of_2(chunk)))
        return SolveConfig(block=16 if chunk <= 64 else 32, product_block=product_block)


def launch_solve(A: Tensor, QK: Tensor, beta: Tensor, X: Tensor, QX: Tensor) -> None:
    """Fills X and QX [steps, P, C, C] from contiguous A, QK and beta [steps, P, C, 1]."""
    steps, streams, chunk, _ = A.shape
    chunks = steps * streams
    if not chunks:
        return
    config = SolveConfig.from_shapes(chunk)
    blocks = triton.cdiv(chunk, config.block)
    _diagonal_kernel[(blocks, chunks)](A, beta, X, C=chunk, B=config.block, num_warps=1, enable_fp_fusion=True)
    _below_kernel[(blocks, chunks)](A, beta, X, C=chunk, B=config.block, num_warps=1, enable_fp_fusion=True)
    product_blocks = triton.cdiv(chunk, config.product_block)
    _lower_product_kernel[(product_blocks, product_blocks, chunks)](
        QK, X, QX, C=chunk, B=config.product_block, num_warps=4, enable_fp_fusion=True
    )
