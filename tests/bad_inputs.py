"""Inputs that the public write/read and decode calls refuse, with the error that each one gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile import UnsupportedConfigurationError, repeated_write_slots
from tests.cases import FLOATS, RAGGED, Inputs

# P = 2, T = 11, W = 3, R = 4, D = 5 and a bank of 19 rows. Repeated slots, so that counting before checking shows.
CASE = replace(RAGGED, repeated=0.3)
SHAPES = {
    "k_idx": (2, 11, 3),
    "k_val": (2, 11, 3),
    "v": (2, 11, 5),
    "beta": (2, 11, 1),
    "g": (2, 11, 1),
    "q_idx": (2, 11, 4),
    "q_val": (2, 11, 4),
}
NO_RANK: dict[str, Any] = {"not_for": ("decode",)}  # a decode step takes any leading dimensions


@dataclass(frozen=True)
class BadInput:
    """`change` gives the arguments that differ from well-formed ones; `message` is part of the error's text."""

    name: str
    change: Callable[[Inputs], dict[str, Any]]
    message: str
    error: type[Exception] = ValueError
    not_for: tuple[str, ...] = ()  # calls to which it is no error, or which have no such argument

    def arguments(self) -> tuple[Inputs, dict[str, Any]]:
        """The positional arguments and the keywords."""
        inputs = CASE.make(torch.float32)
        changed = self.change(inputs)
        return inputs._replace(**{k: x for k, x in changed.items() if k in Inputs._fields}), {
            k: x for k, x in changed.items() if k not in Inputs._fields
        }


def changing(name: str, how: Callable[[Tensor], Tensor]) -> Callable[[Inputs], dict[str, Any]]:
    return lambda inputs: {name: how(getattr(inputs, name))}


def widths(ids: str, weights: str, width: int) -> Callable[[Inputs], dict[str, Any]]:
    """Both made so wide; the slots need not be distinct, as the width is refused first."""
    return lambda inputs: {name: getattr(inputs, name)[..., :1].expand(2, 11, width) for name in (ids, weights)}


BAD_INPUTS = [
    # Ranks, streams and lengths. The shape that the others are measured by is k_idx's.
    BadInput("memory of rank 3", changing("memory", lambda x: x[None]), "memory has shape (1, 19, 5); expected ["),
    BadInput("memory of rank 1", changing("memory", lambda x: x[0]), "memory has shape (5,); expected ["),
    *(
        BadInput(f"{name} {how}", changing(name, change), f"{name} has shape {got(shape)}; expected [")
        for name, shape in SHAPES.items()
        if name != "k_idx"
        for how, change, got in (
            ("without streams", lambda x: x[0], lambda shape: shape[1:]),
            ("with a dimension too many", lambda x: x[None], lambda shape: (1, *shape)),
            ("of one stream", lambda x: x[:1], lambda shape: (1, *shape[1:])),
            ("a token short", lambda x: x[:, :-1], lambda shape: (2, 10, shape[2])),
        )
    ),
    BadInput(
        "k_idx without streams", changing("k_idx", lambda x: x[0]), "k_idx has shape (11, 3); expected [", **NO_RANK
    ),
    BadInput(
        "everything without streams",
        lambda i: {name: getattr(i, name)[0] for name in SHAPES},
        "k_idx has shape (11, 3); expected [P, T, W]",
        **NO_RANK,
    ),
    BadInput("k_idx of one stream", changing("k_idx", lambda x: x[:1]), "k_val has shape (2, 11, 3); expected ["),
    BadInput("k_idx a token short", changing("k_idx", lambda x: x[:, :-1]), "k_val has shape (2, 11, 3); expected ["),
    # Widths.
    *(
        BadInput(f"{name} too narrow", changing(name, lambda x: x[..., :-1]), f"{name} has shape (2, 11, {width})")
        for name, width in (("k_val", 2), ("q_val", 3), ("v", 4), ("beta", 0), ("g", 0))
    ),
    BadInput("beta per write", changing("beta", lambda x: x.expand(2, 11, 3)), "beta has shape (2, 11, 3); expected ["),
    BadInput("g of width 2", changing("g", lambda x: x.expand(2, 11, 2)), "g has shape (2, 11, 2); expected ["),
    *(
        BadInput(
            f"{letter} = {width}",
            widths(ids, weights, width),
            f"{letter} (last dimension of {ids}) is {width}; supported are 1 to 256",
            UnsupportedConfigurationError,
        )
        for letter, ids, weights in (("W", "k_idx", "k_val"), ("R", "q_idx", "q_val"))
        for width in (0, 257)
    ),
    BadInput(
        "memory without columns",
        lambda i: {"memory": i.memory[:, :0], "v": i.v[..., :0]},
        "head_dim D (last dimension of memory) is 0",
        UnsupportedConfigurationError,
    ),
    # Dtypes and devices.
    *(
        BadInput(
            f"{name} of {str(dtype)[6:]}",
            changing(name, lambda x, dtype=dtype: x.to(dtype)),
            f"{name} has dtype {dtype}; on cpu use one of bfloat16, float32, float64",
            UnsupportedConfigurationError,
        )
        for name in FLOATS
        for dtype in (torch.float16, torch.int64)
    ),
    *(
        BadInput(
            f"{name} of {str(dtype)[6:]}",
            changing(name, lambda x, dtype=dtype: x.to(dtype)),
            f"{name} has dtype {dtype}; slot ids are int32, int64",
        )
        for name in ("k_idx", "q_idx")
        for dtype in (torch.float32, torch.bool, torch.int16)
    ),
    *(
        BadInput(f"{name} elsewhere", changing(name, lambda x: x.to("meta")), f"{name} is on meta; expected cpu, where")
        for name in SHAPES
    ),
    BadInput("memory elsewhere", changing("memory", lambda x: x.to("meta")), "k_idx is on cpu; expected meta, where"),
    # Values and settings.
    *(
        BadInput(
            f"{name} beyond the bank",
            changing(name, lambda x: x.index_fill(1, torch.tensor([6]), 19)),
            f"{name} holds slot id 19, but memory has 19 rows",
            IndexError,
        )
        for name in ("k_idx", "q_idx")
    ),
    *(
        BadInput(
            f"chunk_size = {size}",
            lambda _, size=size: {"chunk_size": size},
            f"chunk_size is {size}; supported are 1 to 256",
            UnsupportedConfigurationError,
            not_for=("decode", "draft"),
        )
        for size in (0, 257, -1)
    ),
    BadInput(
        "an unknown snapshot_quant",
        lambda _: {"snapshot_quant": "fp4"},
        "snapshot_quant is 'fp4'; choose one of 'none', 'bf16', 'fp8', 'int4', 'recompute'",
        not_for=("decode", "draft", "in place", "traced"),
    ),
]


def assert_refused(function: Callable[..., Any], bad: BadInput, requires_grad: bool = False, **settings: Any) -> None:
    """The very error type, its message, and nothing written or counted before it."""
    inputs, keywords = bad.arguments()
    if requires_grad:
        inputs.memory.requires_grad_(inputs.memory.is_floating_point())
    before, versions = [x.detach().clone() for x in inputs], [x._version for x in inputs]
    repeated_write_slots()
    with pytest.raises(bad.error, match=re.escape(bad.message)) as caught:
        function(*inputs, **keywords, **settings)
    assert caught.type is bad.error
    for name, now, then, version in zip(Inputs._fields, inputs, before, versions, strict=True):
        assert now._version == version, name
        assert now.is_meta or torch.equal(now.detach(), then), name
    assert repeated_write_slots() == 0
