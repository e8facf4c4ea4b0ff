"""Samples of product-key top-k: every slot scores another whole number, so one answer is right in every dtype."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from tests.harness import OpCase, Sample, vjp

_SAMPLES: list[tuple[str, tuple[int, ...], tuple[int, ...], int]] = [
    ("two factors", (3, 5), (8, 11), 6),
    ("other leading sizes", (4, 7), (8, 11), 6),
    ("three factors", (4,), (3, 4, 5), 13),
    ("one factor", (5,), (17,), 4),
    ("one slot", (2,), (1, 1), 1),
    ("every slot", (3,), (4, 6), 24),
    ("no leading dimension", (), (5, 8), 7),
    ("no rows", (0, 3), (5, 8), 7),
]


def _scores(lead: tuple[int, ...], factors: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    parts, stride = [], prod(factors)
    for n in factors:
        stride //= n
        parts.append(stride * torch.rand(*lead, n, generator=generator).argsort(-1))
    return torch.cat(parts, -1)


def _bwd_args(lead: tuple[int, ...], factors: Sequence[int], k: int, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    indices = torch.rand(*lead, prod(factors), generator=generator).argsort(-1)[..., :k].sort(-1).values
    return [torch.randn(*lead, k, generator=generator, dtype=torch.float64).to(dtype), indices, list(factors)]


def _product_key_topk_bwd(dvalues: Tensor, indices: Tensor, factors: Sequence[int]) -> list[Tensor]:
    def chosen(scores: Tensor) -> Tensor:
        columns = torch.unravel_index(indices, tuple(factors))
        parts = scores.split(list(factors), -1)
        return torch.stack([part.gather(-1, c) for part, c in zip(parts, columns, strict=True)]).sum(0)

    return vjp(chosen, (dvalues.new_zeros(*dvalues.shape[:-1], sum(factors)),), (dvalues,))


CASES = [
    OpCase(
        "product_key_topk",
        [Sample(name, lambda dtype, s=s: [_scores(s[0], s[1]).to(dtype), list(s[1]), s[2]]) for name, *s in _SAMPLES],
        reference.product_key_topk,
        differentiable=(0,),
    ),
    OpCase(
        "product_key_topk_bwd",
        [Sample(name, lambda dtype, s=s: _bwd_args(*s, dtype)) for name, *s in _SAMPLES],
        _product_key_topk_bwd,
    ),
]
