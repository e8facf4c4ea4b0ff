"""One list of samples per stage: what its tests check and its benchmark may time."""

from __future__ import annotations

from tests.harness import OpCase

from . import decay_write, decode, draft, dual_matmul, phase1, row_quant, solve, staging, token_gather, topk, write_read

CASES: list[OpCase] = [
    *staging.CASES,
    *phase1.CASES,
    *solve.CASES,
    *token_gather.CASES,
    *dual_matmul.CASES,
    *decay_write.CASES,
    *row_quant.CASES,
    *decode.CASES,
    *draft.CASES,
    *topk.CASES,
    *write_read.CASES,
]
