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
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sdm_compile.ops import write_read_ops
from sdm_compile.ops.saved import Saved
from sdm_compile.ops.snapshot import COMPACT, SCALED_MODES, VERSIONS, SnapshotPlan, dequantize_rows
from sdm_compile.ops.write_read_ops import CPU, CUDA, bank_gradient, bank_to_keep, input_gradients, plan_call
from sdm_compile.ops.write_read_recompute import _segment_backward
from tests.cases import RAGGED, TANGLED, Case, group_slots
from tests.harness import assert_close, assert_same_bits, normal_like
from tests.interpreted import in_the_interpreter, run_interpreted
from tests.loops import filled_gradient

pytest.importorskip("triton")
from sdm_compile.ops import launch, recorded, slabs
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
    current = [FakeStream()]
    callers = current[0]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(launch, "_captured_graph", capture)
    monkeypatch.setattr(slabs, "launches_are_watched", lambda: False)
    monkeypatch.setattr(slabs, "slab_steps", lambda steps, fits: 2)
    free_captured_loops()
    yield captured
    free_captured_loops()
    assert current[0] is callers


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
    plan = plan_call(memory, True, mode)
    readings, bank, saved, route = CUDA.save(memory, inputs, case.chunk_size, mode, plan)
    assert route == ("triton by step" if mode in SCALED_MODES else "triton in one launch")
    read = bank_to_keep(memory, bank, saved)
    before = read.clone()
    dM, fill = bank_gradient(normal_like(bank, seed + 1), bank, True)
    grads, dreadings = [dM.fill_(float("nan")), *input_gradients(inputs)], normal_like(readings, seed + 2)
    route = CUDA.backward(dreadings, dM, read, inputs, saved, case.chunk_size, mode, grads[1:], fill)
    assert route == "triton"
    assert_same_bits(read, before)
    return Outputs(group_slots(inputs[0], case.chunk_size) >= 0, readings, bank, saved, grads)


def assert_right(got: Outputs, case: Case, mode: str, seed: int) -> None:
    """A forward that saves has the CPU's values; its gradients are those that the CPU takes of what it saved."""
    memory, *inputs = case.make(torch.float32, seed)
    compact = SnapshotPlan(COMPACT, "write")
    readings, bank, saved, _ = CPU.save(memory, inputs, case.chunk_size, mode, compact)
    assert_close((got.readings, got.bank), (readings, bank))
    if got.saved.has_versions:
        latest = got.saved.latest
        rows_in_the_end = got.saved.snapshot[latest[latest >= 0].long()]
        assert_same_bits([rows_in_the_end, memory[latest < 0]], [got.bank[latest >= 0], got.bank[latest < 0]])
    rows, versions = ("snapshot", "scales", "previous", "latest"), got.saved.has_versions
    assert_close(*([x for name, x in s._asdict().items() if name not in rows] for s in (got.saved, saved)))
    if mode == "none" and not versions:  # elsewhere a bit of a row may be a whole code
        rows = (dequantize_rows(s.snapshot, s.scales, mode, case.head_dim, torch.float32) for s in (got.saved, saved))
        assert_close(*(x[got.used] for x in rows))
    expected = [filled_gradient(normal_like(bank, seed + 1), bank), *input_gradients(inputs)]
    dreadings = normal_like(readings, seed + 2)
    bank, saved = (bank, saved) if versions else (got.bank, got.saved)
    CPU.backward(dreadings, expected[0], bank, inputs, saved, case.chunk_size, mode, expected[1:])
    assert_close(got.grads, expected)


class Runner:
    """Notes the stream that each part runs on; one part may raise."""

    def __init__(self, ran: list[tuple[str, object]], raising: str | None) -> None:
        self.ran, self.raising = ran, raising

    def __getattr__(self, part: str) -> Callable[[], None]:
        def run() -> None:
            self.ran.append((part, torch.cuda.current_stream(torch.device("cpu"))))
            if part == self.raising:
                raise OSError(part)

        return run


@in_the_interpreter
@pytest.mark.parametrize("raising", [None, "fill", "stage", "couple", "steps", "conclude"])
def test_parts_run_on_their_streams_and_the_callers_is_current_again(
    raising: str | None, graphs: list[FakeGraph]
) -> None:
    ran: list[tuple[str, object]] = []
    runner, streams = Runner(ran, raising), launch._Streams(FakeStream(), FakeStream())  # type: ignore[arg-type]
    callers = torch.cuda.current_stream(torch.device("cpu"))
    with nullcontext() if raising is None else pytest.raises(OSError, match=raising):
        launch._run_overlapped([runner, runner], streams, runner.fill)
    assert torch.cuda.current_stream(torch.device("cpu")) is callers
    first = [("fill", streams.steps), ("stage", streams.side), ("couple", streams.side), ("steps", streams.steps)]
    second = [*first[1:3], ("conclude", streams.side), ("read", streams.side), first[3]]
    parts = [*first, *second, ("conclude", callers), ("read", callers)]
    names = [part for part, _ in parts]
    assert ran == (parts if raising is None else parts[: names.index(raising) + 1])


@in_the_interpreter
@pytest.mark.parametrize("sizes", [dict(tokens=0), dict(streams=0)], ids=["no tokens", "no streams"])
def test_a_call_without_steps_fills_what_it_returns(sizes: dict[str, int], graphs: list[FakeGraph]) -> None:
    memory, *inputs = replace(RAGGED, **sizes).make(torch.float32)
    assert not inputs[0].numel()
    for route in (CPU, CUDA, CUDA):
        bank = torch.ones_like(memory)
        route.forward(bank, inputs, RAGGED.chunk_size, partial(bank.add_, memory))
        assert_same_bits(bank, memory + 1)  # once


@pytest.fixture
def versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether calls keep versions of rows: other than they would on this device."""
    keeps: bool = request.param
    monkeypatch.setattr(write_read_ops, "keeps_versions", lambda bank, mode: keeps and mode == "none")
    return keeps


with_or_without = pytest.mark.parametrize("versions", [False, True], indirect=True, ids=["compact", "versions"])


@in_the_interpreter
@pytest.mark.parametrize(
    ("mode", "versions"), [("none", False), ("none", True), ("int4", False)], indirect=["versions"], ids=str
)
@pytest.mark.parametrize("case", [RAGGED, replace(TANGLED, tokens=15, chunk_size=4)], ids=lambda case: case.name)
def test_captured_and_replayed(case: Case, mode: str, versions: bool, graphs: list[FakeGraph]) -> None:
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
@with_or_without
def test_launches_are_recorded_by_the_second_call_and_made_again(recording: None, versions: bool) -> None:
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
    # Two slabs of each direction. Forward: the staging's two launches, with versions a table, the steps, the copies.
    assert made == [0, 0, *[2 * (4 + versions + 9)] * 2]
    once_more(3, replace(case, tokens=14))
    once_more(4)
    assert made[4:] == [0, made[3]]
    free_captured_loops()
    for seed in (1, 2, 3):
        once_more(seed)
    assert made[6:] == [0, 0, made[3]]
    assert_same_bits([copies(call) for call in calls], kept)
    assert_same_bits(kept[3], kept[0])


@in_the_interpreter
@with_or_without
def test_a_call_in_groups_of_streams_has_captures_of_its_own(
    versions: bool, graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are numbered over all streams of a call, of which a group has as many as another call as a whole."""
    one = Case("two streams", streams=2, tokens=16, writes=3, reads=4, head_dim=8, slots=8, chunk_size=4)
    two = replace(one, streams=4, slots=4)
    monkeypatch.setattr(slabs, "MAX_GRID", 8)
    expected = copies(on_cuda(two, "none", 1))
    free_captured_loops()
    monkeypatch.setattr(slabs, "MAX_GRID", 65535)
    for _ in range(2):  # the first backward takes more memory, and so the forward's captures
        on_cuda(one, "none", 0)
    monkeypatch.setattr(slabs, "MAX_GRID", 8)
    assert_same_bits(copies(on_cuda(two, "none", 1)), expected)


@in_the_interpreter
@pytest.mark.parametrize("versions", [True], indirect=True, ids=["versions"])
@pytest.mark.parametrize("how", ["odd offset", "columns first"])
def test_versions_of_a_bank_that_is_no_rows_of_16_bytes(how: str, versions: bool, graphs: list[FakeGraph]) -> None:
    case = replace(RAGGED, head_dim=8)
    memory, *inputs = case.make(torch.float32)
    if how == "odd offset":
        other = torch.empty(memory.numel() + 1)[1:].view_as(memory).copy_(memory)
    else:
        other = memory.t().contiguous().t()
    expected, got = (
        CUDA.save(bank, inputs, case.chunk_size, "none", SnapshotPlan(VERSIONS, "write")) for bank in (memory, other)
    )
    assert_same_bits(got[:2], expected[:2])
    assert_same_bits(other, memory)


@in_the_interpreter
@with_or_without
def test_a_segment_that_is_run_again(versions: bool, graphs: list[FakeGraph]) -> None:
    memory, *inputs = TANGLED.make(torch.float32)
    dreadings, found = normal_like(inputs[2]), []
    for route in (CPU, CUDA):
        before = memory.clone()
        dM = filled_gradient(normal_like(memory), memory)
        with patch.object(write_read_ops, "keeps_versions", lambda *args, on=route: versions and on is CUDA):
            _, grads = _segment_backward(route, dreadings, dM, before, inputs, TANGLED.chunk_size)
        assert_same_bits(before, memory)
        found.append([dM, *grads])
    assert_close(*found)


def copies(outputs: Outputs) -> list[Tensor]:
    """Everything but the rows that are nobody's."""
    saved, used = outputs.saved, outputs.used
    rows = saved.snapshot.view(torch.uint8)[used], saved.scales[used] if len(saved.scales) else saved.scales
    previous = saved.previous[used] if saved.has_versions else saved.previous
    of_groups = ("snapshot", "scales", "previous")
    others: list[Any] = [x for name, x in saved._asdict().items() if name not in of_groups]
    return [x.clone() for x in (outputs.readings, outputs.bank, *others, *rows, previous, *outputs.grads)]


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
