"""Triton kernel of the dual matmul: delta = X u inside the loop, readings = QX u + inter for many steps at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall


@triton.jit
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
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out = X u (+ plus), X lower triangular, one tile of one chunk per program.

    RESIDUAL: p_u holds the retrieved rows, u = beta (v - retrieved). PLUS: add p_plus. UNSTAGE: out is [P, T, D], and
    the chunks begin at token `first_token`; otherwise out has the chunks' own layout. EARLY: the kernel is launched
    before the one in front of it has ended, and lets the next one start at once; both wait before they read its output.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(2).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # long rows first
    o_m = block * BM + tl.arange(0, BM)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, tl.minimum(C, (block + 1) * BM), BK):
        o_k = k + tl.arange(0, BK)
        m_x = (o_m < C)[:, None] & (o_k < C)[None, :]
        m_u = (o_k < C)[:, None] & (o_n < D)[None, :]
        x = tl.load(p_X + (chunk * C + o_m)[:, None] * C + o_k[None, :], mask=m_x, other=0.0)
        at = (chunk * C + o_k)[:, None] * D + o_n[None, :]
        u = tl.load(p_u + at, mask=m_u, other=0.0)
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
        # Measured on an H200, us per step at a chunk of 64 and 2 x 1024 columns: 2.2 with 16 columns, 2.3 with 32, 2.9
        # with 64; at a chunk of 256 and 8 x 1024: 33, 28 and 34.
        return DualMatmulConfig(
            rows=block,
            columns=min(64 if many else 16 if chunk <= 64 else 32, max(16, triton.next_power_of_2(head_dim))),
            inner=block,
            precision="tf32" if dtype == torch.bfloat16 else _float32_precision(),
        )


def _float32_precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def lower_matmul_call(
    X: Tensor,
    u: Tensor,
    out: Tensor,
    dtype: torch.dtype,
    residual: tuple[Tensor, Tensor] | None = None,
    plus: Tensor | None = None,
    unstage: tuple[int, int] | None = None,
    early: bool = False,
) -> KernelCall:
    """out = X u (+ plus) for contiguous X [N, C, C] and u [N, C, D] of a bank of `dtype`.

    With `residual` = (v, beta) `u` holds retrieved rows. With `unstage` = (first token, streams) out is [P, T, D], and
    the chunks are those of the tokens from the first on, step after step. `early`: see the kernel.
    """
    chunks, chunk, width = u.shape
    config = DualMatmulConfig.from_shapes(chunk, width, dtype, many=plus is not None)
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
        PRECISION=config.precision,
        EARLY=early,
        num_warps=4,
        enable_fp_fusion=True,
        launch_pdl=early,
    )
    grid = (triton.cdiv(width, config.columns), triton.cdiv(chunk, config.rows), chunks)
    return KernelCall(_lower_matmul_kernel, grid, (*tensors, width, out.shape[1], first_token, streams), options)
