"""What a step reaches by names is found, and seen to change; on a GPU, DecodeGraph then captures it again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sdm_compile.graphs import DecodeGraph
from sdm_compile.graphs.reach import Reached


class Bound:
    """A step that is a method of something that holds a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor, state: None) -> Tensor:
        return self.module(x)

    def step(self, x: Tensor, state: None) -> Tensor:
        return self.module(x)


class Stateful(nn.Linear):
    def step(self, x: Tensor, state: None) -> Tensor:
        return self(x)


class Indirect(Bound):
    """Its method gets there by a property and another method."""

    @property
    def inner(self) -> nn.Module:
        return self.module

    def help(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def step(self, x: Tensor, state: None) -> Tensor:
        return self.help(x)


GLOBAL = Stateful(3, 3)
HOLDER = types.SimpleNamespace(module=GLOBAL, unused=nn.Linear(3, 3))


def global_helper(x: Tensor) -> Tensor:
    return global_module(x)


def global_module(x: Tensor) -> Tensor:
    return GLOBAL(x)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(function)


WAYS: dict[str, Callable[[Stateful], Callable[..., Any]]] = {
    "method": lambda module: module.step,
    "closure": lambda module: lambda x, state: module(x),
    "list": lambda module: (lambda modules: lambda x, state: modules[0](x))([module]),
    "default": lambda module: lambda x, state, module=module: module(x),
    "global": lambda module: lambda x, state: (lambda: GLOBAL(x))(),
    "global function": lambda module: lambda x, state: global_helper(x),
    "global object": lambda module: lambda x, state: HOLDER.module(x),
    "object in a closure": lambda module: (lambda holder: lambda x, state: holder.module(x))(Bound(module)),
    "callable in a closure": lambda module: (lambda holder: lambda x, state: holder(x, state))(Bound(module)),
    "nested objects": lambda module: (lambda outer: lambda x, state: outer.holders[0]["a"].module(x))(
        types.SimpleNamespace(holders=[{"a": Bound(module)}], unused=nn.Linear(3, 3))
    ),
    "other methods": lambda module: Indirect(module).step,
    "partial": lambda module: functools.partial(lambda m, x, state: m(x), module),
    "object": lambda module: Bound(module),
    "object's method": lambda module: Bound(module).step,
    "decorated": lambda module: decorated(lambda x, state: module(x)),
    "nested": lambda module: lambda x, state: (lambda: module(x))(),
    "parameter": lambda module: (lambda w, b: lambda x, state: x @ w.T + b)(module.weight, module.bias),
}


@pytest.mark.parametrize("way", WAYS)
def test_modules_are_found(way: str) -> None:
    module = GLOBAL if way.startswith("global") else Stateful(3, 3)
    watched = Reached(WAYS[way](module))
    assert {id(x) for x in watched.tensors} == {id(x) for x in module.parameters()}
    module.weight.data = module.weight.data.clone()
    assert not watched.unchanged()


class Places:
    """Each a step, and what puts another module in the place of the one that it finds."""

    @staticmethod
    def closure(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        def rebind() -> None:
            nonlocal module
            module = other

        return lambda x, state: module(x), rebind

    @staticmethod
    def emptied_closure(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        def empty() -> None:
            nonlocal module
            del module

        return lambda x, state: module(x), empty

    @staticmethod
    def dict_in_a_closure(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        modules = {"a": module}
        return lambda x, state: modules["a"](x), lambda: modules.update(a=other)

    @staticmethod
    def attribute(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        holder = Bound(module)
        return holder.step, lambda: setattr(holder, "module", other)

    @staticmethod
    def attribute_of_an_object_in_a_closure(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        holder = Bound(module)
        return lambda x, state: holder.module(x), lambda: setattr(holder, "module", other)

    @staticmethod
    def object_in_an_object(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        outer = types.SimpleNamespace(holder=Bound(module))
        return lambda x, state: outer.holder.module(x), lambda: setattr(outer, "holder", Bound(other))

    @staticmethod
    def global_variable(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        return lambda x, state: GLOBAL(x), lambda: globals().update(GLOBAL=other)

    @staticmethod
    def global_variable_of_a_helper(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        return lambda x, state: global_helper(x), lambda: globals().update(GLOBAL=other)

    @staticmethod
    def global_function(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        return lambda x, state: global_helper(x), lambda: globals().update(global_module=lambda x: other(x))

    @staticmethod
    def method(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        kind = type("Kind", (Bound,), {"run": lambda self, x: self.module(x)})
        holder = kind(module)
        return lambda x, state: holder.run(x), lambda: setattr(kind, "run", lambda self, x: other(x))


PLACES = [name for name, value in vars(Places).items() if isinstance(value, staticmethod)]


@pytest.fixture
def kept_globals() -> Iterator[None]:
    with mock.patch.dict(globals()):
        yield


@pytest.mark.usefixtures("kept_globals")
@pytest.mark.parametrize("place", PLACES)
def test_another_module_in_the_same_place_is_seen(place: str) -> None:
    fn, rebind = getattr(Places, place)(Stateful(3, 3), Stateful(3, 3))
    watched = Reached(fn)
    assert watched.unchanged()
    rebind()
    assert not watched.unchanged()


@pytest.mark.gpu
@pytest.mark.usefixtures("kept_globals")
@pytest.mark.parametrize("place", [place for place in PLACES if place != "emptied_closure"])
def test_another_module_in_the_same_place_is_used(place: str) -> None:
    GLOBAL.cuda()
    fn, rebind = getattr(Places, place)(Stateful(3, 3).cuda(), Stateful(3, 3).cuda())
    step = DecodeGraph(fn, None, torch.ones(2, 3, device="cuda"))
    for _ in range(2):
        x = torch.randn(2, 3, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(step(x), fn(x, None))
        rebind()


def test_what_no_code_names_may_change() -> None:
    """Results that an object keeps, of which its step knows nothing, mean no new capture."""
    holder = Bound(Stateful(3, 3))
    holder.latest = torch.zeros(3)  # type: ignore[attr-defined]
    watched = Reached(holder.step)
    holder.latest = torch.ones(3)  # type: ignore[attr-defined]
    holder.module(torch.ones(1, 3))
    assert watched.unchanged()


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_modules_that_are_found_are_followed(way: str) -> None:
    module = (GLOBAL if way.startswith("global") else Stateful(3, 3)).cuda()
    step = DecodeGraph(WAYS[way](module), None, torch.ones(2, 3, device="cuda"))
    for _ in range(2):
        module.weight.data = torch.randn(3, 3, device="cuda")
        x = torch.randn(2, 3, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(step(x), module(x))
