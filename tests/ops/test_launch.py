"""The eager path on CUDA in Triton's interpreter: captured loops replayed by fake graphs, against the CPU's ops.

Streams and events do nothing, as launches run in order; a captured graph is the launches that made it. So what a replay
takes from the call that was captured, and not from its table, shows. The interpreter has to be chosen before Triton is
imported, so that these tests run in a process of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sdm_compile.ops.snapshot import SCALED_MODES, dequantize_rows
from sdm_compile.ops.write_read_bwd import Saved
from sdm_compile.ops.write_read_ops import CPU, CUDA, bank_gradient, input_gradients, plan_call
from tests.cases import RAGGED, TANGLED, Case, group_slots
from tests.harness import assert_close, assert_same_bits, normal_like
from tests.interpreted import in_the_interpreter, run_interpreted
from tests.loops import filled_gradient

pytest.importorskip("triton")
from sdm_compile.ops import launch, recorded, write_read_cuda
from sdm_compile.ops.bound import KernelCall
from sdm_compile.ops.launch import captured_loops, free_captured_loops


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


class FakeEvent:
    def record(self, stream: FakeStream) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class FakeStream:
    device = torch.device("cpu")
    device_index = cuda_stream = 0

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None: ...

    def wait_stream(self, other: FakeStream) -> None: ...

    def wait_event(self, event: FakeEvent) -> None: ...

    def record_event(self) -> FakeEvent:
        return FakeEvent()


@dataclass
class FakeGraph:
    replay: Callable[[], None]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGraph]]:
    """The graphs that are captured on the way."""
    captured: list[FakeGraph] = []

    def capture(device: torch.device, launches: Callable[[], None], priority: int = 0) -> FakeGraph:
        launches()
        captured.append(FakeGraph(launches))
        return captured[-1]

    def stream(stream: FakeStream) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(launch, "_captured_graph", capture)
    monkeypatch.setattr(write_read_cuda, "launches_are_watched", lambda: False)
    monkeypatch.setattr(write_read_cuda, "slab_steps", lambda steps, fits: 2)
    free_captured_loops()
    yield captured
    free_captured_loops()


class Rebuilt:
    """Stands for BoundKernel, which needs a GPU: launches on tensors at the addresses that it is given."""

    made = 0

    def __init__(self, call: KernelCall) -> None:
        self.kernel, self.grid, self.options = call.kernel, call.grid, call.options
        self.args = [arg.dtype if isinstance(arg, Tensor) else arg for arg in call.args]

    def launch(self, addresses: list[int]) -> None:
        Rebuilt.made += 1
        left = iter(addresses)
        args = [element_at(next(left), arg) if isinstance(arg, torch.dtype) else arg for arg in self.args]
        self.kernel[self.grid](*args, **self.options)


def element_at(address: int, dtype: torch.dtype) -> Tensor:
    if not address:
        return torch.empty(0, dtype=dtype)
    raw = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)


@pytest.fixture
def recording(graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls record their launches, as they do on a GPU alone."""

    def launch_unseen(call: KernelCall) -> None:
        """The interpreter does its work with PyTorch's operators."""
        with _disable_current_modes():
            launch(call)

    Rebuilt.made, launch = 0, KernelCall.launch
    monkeypatch.setattr(KernelCall, "launch", launch_unseen)
    monkeypatch.setattr(recorded, "BoundKernel", Rebuilt)
    monkeypatch.setattr(recorded, "can_bind", lambda kernel: True)


class Outputs(NamedTuple):
    used: Tensor  # which rows of the snapshot stand for a group
    readings: Tensor
    bank: Tensor
    saved: Saved
    grads: list[Tensor]  # of the bank before, and of the float inputs


def on_cuda(case: Case, mode: str, seed: int) -> Outputs:
    memory, *inputs = case.make(torch.float32, seed)
    bank = torch.full_like(memory, float("nan"))  # and so is its gradient, until what is to fill them does
    plan = plan_call(bank, True, mode)
    readings, saved, route = CUDA.save(bank, inputs, case.chunk_size, mode, plan, fill=partial(bank.copy_, memory))
    assert route == ("triton by step" if mode in SCALED_MODES else "triton in one launch")
    final = bank.clone()
    dM, fill = bank_gradient(normal_like(bank, seed + 1), bank, True)
    grads, dreadings = [dM.fill_(float("nan")), *input_gradients(inputs)], normal_like(readings, seed + 2)
    route = CUDA.backward(dreadings, dM, bank, inputs, saved, case.chunk_size, mode, grads[1:], fill)
    assert route == "triton"
    assert_same_bits(bank, final)
    return Outputs(group_slots(inputs[0], case.chunk_size) >= 0, readings, bank, saved, grads)


def assert_right(got: Outputs, case: Case, mode: str, seed: int) -> None:
    """A forward that saves has the CPU's values; its gradients are those that the CPU takes of what it saved."""
    memory, *inputs = case.make(torch.float32, seed)
    bank = memory.clone()
    readings, saved, _ = CPU.save(bank, inputs, case.chunk_size, mode, plan_call(bank, True, mode))
    assert_close((got.readings, got.bank), (readings, bank))
    rows = ("snapshot", "scales")
    assert_close(*([x for name, x in s._asdict().items() if name not in rows] for s in (got.saved, saved)))
    if mode == "none":  # elsewhere a bit of a row may be a whole code
        rows = (dequantize_rows(s.snapshot, s.scales, mode, case.head_dim, torch.float32) for s in (got.saved, saved))
        assert_close(*(x[got.used] for x in rows))
    expected = [filled_gradient(normal_like(bank, seed + 1), bank), *input_gradients(inputs)]
    dreadings = normal_like(readings, seed + 2)
    CPU.backward(dreadings, expected[0], got.bank, inputs, got.saved, case.chunk_size, mode, expected[1:])
    assert_close(got.grads, expected)


@in_the_interpreter
@pytest.mark.parametrize("sizes", [dict(tokens=0), dict(streams=0)], ids=["no tokens", "no streams"])
def test_a_call_without_steps_fills_what_it_returns(sizes: dict[str, int], graphs: list[FakeGraph]) -> None:
    memory, *inputs = replace(RAGGED, **sizes).make(torch.float32)
    assert not inputs[0].numel()
    for route in (CPU, CUDA, CUDA):
        bank = torch.ones_like(memory)
        route.forward(bank, inputs, RAGGED.chunk_size, partial(bank.add_, memory))
        assert_same_bits(bank, memory + 1)  # once


@in_the_interpreter
@pytest.mark.parametrize("mode", ["none", "int4"])
@pytest.mark.parametrize("case", [RAGGED, replace(TANGLED, tokens=15, chunk_size=4)], ids=lambda case: case.name)
def test_captured_and_replayed(case: Case, mode: str, graphs: list[FakeGraph]) -> None:
    """The calls have banks of their own, and the second one other numbers; what each was given must stay as it is."""
    calls, kept, captured = [], [], []
    for seed in (0, 1, 0):
        calls.append(on_cuda(case, mode, seed))
        kept.append(copies(calls[-1]))
        captured.append((len(graphs), captured_loops()))
    # Two slabs of each direction, of one graph forward, or two where each step is launched, and three backward. The
    # first backward needs more memory than the forward before it, whose loops the second call then captures again; the
    # third one replays all.
    forward = 1 if mode == "none" else 2
    assert captured == [(2 * (forward + 3), 2), (2 * (2 * forward + 3), 4), (2 * (2 * forward + 3), 4)]
    assert_same_bits([copies(call) for call in calls], kept)
    assert_same_bits(kept[2], kept[0])
    for seed in range(2):
        assert_right(calls[seed], case, mode, seed)


@in_the_interpreter
def test_launches_are_recorded_by_the_second_call_and_made_again(recording: None) -> None:
    """By calls of other tensors; those of another layout have launches of their own."""
    calls, kept, made, case = [], [], [], replace(TANGLED, tokens=15, chunk_size=4)

    def once_more(seed: int, case: Case = case) -> None:
        before = Rebuilt.made
        calls.append(on_cuda(case, "none", seed))
        made.append(Rebuilt.made - before)
        kept.append(copies(calls[-1]))
        assert_right(calls[-1], case, "none", seed)

    for seed in (0, 1, 2, 0):
        once_more(seed)
    # Two slabs of each direction. Forward: the staging's two launches, the steps, the copies.
    assert made == [0, 0, 2 * (4 + 9), 2 * (4 + 9)]
    once_more(3, replace(case, tokens=14))
    once_more(4)
    assert made[4:] == [0, made[3]]
    free_captured_loops()
    for seed in (1, 2, 3):
        once_more(seed)
    assert made[6:] == [0, 0, made[3]]
    assert_same_bits([copies(call) for call in calls], kept)
    assert_same_bits(kept[3], kept[0])


def copies(outputs: Outputs) -> list[Tensor]:
    """Everything but the rows that are nobody's."""
    saved, used = outputs.saved, outputs.used
    rows = saved.snapshot.view(torch.uint8)[used], saved.scales[used] if len(saved.scales) else saved.scales
    others: list[Any] = [x for name, x in saved._asdict().items() if name not in ("snapshot", "scales")]
    return [x.clone() for x in (outputs.readings, outputs.bank, *others, *rows, *outputs.grads)]


def kept_bytes() -> list[int]:
    """Of the working memories that there are."""
    return [len(memory.bytes) for place in launch._places.values() for memory in place.memories]


@in_the_interpreter
def test_calls_of_all_sizes_share_two_working_memories(graphs: list[FakeGraph]) -> None:
    """Each as large as the largest call so far needs it; the loops of a smaller one are captured anew, and once."""
    small = replace(RAGGED, tokens=8, chunk_size=2)
    cases = [
        small,
        replace(TANGLED, tokens=15, chunk_size=4),
        replace(TANGLED, streams=3, tokens=19, chunk_size=5, head_dim=40),
        *(small, small),
    ]
    sizes, captured = [], []
    for seed, case in enumerate(cases):
        assert_right(on_cuda(case, "none", seed), case, "none", seed)
        sizes.append(kept_bytes())
        captured.append((len(graphs), captured_loops()))
    assert [len(memories) for memories in sizes] == [2] * len(cases)
    for grown in zip(*sizes, strict=True):
        assert 0 < grown[0] < grown[1] < grown[2] == grown[3] == grown[4]
    # As above; what needs more memory drops what was captured on less.
    assert captured == [(8, 2), (16, 2), (24, 2), (32, 6), (32, 6)]
