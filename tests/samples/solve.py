"""Samples of the solve: Phase 1's matrices, with numbers in the triangles that nobody may read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from tests.cases import Case
from tests.harness import OpCase, Sample, normal_like, vjp

from .shapes import EVERY_CHUNKED, chunked

DTYPES = (torch.float64, torch.float32)


def _args(case: Case, dtype: torch.dtype) -> list[Tensor]:
    call = chunked(case)
    A, QK = (x + normal_like(x).triu(above) for x, above in ((call.fields.A, 0), (call.fields.QK, 1)))
    return [x.to(dtype) for x in (A, QK, call.staged.beta)]


def _bwd_args(case: Case, dtype: torch.dtype) -> list[Tensor]:
    X = chunked(case).X
    return [normal_like(X, 1).to(dtype), normal_like(X, 2).to(dtype), *_args(case, dtype), X.to(dtype)]


def _solve_bwd(dX: Tensor, dQX: Tensor, A: Tensor, QK: Tensor, beta: Tensor, X: Tensor) -> Any:
    return vjp(reference.solve, (A, QK, beta), (dX, dQX))


CASES = [
    OpCase(
        "solve",
        [Sample(c.name, lambda dtype, c=c: _args(c, dtype), DTYPES) for c in EVERY_CHUNKED],
        reference.solve,
        differentiable=(0, 1),
    ),
    OpCase(
        "solve_bwd",
        [Sample(c.name, lambda dtype, c=c: _bwd_args(c, dtype), DTYPES) for c in EVERY_CHUNKED],
        _solve_bwd,
    ),
]
