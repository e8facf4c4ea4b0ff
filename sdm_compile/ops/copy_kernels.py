"""Triton kernels that copy: several tensors in one launch, as several would cost the host more; and many matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall

MOST = 10  # tensors of one launch


@triton.jit(do_not_specialize=[f"n{i}" for i in range(MOST)])
def _copy_kernel(
    t0,
    s0,
    t1,
    s1,
    t2,
    s2,
    t3,
    s3,
    t4,
    s4,
    t5,
    s5,
    t6,
    s6,
    t7,
    s7,
    t8,
    s8,
    t9,
    s9,
    n0: tl.int64,
    n1: tl.int64,
    n2: tl.int64,
    n3: tl.int64,
    n4: tl.int64,
    n5: tl.int64,
    n6: tl.int64,
    n7: tl.int64,
    n8: tl.int64,
    n9: tl.int64,
    COUNT: tl.constexpr,
    B: tl.constexpr,
):
    """B words of each of COUNT sources s to targets t of n words each."""
    targets, sources = (t0, t1, t2, t3, t4, t5, t6, t7, t8, t9), (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9)
    words = (n0, n1, n2, n3, n4, n5, n6, n7, n8, n9)
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    for i in tl.static_range(COUNT):
        tl.store(targets[i] + at, tl.load(sources[i] + at, mask=at < words[i], other=0), mask=at < words[i])


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, of the same shape and dtype, on the current stream.

    One launch, where all are contiguous, of four bytes an element, and at most `MOST`.
    """
    pairs = [*zip(targets, sources, strict=True)]
    tensors = [x for pair in pairs for x in pair]
    if len(pairs) > MOST or any(x.element_size() != 4 or not x.is_contiguous() for x in tensors):
        for target, source in pairs:
            target.copy_(source)
        return
    words = [target.numel() for target in targets]
    tensors = [x.view(torch.int32) for x in tensors]
    missing = MOST - len(pairs)
    args = (*tensors, *tensors[:1] * (2 * missing), *words, *[0] * missing)
    options = dict(COUNT=len(pairs), B=1024, num_warps=4)
    KernelCall(_copy_kernel, (triton.cdiv(max(words), 1024),), args, options).launch()


@triton.jit
def _transpose_kernel(p_to, p_from, N, B: tl.constexpr):
    """One tile, B by B, of one matrix [N, N]."""
    o_i, o_j = tl.program_id(1) * B + tl.arange(0, B), tl.program_id(2) * B + tl.arange(0, B)
    matrix = tl.program_id(0).to(tl.int64) * N * N
    mask = (o_i < N)[:, None] & (o_j < N)[None, :]
    tile = tl.load(p_from + matrix + o_i[:, None] * N + o_j[None, :], mask=mask, other=0.0)
    to = p_to + matrix + o_j[:, None] * N + o_i[None, :]
    tl.store(to, tl.trans(tile), mask=tl.trans(mask))


def transpose_all(to: Tensor, matrices: Tensor) -> None:
    """Equivalent code: to.copy_(matrices.mT), of matrices [n, N, N], both contiguous, on the current stream."""
    count, size, _ = matrices.shape
    block = min(32, triton.next_power_of_2(size))
    tiles = triton.cdiv(size, block)
    KernelCall(_transpose_kernel, (count, tiles, tiles), (to, matrices, size), dict(B=block, num_warps=4)).launch()
