"""Samples of Phase 1: staged chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from sdm_compile.ops.checks import accumulate_dtype
from tests.cases import Case
from tests.harness import OpCase, Sample, normal_like, vjp

from .shapes import EVERY_CHUNKED, chunked


def _args(case: Case, dtype: torch.dtype) -> list[Tensor]:
    k_idx, k_val, _, _, g, q_idx, q_val = chunked(case).staged
    return [k_idx, k_val.to(dtype), g.to(accumulate_dtype(dtype)), q_idx, q_val.to(dtype)]


def _bwd_args(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of A and QK come as whole squares, though only their lower triangles depend on anything."""
    grads = [normal_like(x, seed).to(accumulate_dtype(dtype)) for seed, x in enumerate(chunked(case).fields[:6])]
    return [*grads, *_args(case, dtype)]


def _phase1_bwd(*args: Any) -> list[Tensor]:
    return vjp(reference.phase1, args[6:], (*args[:6], None, None, None))


CASES = [
    OpCase(
        "phase1",
        [Sample(c.name, lambda dtype, c=c: _args(c, dtype)) for c in EVERY_CHUNKED],
        reference.phase1,
        differentiable=(0, 1, 2, 3, 4, 5),
    ),
    OpCase("phase1_bwd", [Sample(c.name, lambda dtype, c=c: _bwd_args(c, dtype)) for c in EVERY_CHUNKED], _phase1_bwd),
]
