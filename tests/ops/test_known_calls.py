"""Which calls are alike, which can be known, and who observes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from sdm_compile.ops import known_calls
from sdm_compile.ops.known_calls import KnownCalls, can_be_known, unobserved
from tests.observers import CAN, CANNOT, NOBODY, OBSERVERS, OTHERS, pair, profiled


def known() -> None: ...


def other() -> None: ...


@pytest.fixture
def calls() -> KnownCalls:
    calls = KnownCalls()
    calls.add(pair(), known)
    return calls


def test_calls_are_alike_whatever_their_tensors_hold(calls: KnownCalls) -> None:
    assert calls.find([torch.full((4, 3), 7.0), torch.ones(2, dtype=torch.int32)]) is known
    assert calls.find([torch.ones(5, 3)[1:], torch.zeros(2, dtype=torch.int32)]) is known
    assert calls.find([torch.ones(4, 3), torch.ones(3, dtype=torch.int32)]) is None


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("made", OTHERS.values(), ids=OTHERS)
def test_other_calls(made: Callable[[], Tensor], place: int) -> None:
    calls = KnownCalls()
    tensors = [torch.ones(4, 3) for _ in range(3)]
    calls.add(tensors, known)
    tensors[place] = made()
    assert calls.find(tensors) is None


@pytest.mark.parametrize(
    "state", [torch.inference_mode, lambda: torch.autocast("cpu"), torch._C._AutoDispatchBelowAutograd]
)
def test_the_state_of_the_dispatcher_counts(calls: KnownCalls, state: Callable[[], Any]) -> None:
    tensors = pair()
    with state():
        assert calls.find(tensors) is None
        calls.add(tensors, other)
        assert calls.find(tensors) is other
    assert calls.find(tensors) is known


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_gradient_counts_whatever_the_grad_mode(calls: KnownCalls, mode: Callable[[], Any]) -> None:
    with mode():
        assert calls.find(pair()) is known
        assert calls.find([torch.ones(4, 3, requires_grad=True), pair()[1]]) is None


def test_no_tensor_is_kept() -> None:
    calls, tensors = KnownCalls(), pair()
    kept = [weakref.ref(x) for x in tensors]
    calls.add(tensors, known)
    del tensors
    assert [ref() for ref in kept] == [None, None]


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "MAX_SHAPES", 2)
    monkeypatch.setattr(known_calls, "MAX_ALIKE", 2)
    calls = KnownCalls()
    alike = [[torch.ones(4), torch.ones(3), torch.ones(n)] for n in range(4)]
    for tensors in alike[:3]:
        calls.add(tensors, known)
    assert [calls.find(tensors) for tensors in alike] == [known, known, None, None]
    assert not calls.has_room(alike[3])
    two, three = ([torch.ones(n), torch.ones(3)] for n in (2, 3))
    assert calls.has_room(two)
    calls.add(two, other)
    calls.add([*two, torch.ones(1)], other)  # of no other shapes
    assert calls.find(alike[1]) is known and calls.find(two) is other
    calls.add(three, other)
    assert calls.find(alike[1]) is None and calls.find(three) is other


@pytest.mark.parametrize("made", CAN.values(), ids=CAN)
def test_plain_tensors_can_be_known(made: Callable[[], Tensor]) -> None:
    assert can_be_known([*pair(), made()])
    with torch.inference_mode(), torch.autocast("cpu"):
        assert can_be_known([made(), *pair()])


@pytest.mark.parametrize("made", CANNOT.values(), ids=CANNOT)
def test_what_the_dispatcher_or_the_grad_mode_would_act_on_cannot(made: Callable[[], Tensor]) -> None:
    assert not can_be_known([*pair(), made()])
    assert not can_be_known([made(), *pair()])


def test_one_tensor_in_two_places_cannot() -> None:
    first, second = pair()
    assert not can_be_known([first, second, second])


def test_without_the_guards_nothing_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "TensorGuards", None)
    assert not can_be_known(pair())


@pytest.mark.parametrize("nobody", NOBODY.values(), ids=NOBODY)
def test_unobserved(nobody: Callable[[], AbstractContextManager[Any]]) -> None:
    with nobody():
        assert unobserved()


@pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
def test_observed(observer: Callable[[], AbstractContextManager[Any]]) -> None:
    with observer():
        assert not unobserved()
    assert unobserved()


TRACERS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "make_fx": make_fx,
    "make_fx before dispatch": lambda f: make_fx(f, pre_dispatch=True),
    "functionalize": torch.func.functionalize,
    "vmap": torch.func.vmap,
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "jit.trace": lambda f: lambda x: torch.jit.trace(f, (x,), check_trace=False),
    "compile": lambda f: torch.compile(f, backend="eager", fullgraph=True),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("trace", TRACERS.values(), ids=TRACERS)
def test_tracers_observe(trace: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]) -> None:
    found = []

    def call(x: Tensor) -> Tensor:
        found.append(unobserved())
        return 2 * x

    trace(call)(torch.ones(2))
    assert found == [False]


def test_a_profiler_of_all_threads_is_seen_by_others() -> None:
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(unobserved).result()
        with profiled(all_threads=True):
            assert not executor.submit(unobserved).result()


@pytest.mark.parametrize("first", [nullcontext, torch.inference_mode])
def test_a_strided_tensor_has_the_same_keys_wherever_it_is_asked_first(first: Callable[[], Any]) -> None:
    known_calls._strided_keys.cache_clear()
    with first():
        assert can_be_known(pair())
    assert can_be_known(pair())
