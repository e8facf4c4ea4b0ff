"""Samples of the decode step: one token per stream, in any leading shape."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from sdm_compile import reference
from tests.cases import Case
from tests.harness import OpCase, Sample

from .shapes import EDGES, ERASED, NO_SLOT, OTHER_SIZES, RAGGED, WRITE_GATES


def _args(case: Case, lead: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    memory, *inputs = replace(case, streams=prod(lead), tokens=1).make(dtype)
    return [memory, *(x.reshape(*lead, x.shape[-1]) for x in inputs)]


_SAMPLES: list[tuple[str, Case, tuple[int, ...]]] = [
    ("ragged", RAGGED, (4, 2)),
    ("other sizes", OTHER_SIZES, (3, 5)),
    ("one of everything", Case("", 1, 1, 1, 1, 1, 1, 0, 1), (1,)),
    ("no leading dimension", WRITE_GATES, ()),
    ("gates per write", WRITE_GATES, (5,)),
    ("every edge at once", EDGES, (40,)),
    ("erased", replace(ERASED, erased=1.0), (2,)),
    ("no slot at all", NO_SLOT, (3,)),
    ("no streams", RAGGED, (0, 3)),
]

CASES = [
    OpCase(
        "decode_step_",
        [Sample(name, lambda dtype, c=c, lead=lead: _args(c, lead, dtype)) for name, c, lead in _SAMPLES],
        reference.decode_step,
        through_bank=True,
    )
]
