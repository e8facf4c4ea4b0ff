"""Where the tensors of a working memory lie: apart, but for those that take their memory in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sdm_compile.ops.working_memory import Memory, in_turn, memory_bytes


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def memory_of(form: Any) -> tuple[Memory, Any]:
    memory = Memory()
    memory.become(memory_bytes(form), torch.device("cpu"))
    return memory, memory.of(form)


def number(nest: Any) -> None:
    """Fills each tensor with a number of its own."""
    for n, x in enumerate(tree_leaves(nest)):
        x.fill_(n + 1)


def is_numbered(nest: Any) -> bool:
    return all(bool((x == n + 1).all()) for n, x in enumerate(tree_leaves(nest)))


FIRST = dict(a=meta(3, 5), b=meta(7, dtype=torch.int64), c=(meta(0), meta(1, dtype=torch.int8)))
SECOND = dict(d=meta(200, dtype=torch.float64), e=meta(2, 2))


def test_tensors_have_the_form_and_lie_apart() -> None:
    form = [meta(2, 3, dtype=torch.bfloat16), FIRST, SECOND]
    memory, nest = memory_of(form)
    for x, y in zip(tree_leaves(nest), tree_leaves(form), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        assert (x.data_ptr() - memory.bytes.data_ptr()) % 512 == 0 or not x.numel()
    number(nest)
    assert is_numbered(nest)


@pytest.mark.parametrize("forms", [(FIRST, SECOND), (SECOND, FIRST)], ids=["the larger last", "the larger first"])
def test_forms_in_turn(forms: tuple[dict[str, Any], dict[str, Any]]) -> None:
    first, second = in_turn(*forms)
    form = dict(before=meta(5), first=first, kept=[meta(600, dtype=torch.int8)], second=second, after=meta(1))
    assert memory_bytes([first, second]) == max(map(memory_bytes, forms))
    assert memory_bytes(form) == memory_bytes([first, second]) + 512 + 1024 + 512
    _, nest = memory_of(form)
    others = [nest["before"], nest["kept"], nest["after"]]
    for part in ("first", "second"):
        assert [x.dtype for x in tree_leaves(nest[part])] == [x.dtype for x in tree_leaves(form[part])]
        number(nest[part]), number(others)
        assert is_numbered(nest[part]) and is_numbered(others)
    assert not is_numbered(nest["first"])


def test_turns_within_turns() -> None:
    inner = in_turn(dict(a=meta(300)), dict(b=meta(200)))
    outer = in_turn(dict(inner=inner, c=meta(3)), dict(d=meta(10)))
    assert memory_bytes(outer) == 1536 + 512
    _, (first, second) = memory_of(outer)
    number([first["inner"][1], first["c"]])
    assert is_numbered([first["inner"][1], first["c"]])
    second["d"].fill_(7)
    assert not is_numbered([first["inner"][1]]) and (second["d"] == 7).all()
