"""What a graph depends on is seen to change, and nothing else; what a warm-up changes is put back; failed captures."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdm_compile import SDMState
from sdm_compile.graphs import CaptureError
from sdm_compile.graphs import capture as capture_module
from sdm_compile.graphs.capture import Watch, capture, numeric_settings, restored, warm_up

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(eq=False)
class Holder:
    """An object that is no pytree."""

    bank: Tensor
    parts: list[Any] = field(default_factory=list)
    calls: int = 0
    other: Tensor | None = None


def make_state() -> dict[str, Any]:
    holder = Holder(torch.zeros(3, 4), [torch.ones(2), SDMState(torch.zeros(4, 4))])
    return {"holder": holder, "pair": (torch.zeros(5), "text"), "step": 0}


def swap_storage(x: Tensor, new: Tensor) -> None:
    x.data = new


CHANGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda state: setattr(state["holder"], "bank", torch.zeros(3, 4)),
    lambda state: delattr(state["holder"], "bank"),
    lambda state: setattr(state["holder"], "other", torch.zeros(1)),
    lambda state: state["holder"].parts.__setitem__(0, torch.ones(2)),
    lambda state: state["holder"].parts.append(torch.ones(2)),
    lambda state: state["holder"].parts.pop(),
    lambda state: setattr(state["holder"].parts[1], "bank", torch.zeros(4, 4)),
    lambda state: state.update(pair=(torch.zeros(5), "text")),
    lambda state: state.update(more=torch.zeros(5)),
    lambda state: state.pop("pair"),
    lambda state: swap_storage(state["pair"][0], torch.zeros(5)),
    lambda state: swap_storage(state["holder"].bank, state["holder"].bank.view(torch.int32)),
    lambda state: swap_storage(state["holder"].bank, state["holder"].bank.view(4, 3)),
    lambda state: swap_storage(state["holder"].bank, state["holder"].bank.as_strided((3, 4), (1, 3))),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_is_seen(change: Callable[[dict[str, Any]], Any]) -> None:
    state = make_state()
    watch = Watch({"state": state}, layouts=True)
    assert watch.unchanged()
    change(state)
    assert not watch.unchanged()


def test_values_and_counters_are_not_watched() -> None:
    state = make_state()
    watch = Watch({"state": state}, layouts=True)
    state["holder"].bank.add_(1)
    state["holder"].calls += 1
    state["step"] += 1
    assert watch.unchanged()
    assert [str(form) for form in watch.forms()] == [
        "state['holder'].bank [3, 4] torch.float32 on cpu",
        "state['holder'].parts[0] [2] torch.float32 on cpu",
        "state['holder'].parts[1].bank [4, 4] torch.float32 on cpu",
        "state['pair'][0] [5] torch.float32 on cpu",
    ]


def test_what_was_replaced_is_put_back() -> None:
    state = make_state()
    before = copy.copy(state["holder"]), state["pair"]
    watch = Watch({"state": state}, layouts=True)
    state["holder"].bank = torch.ones(3, 4)
    state["pair"] = (torch.ones(5), "text")
    watch.put_back()
    assert watch.unchanged() and state["holder"].bank is before[0].bank and state["pair"] is before[1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
        self.plain = nn.Linear(3, 3, bias=False)
        self.table = torch.zeros(2)
        self.memory = SDMState(torch.zeros(4, 2))
        self.calls: list[int] = []
        self.caches: dict[str, Any] = {"pair": [torch.zeros(2), torch.zeros(3)], "sizes": (2, 3)}


MODEL_CHANGES: list[Callable[[Model], Any]] = [
    lambda model: setattr(model.plain, "weight", nn.Parameter(torch.zeros(3, 3))),
    lambda model: setattr(model.plain, "bias", nn.Parameter(torch.zeros(3))),
    lambda model: swap_storage(model.plain.weight, torch.zeros(3, 3)),
    lambda model: model.half(),
    lambda model: model.layers[1].register_buffer("running_mean", torch.ones(3)),
    lambda model: model.layers.append(nn.Linear(3, 3)),
    lambda model: setattr(model, "plain", nn.Linear(3, 3)),
    lambda model: model.layers.__setitem__(0, nn.Linear(3, 3)),
    lambda model: model.layers[2].eval(),
    lambda model: setattr(model, "table", torch.zeros(2)),
    lambda model: setattr(model.memory, "bank", torch.zeros(4, 2)),
    lambda model: setattr(model, "memory", SDMState(model.memory.bank)),
    lambda model: setattr(model, "caches", {"pair": list(model.caches["pair"])}),
    lambda model: model.caches["pair"].__setitem__(0, torch.zeros(2)),
    lambda model: swap_storage(model.caches["pair"][1], torch.zeros(3)),
    lambda model: model.caches.update(more=torch.zeros(2)),
]


@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_a_changed_module_is_seen(change: Callable[[Model], Any]) -> None:
    model = Model()
    watch = Watch({"model": model}, layouts=False)
    change(model)
    assert not watch.unchanged()


def test_training_a_module_is_no_change() -> None:
    model = Model()
    watch = Watch({"model": model}, layouts=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.plain(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model.layers(torch.randn(4, 3))
    model.calls.append(1)
    model.caches["sizes"] = (4, 5)
    model.load_state_dict(Model().state_dict())
    assert watch.unchanged()


def test_a_module_in_itself_is_watched_once() -> None:
    model = Model()
    object.__setattr__(model, "state", {"model": model})
    watch = Watch({"a": model, "b": model, "c": model.plain.weight}, layouts=False)
    assert len(watch.tensors) == len({id(x) for x in watch.tensors}) == 12


@pytest.mark.parametrize("device", DEVICES)
def test_settings(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(change: Callable[[], Any]) -> bool:
        before = numeric_settings(device)
        assert numeric_settings(device) == before
        undo = change()
        changed = numeric_settings(device) != before
        undo()
        assert numeric_settings(device) == before
        return changed

    def setting(owner: Any, name: str, value: object) -> Callable[[], Any]:
        def change() -> Callable[[], Any]:
            old = getattr(owner, name)
            setattr(owner, name, value)
            return lambda: setattr(owner, name, old)

        return change

    matmul = torch.backends.cuda.matmul
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        assert differ(setting(matmul, name, False))
    assert differ(setting(matmul, "fp32_precision", "tf32"))
    assert differ(setting(torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic))

    def deterministic() -> Callable[[], Any]:
        old = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default" if old else "warn")
        return lambda: torch.set_deterministic_debug_mode(old)

    def autocast(dtype: torch.dtype) -> Callable[[], Any]:
        block = torch.autocast(device, dtype)
        block.__enter__()
        return lambda: block.__exit__(None, None, None)

    assert differ(deterministic)
    assert differ(lambda: autocast(torch.bfloat16))
    with torch.autocast(device, torch.bfloat16):
        assert differ(lambda: autocast(torch.float16))


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_and_random_numbers_are_restored(device: str) -> None:
    x = torch.tensor([1.0, -0.0, float("nan")], device=device)
    parameter = nn.Parameter(torch.ones(3, device=device))
    where = x.device
    torch.manual_seed(1)
    expected = [torch.rand(3), torch.rand(3, device=device)]
    torch.manual_seed(1)
    for failing in (False, True):
        try:
            with restored([x, parameter], where):
                torch.rand(5), torch.rand(5, device=device)
                x.add_(1)
                parameter.data.mul_(2)
                if failing:
                    raise KeyError("fn")
        except KeyError:
            assert failing
    assert torch.equal(torch.rand(3), expected[0]) and torch.equal(torch.rand(3, device=device), expected[1])
    assert x[:2].tolist() == [1.0, 0.0] and x[1].signbit() and x[2].isnan()
    assert torch.equal(parameter, torch.ones_like(parameter))


@pytest.mark.parametrize("taken", [True, False])
def test_a_capture_that_cannot_begin(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is given back if it was taken, and the generator is told by a capture that begins and ends."""
    done: list[object] = []

    class Graph:
        def capture_begin(self, pool: object = None, capture_error_mode: str = "") -> None:
            done.append(("begin", pool))
            if pool is not None:
                raise RuntimeError("operation not permitted\nC++ frames")

        def capture_end(self) -> None:
            done.append("end")

        def reset(self) -> None:
            done.append("reset")

    def end_allocating(index: object, pool: object) -> None:
        if not taken:
            raise RuntimeError("not currently recording")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr(capture_module, "_abandoned", [])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocating, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: done.append(args), raising=False)
    recording = capture_module._Recording(torch.cuda.CUDAGraph(), torch.device("cuda", 0), (0, 7))
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: torch.ones(()))
    with pytest.raises(CaptureError, match=r"cannot begin: operation not permitted$") as raised, recording:
        raise AssertionError("the block runs")
    assert str(raised.value.__cause__).startswith("operation not permitted\n")
    assert done == [("begin", (0, 7)), "reset", *([(0, (0, 7))] if taken else []), ("begin", None), "end"]


@pytest.mark.gpu
def test_a_refused_capture_leaves_everything_usable() -> None:
    x = torch.randn(64, 64, device="cuda")
    alive = run(lambda: x + 1)
    torch.cuda.manual_seed(3)
    expected = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(3)
    with pytest.raises(CaptureError, match="a capture into a CUDA graph cannot begin: ") as raised:
        capture(lambda: x + 1, x.device, (1, 1))  # which is nobody's
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert torch.equal(torch.rand(5, device="cuda"), expected)
    captured = run(lambda: x @ x + torch.rand_like(x))
    captured.graph.replay()
    assert (captured.result - x @ x).abs().max() <= 1.001
    alive.graph.replay()
    assert torch.equal(alive.result, x + 1)


@pytest.mark.gpu
def test_a_failed_capture_beside_a_graph_in_its_pool() -> None:
    """The graph goes on; whether another capture into the pool can begin depends on PyTorch, and is a CaptureError."""
    x, pool = torch.randn(64, 64, device="cuda"), torch.cuda.graph_pool_handle()
    warm_up(lambda: x @ x, x.device)
    alive = capture(lambda: x @ x, x.device, pool)
    for _ in range(2):
        with pytest.raises(CaptureError):
            capture(lambda: Failures.draws_and_waits(x), x.device, pool)
        alive.graph.replay()
        assert torch.equal(alive.result, x @ x)
    with suppress(CaptureError):
        capture(lambda: x + 1, x.device, pool).graph.replay()
    alive.graph.replay()
    assert torch.equal(alive.result, x @ x)
    captured = run(lambda: x @ x + torch.rand_like(x))
    captured.graph.replay()
    assert (captured.result - x @ x).abs().max() <= 1.001


def run(call: Callable[[], Any]) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    warm_up(call, device)
    return capture(call, device, torch.cuda.graph_pool_handle())


@pytest.mark.gpu
def test_a_capture_runs_nothing_and_replays() -> None:
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")

    def call() -> Tensor:
        return total.add_(x).clone()

    captured = run(call)
    assert total.tolist() == [2, 2, 2]
    x.fill_(5)
    captured.graph.replay()
    assert captured.result.tolist() == [7, 7, 7]


class Failures:
    """Ways in which a capture fails, each after some work on the device."""

    @staticmethod
    def waits(x: Tensor) -> float:
        return (x @ x).sum().item()

    @staticmethod
    def draws_and_waits(x: Tensor) -> list[float]:
        return torch.rand_like(x).tolist()

    @staticmethod
    def synchronizes(x: Tensor) -> Tensor:
        y = x + 1
        torch.cuda.synchronize()
        return y

    @staticmethod
    def leaves_work_on_another_stream(x: Tensor) -> Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return x + 1

    @staticmethod
    def raises(x: Tensor) -> Tensor:
        y = x + 1
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("only while capturing")
        return y


FAILURES = [name for name, value in vars(Failures).items() if isinstance(value, staticmethod)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_capture_leaves_everything_usable(name: str) -> None:
    x = torch.randn(64, 64, device="cuda")
    alive = run(lambda: x + 1)  # as long as there is a graph, the random generator keeps what captures need of it
    torch.cuda.manual_seed(3)
    expected = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(3)
    allocated = torch.cuda.memory_allocated()
    with pytest.raises(CaptureError, match="cannot be captured into a CUDA graph: ") as raised:
        with restored([], x.device):
            run(lambda: getattr(Failures, name)(x))
    assert raised.value.__cause__ is not None
    del raised
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(torch.rand(5, device="cuda"), expected)  # the generator knows that no capture is under way
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so does the allocator
    del expected
    assert torch.cuda.memory_allocated() <= allocated
    captured = run(lambda: x @ x + torch.rand_like(x))
    captured.graph.replay()
    assert (captured.result - x @ x).abs().max() <= 1.001
    alive.graph.replay()
    assert torch.equal(alive.result, x + 1)


@pytest.mark.gpu
def test_failed_captures_keep_no_memory() -> None:
    x = torch.randn(512, 512, device="cuda")

    def fail() -> None:
        with pytest.raises(CaptureError):
            run(lambda: Failures.waits(x))

    fail()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    for _ in range(20):
        fail()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + 2**21


@pytest.mark.gpu
def test_a_capture_leaves_other_threads_alone() -> None:
    """One goes on to launch and to wait while another captures."""
    x, stop, errors = torch.randn(256, 256, device="cuda"), threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                (x @ x).sum().item()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            captured = run(lambda: x @ x)
    finally:
        stop.set()
        thread.join()
    assert not errors
    captured.graph.replay()
    assert torch.equal(captured.result, x @ x)


@pytest.mark.gpu
def test_autocast_keeps_no_weights_for_a_graph() -> None:
    """A graph casts weights at every replay: copies that autocast keeps are stale, and freed at its end."""
    weight, x = nn.Parameter(torch.ones(8, 8, device="cuda")), torch.ones(1, 8, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        torch.nn.functional.linear(x, weight)  # which autocast keeps
        with torch.no_grad():
            captured = run(lambda: torch.nn.functional.linear(x, weight))
    with torch.no_grad():
        weight.fill_(3)
    captured.graph.replay()
    assert captured.result.dtype == torch.bfloat16 and captured.result.tolist() == [[24.0] * 8]


@pytest.mark.gpu
def test_graphs_have_matmul_workspaces_of_their_own() -> None:
    """Two graphs on two streams at once: products that cuBLAS splits along the sum, adding up in a workspace."""
    a = [torch.randn(8, 2**16, device="cuda") for _ in range(2)]
    b = [torch.randn(2**16, 8, device="cuda") for _ in range(2)]
    graphs = [run(lambda a=a, b=b: [a @ b for _ in range(20)]) for a, b in zip(a, b, strict=True)]
    streams = [torch.cuda.Stream() for _ in graphs]
    for captured in graphs:
        captured.graph.replay()
    expected = [[y.clone() for y in captured.result] for captured in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for captured, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                captured.graph.replay()
    torch.cuda.synchronize()
    for captured, products in zip(graphs, expected, strict=True):
        assert all(torch.equal(y, product) for y, product in zip(captured.result, products, strict=True))
