"""Samples of the dual matmul: one step's matrices, values and gathered rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from sdm_compile.ops.checks import accumulate_dtype
from tests.cases import Case
from tests.harness import OpCase, Sample, masked, normal_like, vjp

from .shapes import EVERY_STEP, RAGGED, WRITE_GATES, chunked, middle_step


def _args(case: Case, dtype: torch.dtype) -> list[Tensor]:
    call, step, accumulate = chunked(case), middle_step(case), accumulate_dtype(dtype)
    X, QX, beta, retrieved, inter = (
        x[step].to(accumulate) for x in (call.X, call.QX, call.staged.beta, call.retrieved, call.inter)
    )
    return [X, QX, call.staged.v[step].to(dtype), beta, retrieved, inter]


def _bwd_args(case: Case, dtype: torch.dtype, mask: tuple[bool, ...] = (True,) * 6) -> list[Any]:
    X, QX, v, beta, retrieved, _ = _args(case, dtype)
    return [normal_like(retrieved, 1), normal_like(v, 2), X, QX, v, beta, retrieved, list(mask)]


def _dual_matmul_bwd(ddelta: Tensor, dreadings: Tensor, *args: Any) -> list[Tensor]:
    *inputs, mask = args
    return masked(vjp(reference.dual_matmul, (*inputs, torch.zeros_like(inputs[-1])), (ddelta, dreadings)), mask)


CASES = [
    OpCase(
        "dual_matmul",
        [Sample(c.name, lambda dtype, c=c: _args(c, dtype)) for c in EVERY_STEP],
        reference.dual_matmul,
        differentiable=(0, 1),
    ),
    OpCase(
        "dual_matmul_bwd",
        [
            *(Sample(c.name, lambda dtype, c=c: _bwd_args(c, dtype)) for c in EVERY_STEP),
            Sample("every other gradient", lambda dtype: _bwd_args(RAGGED, dtype, (True, False) * 3)),
            Sample("the others", lambda dtype: _bwd_args(WRITE_GATES, dtype, (False, True) * 3)),
            Sample("no gradient", lambda dtype: _bwd_args(RAGGED, dtype, (False,) * 6)),
        ],
        _dual_matmul_bwd,
    ),
]
