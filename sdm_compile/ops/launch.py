"""How step loops reach the device: captured once per signature and replayed for every eager call.

A captured loop keeps its working memory, and takes the one address that differs between calls, the bank's, from a small
table on the device, which a one-thread kernel writes just before the replay. Loops are kept per device and stream: two
streams never share working memory. SPEC section 5.

What comes before and after a loop's steps (staging, Phase 1, the solve; the readings) does not touch the bank, so it
runs on a second stream, under the steps of the neighbouring loops.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_leaves

MAX_LOOPS = 32  # captured loops kept at a time, over all signatures, devices and streams
MAX_BYTES = 2 * 2**30  # of their working memory


class StepLoop(Protocol):
    """A call's step loop, as `replay` runs it. `memory` is the loop's own, kept with its capture."""

    @property
    def signature(self) -> Hashable:
        """Everything that `steps` depends on besides the bank's address and what its memory holds."""

    def make_memory(self) -> Any:
        """Allocates the working memory, filled so that `steps` touches no bank row."""

    def stage(self, memory: Any) -> None:
        """Launches what reads the call's inputs."""

    def couple(self, memory: Any) -> None:
        """Launches what stands between, on the memory alone."""

    def steps(self, memory: Any, table: Tensor | None) -> None:
        """Launches the steps; the bank's address stands in `table`, where there is one."""

    def read(self, memory: Any) -> None:
        """Launches what writes the call's outputs."""


def eviction_hint(bank: Tensor, rows: int) -> str:
    """The hint for bank rows that are not needed again soon, in a launch that moves so many.

    Measured on an H200, us per step with the hint on read rows and on the write: 23.9 against 25.1 where the gather
    moves 34 MB; 520 against 507 where it moves 1 GB, which no order of eviction keeps in a cache of 60 MB.
    """
    return "evict_first" if rows * bank.shape[1] * bank.element_size() <= 64 * 2**20 else ""


@triton.jit
def _write_table_kernel(p_table, address):  # type: ignore[no-untyped-def]
    tl.store(p_table, address)


class _Runner(Protocol):
    """One loop's working memory, and a way to run what needs nothing else on the current stream."""

    memory: Any

    def couple(self, loop: StepLoop) -> None: ...

    def steps(self, loop: StepLoop, bank: Tensor) -> None: ...


_R = TypeVar("_R", bound=_Runner)


@dataclass
class _Plain:
    """Launches one by one, on working memory of one call alone: what an outer capture records."""

    memory: Any

    def couple(self, loop: StepLoop) -> None:
        loop.couple(self.memory)

    def steps(self, loop: StepLoop, bank: Tensor) -> None:
        loop.steps(self.memory, None)


@dataclass
class _Captured:
    memory: Any
    table: Tensor  # [1] int64 on the device
    couple_graph: torch.cuda.CUDAGraph
    steps_graph: torch.cuda.CUDAGraph
    done: torch.cuda.Event  # after the latest call that used it
    bytes: int  # of the memory

    def couple(self, loop: StepLoop) -> None:
        self.couple_graph.replay()

    def steps(self, loop: StepLoop, bank: Tensor) -> None:
        _write_table_kernel[(1,)](self.table, bank.data_ptr(), num_warps=1)
        self.steps_graph.replay()


class _Streams(NamedTuple):
    """The streams of a call. What runs beside the steps goes first, as steps wait for it: measured on an H200 at a
    chunk of 256, 10.07 ms against 10.32 with equal priorities, and 13.3 against 11.7 with the steps first."""

    steps: torch.cuda.Stream
    side: torch.cuda.Stream


SIDE_PRIORITY = -1  # the higher of the two that every device has


def _new_streams(device: torch.device) -> _Streams:
    return _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device, priority=SIDE_PRIORITY))


_lock = threading.Lock()
_captured: OrderedDict[Hashable, _Captured] = OrderedDict()
_retired: list[_Captured] = []
_streams: dict[tuple[int, int], _Streams] = {}


def run_plainly(groups: Sequence[Sequence[StepLoop]], bank: Tensor) -> None:
    """Runs all loops one after the other by plain launches on the current stream."""
    memories: dict[Hashable, Any] = {}

    def runner(loop: StepLoop, buffer: int) -> _Plain:
        key = (loop.signature, buffer)
        if key not in memories:
            memories[key] = loop.make_memory()
        return _Plain(memories[key])

    streams = _new_streams(bank.device)
    for loops in groups:
        _run_overlapped(loops, _runners(loops, runner), bank, streams)


def replay(groups: Sequence[Sequence[StepLoop]], bank: Tensor) -> None:
    """Runs all loops one after the other on the current stream, each as one replay; captures what is missing first."""
    stream = torch.cuda.current_stream(bank.device)
    where = (bank.get_device(), stream.cuda_stream)

    def runner(loop: StepLoop, buffer: int) -> _Captured:
        key = (loop.signature, buffer, *where)
        captured = _captured.get(key)
        if captured is None:
            captured = _captured[key] = _capture(loop, bank.device)
        _captured.move_to_end(key)
        return captured

    with _lock:
        if where not in _streams:
            _streams[where] = _new_streams(bank.device)
        runners = [_runners(loops, runner) for loops in groups]
        try:
            for loops, runners_of_group in zip(groups, runners, strict=True):
                _run_overlapped(loops, runners_of_group, bank, _streams[where])
        finally:
            for captured in itertools.chain(*runners):
                captured.done.record(stream)
            _retire()


def _runners(loops: Sequence[StepLoop], runner_of: Callable[[StepLoop, int], _R]) -> list[_R]:
    """A runner for each loop, on two working memories in turn."""
    return [runner_of(loop, k % 2) for k, loop in enumerate(loops)]


def _run_overlapped(loops: Sequence[StepLoop], runners: Sequence[_Runner], bank: Tensor, streams: _Streams) -> None:
    """The steps of all loops in order; beside them what is not needed yet."""
    current = torch.cuda.current_stream(bank.device)
    streams.side.wait_stream(current)
    streams.steps.wait_stream(current)
    done: torch.cuda.Event | None = None
    try:
        for k, (loop, runner) in enumerate(zip(loops, runners, strict=True)):
            with torch.cuda.stream(streams.side):
                loop.stage(runner.memory)
                runner.couple(loop)
                coupled = streams.side.record_event()
                if done is not None:
                    streams.side.wait_event(done)
                    loops[k - 1].read(runners[k - 1].memory)
            with torch.cuda.stream(streams.steps):
                streams.steps.wait_event(coupled)
                runner.steps(loop, bank)
                done = streams.steps.record_event()
    finally:  # whatever happened, the caller's memory is in use until both have ended
        current.wait_stream(streams.steps)
        current.wait_stream(streams.side)
    loops[-1].read(runners[-1].memory)


def _capture(loop: StepLoop, device: torch.device) -> _Captured:
    memory = loop.make_memory()
    table = torch.zeros(1, dtype=torch.int64, device=device)
    couple = _captured_graph(device, lambda: loop.couple(memory), SIDE_PRIORITY)
    steps = _captured_graph(device, lambda: loop.steps(memory, table))
    size = sum(x.numel() * x.element_size() for x in tree_leaves(memory))
    return _Captured(memory, table, couple, steps, torch.cuda.Event(), size)


def _captured_graph(device: torch.device, launch: Callable[[], None], priority: int = 0) -> torch.cuda.CUDAGraph:
    """A graph of what `launch` launches; its kernels keep the priority of the stream that they are captured on."""
    launch()  # kernels must be compiled and loaded before a capture
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=priority)
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # Not `torch.cuda.graph`, which synchronises and empties the allocator's cache.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph


def _retire() -> None:
    """Drops the loops that were used longest ago; one that still runs is kept until it has ended."""
    kept = sum(loop.bytes for loop in _captured.values())
    while len(_captured) > MAX_LOOPS or kept > MAX_BYTES:
        loop = _captured.popitem(last=False)[1]
        kept -= loop.bytes
        _retired.append(loop)
    _retired[:] = [loop for loop in _retired if not loop.done.query()]


def captured_loops() -> int:
    """How many captured step loops are kept, over all devices and streams."""
    with _lock:
        return len(_captured)


def free_captured_loops() -> None:
    """Frees every captured step loop and its working memory. Waits for those that still run."""
    with _lock:
        for loop in (*_captured.values(), *_retired):
            loop.done.synchronize()
        _captured.clear()
        _retired.clear()
