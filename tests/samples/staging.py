"""Samples of the staging: calls as users make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from sdm_compile.ops.checks import accumulate_dtype
from tests.cases import Case, Inputs
from tests.harness import DTYPES, OpCase, Sample, normal_like, vjp

from .shapes import EVERY, WRITE_GATES, chunked


def _mixed(case: Case, dtype: torch.dtype) -> Inputs:
    """Inputs in other dtypes than the bank's."""
    inputs, others = case.make(torch.float64), [d for d in DTYPES if d != dtype]
    a, b = others[0], others[1]
    return inputs._replace(
        k_val=inputs.k_val.to(a), v=inputs.v.to(b), beta=inputs.beta.to(b), g=inputs.g.to(a), q_val=inputs.q_val.to(b)
    )


def _stage_args(case: Case, dtype: torch.dtype, inputs: Inputs) -> list[Any]:
    return [*inputs[1:], inputs.memory.shape[0], dtype, case.chunk_size, True]


def _stage_inputs(*args: Any) -> tuple[Tensor, ...]:
    *inputs, _, _, chunk_size, _ = args
    k_idx, k_val, v, beta, g, q_idx, q_val = reference.stage_inputs(*inputs, chunk_size)
    return k_idx.int(), k_val, v, beta, g, q_idx.int(), q_val


def _stage_bwd_args(case: Case, dtype: torch.dtype, inputs: Inputs) -> list[Any]:
    """Gradients of the staged floats, in the dtypes that staging gave those."""
    _, k_val, v, beta, g, _, q_val = chunked(case).staged
    grads = [normal_like(x, seed) for seed, x in enumerate((k_val, v, beta, g, q_val))]
    dtypes = (dtype, dtype, accumulate_dtype(dtype), accumulate_dtype(dtype), dtype)
    return [*(x.to(d) for x, d in zip(grads, dtypes, strict=True)), *inputs[1:]]


def _stage_inputs_bwd(dk_val: Tensor, dv: Tensor, dbeta: Tensor, dg: Tensor, dq_val: Tensor, *inputs: Tensor) -> Any:
    def stage(*inputs: Tensor) -> tuple[Tensor, ...]:
        return reference.stage_inputs(*inputs, dk_val.shape[2])

    return vjp(stage, inputs, (None, dk_val, dv, dbeta, dg, None, dq_val))


def _unstage_readings_bwd(dreadings: Tensor, chunk_size: int) -> Any:
    streams, tokens, width = dreadings.shape
    staged = dreadings.new_zeros(-(-tokens // chunk_size), streams, chunk_size, width)
    return vjp(lambda x: reference.unstage_readings(x, tokens), (staged,), (dreadings,))


CASES = [
    OpCase(
        "stage_inputs",
        [
            *(Sample(c.name, lambda dtype, c=c: _stage_args(c, dtype, c.make(dtype))) for c in EVERY),
            Sample("other dtypes", lambda dtype: _stage_args(WRITE_GATES, dtype, _mixed(WRITE_GATES, dtype))),
        ],
        _stage_inputs,
        differentiable=(1, 2, 3, 4, 6),
    ),
    OpCase(
        "stage_inputs_bwd",
        [
            *(Sample(c.name, lambda dtype, c=c: _stage_bwd_args(c, dtype, c.make(dtype))) for c in EVERY),
            Sample("other dtypes", lambda dtype: _stage_bwd_args(WRITE_GATES, dtype, _mixed(WRITE_GATES, dtype))),
        ],
        _stage_inputs_bwd,
    ),
    OpCase(
        "unstage_readings",
        [Sample(c.name, lambda dtype, c=c: [chunked(c).readings.to(dtype), c.tokens]) for c in EVERY],
        reference.unstage_readings,
        differentiable=(0,),
    ),
    OpCase(
        "unstage_readings_bwd",
        [Sample(c.name, lambda dtype, c=c: [c.make(dtype).v, c.chunk_size]) for c in EVERY],
        _unstage_readings_bwd,
    ),
]
