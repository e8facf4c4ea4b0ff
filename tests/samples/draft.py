"""Samples of draft and commit: whole tokens of a call, and counts on either side of their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from tests.cases import Case
from tests.harness import OpCase, Sample

from .shapes import EVERY, WIDE


def _commit_args(case: Case, dtype: torch.dtype) -> list[Any]:
    inputs = case.make(dtype)
    _, new_rows, slots = reference.draft(*inputs.to(torch.float64))
    counts = torch.tensor([case.tokens // 2, case.tokens + 1, 1, -1]).repeat(case.streams)[: case.streams]
    return [inputs.memory, new_rows.to(dtype), slots, counts.to(case.id_dtype)]


def _specified(args: Sequence[Any], outputs: list[Tensor]) -> list[Tensor]:
    readings, new_rows, slots = outputs
    return [readings, new_rows.masked_fill((slots < 0).unsqueeze(-1), 0), slots]


CASES = [
    OpCase(
        "draft",
        [Sample(c.name, lambda dtype, c=c: c.make(dtype)) for c in [*EVERY, WIDE]],
        reference.draft,
        through_bank=True,
        specified=_specified,
    ),
    OpCase(
        "commit_",
        [Sample(c.name, lambda dtype, c=c: _commit_args(c, dtype)) for c in [*EVERY, WIDE]],
        reference.commit,
    ),
]
