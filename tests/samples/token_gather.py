"""Samples of the token gather: one step's ids and weights, and the bank before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from sdm_compile.ops.checks import accumulate_dtype
from tests.cases import Case
from tests.harness import OpCase, Sample, masked, normal_like, vjp

from .shapes import EDGES, EVERY_STEP, EVERY_STEP_BWD, RAGGED, chunked, middle_step


def _args(case: Case, dtype: torch.dtype) -> list[Tensor]:
    call, step, accumulate = chunked(case), middle_step(case), accumulate_dtype(dtype)
    k_idx, q_idx = call.staged.k_idx[step], call.staged.q_idx[step]
    k_eff, q_w = call.fields.k_eff[step].to(accumulate), call.fields.q_w[step].to(accumulate)
    return [call.banks[step].to(dtype), k_idx, k_eff, q_idx, q_w]


def _bwd_args(case: Case, dtype: torch.dtype, mask: tuple[bool, ...] = (True, True, True)) -> list[Any]:
    rows = chunked(case).retrieved[middle_step(case)]
    grads = [normal_like(rows, seed).to(accumulate_dtype(dtype)) for seed in (1, 2)]
    return [*grads, *_args(case, dtype), list(mask)]


def _token_gather_bwd(dretrieved: Tensor, dinter: Tensor, *args: Any) -> list[Tensor]:
    *inputs, mask = args
    return masked(vjp(reference.token_gather, inputs, (dretrieved, dinter)), mask)


CASES = [
    OpCase(
        "token_gather",
        [Sample(c.name, lambda dtype, c=c: _args(c, dtype)) for c in EVERY_STEP],
        reference.token_gather,
        differentiable=(0, 1),
    ),
    OpCase(
        "token_gather_bwd",
        [
            *(Sample(c.name, lambda dtype, c=c: _bwd_args(c, dtype)) for c in EVERY_STEP_BWD),
            Sample("the bank's gradient alone", lambda dtype: _bwd_args(EDGES, dtype, (True, False, False))),
            Sample("all but the bank's gradient", lambda dtype: _bwd_args(RAGGED, dtype, (False, True, True))),
            Sample("no gradient", lambda dtype: _bwd_args(RAGGED, dtype, (False, False, False))),
        ],
        _token_gather_bwd,
    ),
]
