"""Which calls are alike, who observes them, and the decode step, which passes the dispatcher by in known calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sdm_compile import last_dispatch, sdm_decode_step
from sdm_compile.ops import decode, known_calls
from sdm_compile.ops.known_calls import KnownCalls, unobserved
from tests.cases import TANGLED, Inputs
from tests.harness import assert_same_bits

F32 = torch.float32


def pair() -> list[Tensor]:
    return [torch.ones(4, 3), torch.zeros(2, dtype=torch.int32)]


@pytest.fixture
def calls() -> KnownCalls[str]:
    calls: KnownCalls[str] = KnownCalls()
    calls.add("key", pair(), "known")
    return calls


class Sub(Tensor):
    """With no functions of its own, as a parameter; but nobody knows of its dispatch."""

    __torch_function__ = torch._C._disabled_torch_function_impl


OTHERS: dict[str, Callable[[], Tensor]] = {
    "shape": lambda: torch.ones(5, 3),
    "rank": lambda: torch.ones(4, 3, 1),
    "strides": lambda: torch.ones(3, 4).t(),
    "dtype": lambda: torch.ones(4, 3, dtype=torch.bfloat16),
    "device": lambda: torch.ones(4, 3, device="meta"),
    "requires_grad": lambda: torch.ones(4, 3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(4, 3), requires_grad=False),
    "subclass": lambda: torch.ones(4, 3).as_subclass(Sub),
    "sparse": lambda: torch.ones(4, 3).to_sparse(),
    "a bit that says negative": lambda: torch._neg_view(torch.ones(4, 3)),
    "zeros without memory": lambda: torch._efficientzerotensor((4, 3)),
    "made in inference mode": torch.inference_mode()(lambda: torch.ones(4, 3)),
    "no tensor": lambda: 3,  # type: ignore[dict-item,return-value]
}


def test_calls_are_alike_whatever_their_tensors_hold(calls: KnownCalls[str]) -> None:
    assert calls.find("key", [torch.full((4, 3), 7.0), torch.ones(2, dtype=torch.int32)]) == "known"
    assert calls.find("key", [torch.ones(5, 3)[1:], torch.zeros(2, dtype=torch.int32)]) == "known"
    assert calls.find("another", pair()) is None


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_calls(calls: KnownCalls[str], other: Callable[[], Tensor]) -> None:
    _, ids = pair()
    assert calls.find("key", [other(), ids]) is None


@pytest.mark.parametrize(
    "state", [torch.inference_mode, lambda: torch.autocast("cpu"), torch._C._AutoDispatchBelowAutograd]
)
def test_the_state_of_the_dispatcher_counts(calls: KnownCalls[str], state: Callable[[], Any]) -> None:
    tensors = pair()
    with state():
        assert calls.find("key", tensors) is None
        calls.add("key", tensors, "known there")
        assert calls.find("key", tensors) == "known there"
    assert calls.find("key", tensors) == "known"


def test_a_gradient_counts_whatever_the_grad_mode(calls: KnownCalls[str]) -> None:
    wanting = [torch.ones(4, 3, requires_grad=True), pair()[1]]
    with torch.no_grad():
        assert calls.find("key", pair()) == "known"
    with torch.enable_grad():
        assert calls.find("key", wanting) is None


def test_no_tensor_is_kept() -> None:
    calls: KnownCalls[str] = KnownCalls()
    tensors = pair()
    kept = [weakref.ref(x) for x in tensors]
    calls.add("key", tensors, "known")
    del tensors
    assert [ref() for ref in kept] == [None, None]


@pytest.mark.parametrize(
    "other", [lambda: torch._neg_view(torch.ones(4, 3)), lambda: torch._efficientzerotensor((4, 3))]
)
def test_what_the_dispatcher_would_replace_is_never_known(other: Callable[[], Tensor]) -> None:
    calls: KnownCalls[str] = KnownCalls()
    tensors = [other(), pair()[1]]
    calls.add("key", tensors, "known")
    assert calls.find("key", tensors) is None


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "MAX_KEYS", 2)
    monkeypatch.setattr(known_calls, "MAX_ALIKE", 2)
    calls: KnownCalls[int] = KnownCalls()
    tensors = [torch.ones(n) for n in range(4)]
    for n in range(3):
        calls.add("a", [tensors[n]], n)
    assert [calls.find("a", [x]) for x in tensors] == [None, 1, 2, None]
    calls.add("b", tensors[:1], 3)
    assert calls.find("a", tensors[2:3]) == 2
    calls.add("c", tensors[:1], 4)
    assert calls.find("a", tensors[2:3]) is None and calls.find("c", tensors[:1]) == 4


def test_without_the_guards_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "TensorGuards", None)
    calls: KnownCalls[str] = KnownCalls()
    calls.add("key", pair(), "known")
    assert calls.find("key", pair()) is None


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def profiled() -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


NOBODY: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad mode": nullcontext,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
}
OBSERVERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": Watching,
    "function mode": Functions,
    "default device": lambda: torch.device("cpu"),
    "fake tensors": FakeTensorMode,
    "profiler": profiled,
    "forward AD": forward_ad.dual_level,
}


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


def one_token() -> Inputs:
    inputs = TANGLED.make(F32)
    return Inputs(inputs.memory.cuda(), *(x[:, 0].contiguous().cuda() for x in inputs[1:]))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One token's call has been made before; counts the calls that are made through the dispatcher from now on."""
    through: list[int] = []
    op = decode.decode_step_op
    sdm_decode_step(*one_token())
    monkeypatch.setattr(decode, "decode_step_op", lambda *args: through.append(1) or op(*args))  # type: ignore[func-returns-value]
    yield through


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
def test_a_known_decode_step(known: list[int], mode: Callable[[], AbstractContextManager[Any]]) -> None:
    inputs = one_token()
    expected_bank = inputs.memory.clone()
    expected = torch.ops.sdm.decode_step_(expected_bank, *inputs[1:])
    before = inputs.memory._version
    with mode():
        assert_same_bits(sdm_decode_step(*inputs), expected)
    assert known == []
    assert_same_bits(inputs.memory, expected_bank)
    assert inputs.memory._version == before + 1
    assert last_dispatch().decode is not None


@pytest.mark.gpu
def test_decode_steps_under_inference_mode(known: list[int]) -> None:
    inputs = one_token()
    with torch.inference_mode():
        own = Inputs(*(x.clone() for x in inputs))
        before = inputs.memory._version
        for tensors in (inputs, own):
            readings = [sdm_decode_step(*tensors._replace(memory=tensors.memory.clone())) for _ in range(2)]
            assert_same_bits(*readings)
        for _ in range(2):
            sdm_decode_step(*inputs)
    assert 0 < len(known) <= 3  # at most the first of each kind of call
    assert inputs.memory._version == before + 2
    with pytest.raises(RuntimeError, match="inference_mode"):
        sdm_decode_step(*own)


@pytest.mark.gpu
def test_bad_calls_after_good_ones(known: list[int]) -> None:
    inputs = one_token()
    bank = inputs.memory.clone()
    with pytest.raises(RuntimeError, match="writes in place and has no gradient"):
        sdm_decode_step(*inputs._replace(v=inputs.v.clone().requires_grad_()))
    with pytest.raises(ValueError, match="beta"):
        sdm_decode_step(*inputs._replace(beta=inputs.beta[..., 0]))
    with pytest.raises(ValueError, match="q_idx is on cpu"):
        sdm_decode_step(*inputs._replace(q_idx=inputs.q_idx.cpu()))
    with pytest.raises(ValueError, match="in-place call needs a contiguous bank"):
        sdm_decode_step(*inputs._replace(memory=inputs.memory.t().contiguous().t()))
    assert_same_bits(inputs.memory, bank)
    wanting = inputs._replace(v=inputs.v.clone().requires_grad_())
    for _ in range(2):
        with torch.no_grad():
            sdm_decode_step(*wanting)
        with pytest.raises(RuntimeError, match="writes in place and has no gradient"):
            sdm_decode_step(*wanting)


@pytest.mark.gpu
def test_other_layouts_after_contiguous_ones(known: list[int]) -> None:
    inputs = one_token()
    expected = sdm_decode_step(*inputs._replace(memory=inputs.memory.clone()))
    spaced = Inputs(inputs.memory, *(torch.stack([x, x], -1)[..., 0] for x in inputs[1:]))
    assert known == [] and not spaced.v.is_contiguous()
    for _ in range(2):
        assert_same_bits(sdm_decode_step(*spaced._replace(memory=inputs.memory.clone())), expected)
    assert known == [1]
    negative = torch._neg_view(-inputs.v)
    for _ in range(2):
        assert_same_bits(sdm_decode_step(*inputs._replace(memory=inputs.memory.clone(), v=negative)), expected)


@pytest.mark.gpu
def test_observers_see_known_steps(known: list[int]) -> None:
    inputs = one_token()
    with torch.no_grad(), Watching() as mode:
        sdm_decode_step(*inputs)
    assert mode.seen.count("sdm.decode_step_.default") == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdm_decode_step(*inputs)
    assert [event.name for event in profile.events()].count("sdm::decode_step_") == 1
    assert known == [1, 1]
