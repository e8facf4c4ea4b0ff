"""Which calls are alike, who observes them, and what an op does in those that are known: as it would in others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from sdm_compile.ops.known_calls import KnownCalls, can_be_known, unobserved
from sdm_compile.ops.registry import _known_entry
from tests.cases import TANGLED, Inputs
from tests.harness import assert_same_bits


def pair() -> list[Tensor]:
    return [torch.ones(4, 3), torch.zeros(2, dtype=torch.int32)]


def known() -> None: ...


def other() -> None: ...


@pytest.fixture
def calls() -> KnownCalls:
    calls = KnownCalls()
    calls.add(pair(), known)
    return calls


class Disabled(Tensor):
    """With no functions of its own, as a parameter; but nobody knows of its dispatch."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Plain(Tensor):
    """With the functions of a tensor, and its dispatch keys."""


OTHERS: dict[str, Callable[[], Tensor]] = {
    "shape": lambda: torch.ones(5, 3),
    "rank": lambda: torch.ones(4, 3, 1),
    "strides": lambda: torch.ones(3, 4).t(),
    "dtype": lambda: torch.ones(4, 3, dtype=torch.bfloat16),
    "device": lambda: torch.ones(4, 3, device="meta"),
    "requires_grad": lambda: torch.ones(4, 3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(4, 3), requires_grad=False),
    "subclass without functions": lambda: torch.ones(4, 3).as_subclass(Disabled),
    "subclass": lambda: torch.ones(4, 3).as_subclass(Plain),
    "sparse": lambda: torch.ones(4, 3).to_sparse(),
    "a bit that says negative": lambda: torch._neg_view(torch.ones(4, 3)),
    "zeros without memory": lambda: torch._efficientzerotensor((4, 3)),
    "made in inference mode": torch.inference_mode()(lambda: torch.ones(4, 3)),
    "no tensor": lambda: 3,  # type: ignore[dict-item,return-value]
}


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
    assert [calls.find(tensors) for tensors in alike] == [None, known, known, None]
    two, three = ([torch.ones(n), torch.ones(3)] for n in (2, 3))
    calls.add(two, other)
    calls.add(two, known)  # is no other shape
    assert calls.find(alike[2]) is known and calls.find(two) is known
    calls.add(three, other)
    assert calls.find(alike[2]) is None and calls.find(three) is other


CAN: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.ones(4, 3),
    "transposed": lambda: torch.ones(3, 4).t(),
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "a view": lambda: torch.ones(5, 3)[1:],
    "made in inference mode": OTHERS["made in inference mode"],
}
CANNOT = {
    name: OTHERS[name]
    for name in (
        *("requires_grad", "parameter", "subclass", "subclass without functions", "sparse", "no tensor"),
        *("a bit that says negative", "zeros without memory"),
    )
}


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


class Entry:
    """An op's entry, and how often each way behind it was taken."""

    def __init__(self) -> None:
        self.through = self.again = self.straight = 0
        self.call = _known_entry(self.entry, self.found)
        self.tensors = pair()

    def entry(self, *args: Any) -> str:
        self.through += 1
        return "result"

    def found(self, *args: Tensor) -> Callable[..., str] | None:
        self.again += 1
        return None if args[0].dtype == torch.float64 else self.work

    def work(self, *args: Tensor) -> str:
        self.straight += 1
        return "result"

    def calls(self, count: int = 1) -> tuple[int, int]:
        """How many of them went through, and how many went straight."""
        before = self.through, self.straight
        assert [self.call(*self.tensors) for _ in range(count)] == ["result"] * count
        return self.through - before[0], self.straight - before[1]


@pytest.mark.parametrize("nobody", NOBODY.values(), ids=NOBODY)
def test_the_first_call_of_a_kind_goes_through(nobody: Callable[[], AbstractContextManager[Any]]) -> None:
    entry, others = Entry(), pair()
    with nobody():
        assert entry.calls(3) == (1, 2)
        entry.tensors = others
        assert entry.calls() == (0, 1)
        entry.tensors[1] = entry.tensors[1][1:]
        assert entry.calls(3) == (1, 2)
    assert entry.again == 2


def test_a_known_call_counts_as_a_change() -> None:
    entry = Entry()
    bank, ids = entry.tensors
    entry.calls()
    before = bank._version, ids._version
    assert entry.calls(2) == (0, 2)
    with torch.inference_mode():
        assert entry.calls(2) == (1, 1)  # the entry counts its own
    assert (bank._version, ids._version) == (before[0] + 3, before[1])


@pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
def test_observed_calls_go_through(observer: Callable[[], AbstractContextManager[Any]]) -> None:
    entry = Entry()
    with observer():
        assert entry.calls(2) == (2, 0)
    assert entry.calls(2) == (1, 1)
    with observer():
        assert entry.calls(2) == (2, 0)
    assert entry.again == 1


@pytest.mark.parametrize("made", CANNOT.values(), ids=CANNOT)
def test_what_cannot_be_known_goes_through(made: Callable[[], Tensor]) -> None:
    entry = Entry()
    entry.tensors = [*pair(), made()]
    assert entry.calls(2) == (2, 0)
    entry.tensors.reverse()
    assert entry.calls(2) == (2, 0)
    assert entry.again == 0


def test_where_nothing_does_the_work_again() -> None:
    entry = Entry()
    entry.tensors[0] = entry.tensors[0].double()
    assert entry.calls(2) == (2, 0)


def test_inside_another_op_the_entry_decides() -> None:
    """That op counts what it writes."""
    entry = Entry()
    for _ in range(2):
        with torch._C._AutoDispatchBelowAutograd():
            assert entry.calls(2) == (2, 0)
        entry.calls(2)


def test_a_bank_made_in_inference_mode_is_refused_outside_of_it() -> None:
    """By the entry; nor is it taken for one made outside, on which calls in inference mode are known."""
    entry = Entry()
    made_outside = entry.tensors
    with torch.inference_mode():
        made_inside = pair()
        for entry.tensors in (made_outside, made_inside):
            assert entry.calls(3) == (1, 2)
    entry.tensors = made_inside
    assert entry.calls(3) == (3, 0)


@pytest.mark.parametrize(("current", "expected"), [(1, (0, 2)), (0, (2, 0))], ids=["current", "another"])
def test_a_bank_of_another_device(current: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry makes its device the current one."""
    entry = Entry()
    entry.calls()
    monkeypatch.setattr(Tensor, "get_device", lambda x: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    assert entry.calls(2) == expected


def test_threads_share_what_is_known() -> None:
    entry = Entry()
    entry.calls()
    shapes = [[torch.ones(4, n), torch.ones(n)] for n in range(1, 9)]

    def work(k: int) -> None:
        for _ in range(50):
            for tensors in (*shapes[k:], *shapes[:k]):
                assert entry.call(*tensors) == "result"

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(4)))
    assert entry.through + entry.straight == 1 + 4 * 50 * 8
    assert 9 <= entry.through <= 1 + 4 * 8


def one_token() -> Inputs:
    inputs = TANGLED.make(torch.float32)
    return Inputs(inputs.memory.cuda(), *(x[:, 0].contiguous().cuda() for x in inputs[1:]))


class Counting(dict[Any, Any]):
    """Of the calls that were admitted: how often it is asked, which a known call does not."""

    asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """One token's call has been made before."""
    sdm_decode_step(*one_token())
    counting = Counting(decode._admitted)
    monkeypatch.setattr(decode, "_admitted", counting)
    return counting


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
def test_a_known_decode_step(admitted: Counting, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    inputs = one_token()
    expected_bank = inputs.memory.clone()
    expected = torch.ops.sdm.decode_step_(expected_bank, *inputs[1:])
    before, asked = inputs.memory._version, admitted.asked
    with mode():
        assert_same_bits(sdm_decode_step(*inputs), expected)
    assert admitted.asked == asked
    assert_same_bits(inputs.memory, expected_bank)
    assert inputs.memory._version == before + 1
    assert last_dispatch().decode is not None


@pytest.mark.gpu
def test_decode_steps_under_inference_mode(admitted: Counting) -> None:
    inputs = one_token()
    with torch.inference_mode():
        own = Inputs(*(x.clone() for x in inputs))
        before = inputs.memory._version
        for tensors in (inputs, own):
            readings = [sdm_decode_step(*tensors._replace(memory=tensors.memory.clone())) for _ in range(3)]
            assert_same_bits(readings[1:], [readings[0]] * 2)
        for _ in range(2):
            sdm_decode_step(*inputs)
    assert inputs.memory._version == before + 2
    with pytest.raises(RuntimeError, match="inference_mode"):
        sdm_decode_step(*own)


@pytest.mark.gpu
def test_bad_calls_after_good_ones(admitted: Counting) -> None:
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
def test_other_layouts_after_contiguous_ones(admitted: Counting) -> None:
    inputs = one_token()

    def step(**changed: Tensor) -> Tensor:
        return sdm_decode_step(*inputs._replace(memory=inputs.memory.clone(), **changed))

    expected = step()
    spaced = {name: torch.stack([x, x], -1)[..., 0] for name, x in inputs._asdict().items() if name != "memory"}
    assert not spaced["v"].is_contiguous()
    asked = admitted.asked
    for _ in range(3):
        assert_same_bits(step(**spaced), expected)
    assert admitted.asked == asked + 2  # in the first call, and where it became known
    for _ in range(2):
        assert_same_bits(step(v=torch._neg_view(-inputs.v)), expected)
    for _ in range(2):
        assert_same_bits(
            step(q_idx=inputs.k_idx, k_idx=inputs.k_idx, q_val=inputs.k_val),
            step(q_idx=inputs.k_idx.clone(), q_val=inputs.k_val.clone()),
        )


@pytest.mark.gpu
def test_observers_see_known_steps(admitted: Counting) -> None:
    inputs = one_token()
    with torch.no_grad(), Watching() as mode:
        sdm_decode_step(*inputs)
    assert mode.seen.count("sdm.decode_step_.default") == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdm_decode_step(*inputs)
    assert [event.name for event in profile.events()].count("sdm::decode_step_") == 1


@pytest.mark.gpu
def test_a_known_step_is_captured(admitted: Counting) -> None:
    inputs = one_token()
    bank = inputs.memory.clone()
    graph = torch.cuda.CUDAGraph()
    asked = admitted.asked
    with torch.cuda.graph(graph):
        readings = sdm_decode_step(*inputs)
    assert admitted.asked == asked
    inputs.v.mul_(2)
    expected = sdm_decode_step(*inputs._replace(memory=bank))
    graph.replay()
    assert_same_bits([readings, inputs.memory], [expected, bank])
