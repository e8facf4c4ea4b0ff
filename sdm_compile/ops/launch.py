"""How step loops reach the device: captured once per signature and replayed for every eager call.

A captured loop takes the addresses that differ between calls, the bank's above all, from a small table on the device,
which a kernel writes just before the replay. Of a loop whose steps are a single launch only what stands between its
inputs and its steps is captured. Loops are kept per device and stream; all loops of a stream share two working
memories, which they take in turn, and two streams never share one. SPEC section 5.

What comes before and after a loop's steps (staging, Phase 1, the solve; the readings) does not touch the bank, so it
runs on a second stream, under the steps of the neighbouring loops.

What is launched besides the captured loops reads and writes the call's own tensors. The second call whose tensors have
the same layout records those launches, and later ones make them again without building them.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .bound import aligned
from .recorded import RecordedLaunch, record
from .step_table import ADDRESSES, StepAddress, write_table
from .working_memory import Fill, Memory, in_a_thread

MAX_LOOPS = 32  # captured loops kept at a time, over all signatures, devices and streams
MAX_CALLS = 64  # layouts of calls whose launches are recorded
MAX_BYTES = 4 * 2**30  # of working memory kept, over all devices and streams, beside that of the latest call


class StepLoop(Protocol):
    """A call's step loop, as `replay` runs it. `memory` is its working memory; nothing in it outlives the loop."""

    @property
    def signature(self) -> Hashable:
        """Everything that `steps` depends on besides its addresses and what its memory holds."""

    @property
    def length(self) -> int:
        """How many steps it has."""

    def addresses(self) -> Sequence[StepAddress]:
        """What stands in its table, at most `ADDRESSES`; nothing if what is captured touches nothing of the call's."""

    @property
    def captures_steps(self) -> bool:
        """Whether the steps are captured; else they are launched as they are."""

    def memory_form(self) -> Any:
        """The working memory: a nest of meta tensors."""

    @property
    def memory_bytes(self) -> int:
        """What that takes, see `memory_bytes`."""

    def clear(self, memory: Any) -> None:
        """Fills the memory so that no launch on it touches a bank row."""

    def stage(self, memory: Any) -> None:
        """Launches what reads the call's inputs; touches nothing that `fill` initialises."""

    def couple(self, memory: Any, table: Tensor | None) -> None:
        """Launches the work between staging and the steps, which touches nothing that `fill` initialises."""

    @property
    def concludes(self) -> bool:
        """Whether there is something to `conclude`."""

    def conclude(self, memory: Any) -> None:
        """Launches what stands between the steps and `read`, on the memory alone."""

    def steps(self, memory: Any, table: Tensor | None) -> None:
        """Launches the steps; step s takes the addresses from table[s], where there is a table."""

    def read(self, memory: Any) -> None:
        """Launches what writes the call's outputs."""


def own_memory(loop: StepLoop, device: torch.device) -> Any:
    """Working memory of one loop that shares it with no other."""
    memory = Memory()
    memory.become(loop.memory_bytes, device)
    return memory.of(loop.memory_form())


class _Runner(Protocol):
    """A loop on its working memory, ready to run on the current stream; see `StepLoop` for the parts."""

    def stage(self) -> None: ...

    def couple(self) -> None: ...

    def steps(self) -> None: ...

    def conclude(self) -> None: ...

    def read(self) -> None: ...


@dataclass
class _Plain:
    """Launches one by one, on working memory of one call alone: what an outer capture records."""

    loop: StepLoop
    memory: Any

    def stage(self) -> None:
        self.loop.stage(self.memory)

    def couple(self) -> None:
        self.loop.couple(self.memory, None)

    def steps(self) -> None:
        self.loop.steps(self.memory, None)

    def conclude(self) -> None:
        if self.loop.concludes:
            self.loop.conclude(self.memory)

    def read(self) -> None:
        self.loop.read(self.memory)


@dataclass
class _Captured:
    """A loop's graphs, on one of the working memories of a device and stream."""

    memory: Any  # None once it is retired: memory is reused in the order of its stream, and may go before the graphs
    own: Sequence[Tensor]  # the memory as a whole, and the table if there is one
    table: Tensor | None  # [steps, ADDRESSES] int64 on the device
    couple_graph: torch.cuda.CUDAGraph
    conclude_graph: torch.cuda.CUDAGraph | None
    steps_graph: torch.cuda.CUDAGraph | None  # None if the steps are launched as they are
    done: torch.cuda.Event  # after the latest call of its device and stream
    used: int = 0  # the number of the latest call that used it


@dataclass
class _Replays(ABC):
    """The graphs of a loop, whatever its launches beside them are."""

    captured: _Captured

    def stage(self) -> None:
        self._launch("stage")

    def couple(self) -> None:
        self.captured.couple_graph.replay()

    def steps(self) -> None:
        if self.captured.steps_graph is not None:
            self.captured.steps_graph.replay()
        else:
            self._launch("steps")

    def conclude(self) -> None:
        if self.captured.conclude_graph is not None:
            self.captured.conclude_graph.replay()

    def read(self) -> None:
        self._launch("read")

    @abstractmethod
    def _launch(self, part: str) -> None:
        """Launches a part that is no graph."""


@dataclass
class _Built(_Replays):
    """Builds its launches, and records them for calls like this one, of tensors like these, unless those are None."""

    loop: StepLoop
    tensors: Sequence[Tensor] | None
    launches: dict[str, list[RecordedLaunch] | None]  # of each part that is launched, as far as it has come

    def _launch(self, part: str) -> None:
        if self.tensors is None:
            self._build(part)
        else:
            self.launches[part] = record(lambda: self._build(part), self.tensors, self.captured.own)

    def _build(self, part: str) -> None:
        memory, table = self.captured.memory, self.captured.table
        if part == "steps":
            self.loop.steps(memory, None)
        elif part == "read":
            self.loop.read(memory)
        else:
            self.loop.stage(memory)
            if table is not None:
                write_table(table, self.loop.addresses())


@dataclass
class _Recorded(_Replays):
    """Makes recorded launches, for tensors of other addresses."""

    launches: dict[str, list[RecordedLaunch]]  # of each part that is launched
    addresses: Sequence[int] = ()  # of the call's tensors

    def _launch(self, part: str) -> None:
        for launch in self.launches[part]:
            launch.launch(self.addresses)


@dataclass
class _Layout:
    """What is known of calls whose tensors have one layout."""

    recorded: list[list[_Recorded]] | None = None
    recordable: bool = True

    def usable(self) -> list[list[_Recorded]] | None:
        """What was recorded, if all of its loops are still there."""
        if self.recorded and any(r.captured.memory is None for r in itertools.chain(*self.recorded)):
            self.recorded = None
        return self.recorded


class _Streams(NamedTuple):
    """The streams of a call. What runs beside the steps goes first, as steps wait for it: measured on an H200 at a
    chunk of 256, 10.07 ms against 10.32 with equal priorities, and 13.3 against 11.7 with the steps first."""

    steps: torch.cuda.Stream
    side: torch.cuda.Stream


SIDE_PRIORITY = -1  # the higher of the two that every device has


def _new_streams(device: torch.device) -> _Streams:
    return _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device, priority=SIDE_PRIORITY))


class _Place:
    """What the calls of one device and stream share."""

    def __init__(self, device: torch.device) -> None:
        self.streams = _new_streams(device)
        self.memories = (Memory(), Memory())
        self.done = torch.cuda.Event()  # after the latest call
        self.used = 0  # the number of the latest call


_lock = threading.Lock()
_calls = itertools.count(1)
_places: dict[tuple[int, int], _Place] = {}  # by device and stream
_captured: dict[tuple[Any, ...], _Captured] = {}  # by signature, which memory, device and stream
_layouts: OrderedDict[Hashable, _Layout] = OrderedDict()  # by kind of call, its tensors' layout, device and stream
_retired: list[_Captured] = []


Groups = Sequence[Sequence[StepLoop]]
"""A call's loops in order, those of one group of streams after those of the other."""


def run_plainly(groups: Groups, device: torch.device, fill: Fill | None) -> None:
    """Runs all loops one after the other by plain launches on the current stream."""
    memories, streams = (Memory(), Memory()), _new_streams(device)
    for k, memory in enumerate(memories):
        memory.become(memory.needs(loop.memory_bytes for loops in groups for loop in loops[k::2]), device)
    plain = ([_Plain(loop, memories[k % 2].of(loop.memory_form())) for k, loop in enumerate(loops)] for loops in groups)
    _run_groups(plain, streams, fill)


def replay(
    kind: Hashable,
    tensors: Sequence[Tensor],
    loops: Callable[[], Groups],
    device: torch.device,
    fill: Fill | None,
) -> None:
    """Runs a call's loops in order on the current stream, replaying what is captured; captures what is missing first.

    Args:
        kind: everything that the loops depend on besides the tensors.
        tensors: all that the loops' launches touch besides working memory.
        loops: makes them, where they are not known from a call of the same kind and layout.
        fill: runs under the preparation of the first steps.
    """
    stream = torch.cuda.current_stream(device)
    where = (stream.device_index, stream.cuda_stream)
    key = (kind, *((x.dtype, x.shape, x.stride()) for x in tensors), where)
    addresses = [x.data_ptr() for x in tensors]
    with _lock:
        if where not in _places:
            _places[where] = _Place(device)
        place, number = _places[where], next(_calls)
        place.used = number
        layout = _layouts.get(key)
        recorded = layout.usable() if layout is not None and aligned(addresses) else None
        if layout is not None and recorded is not None:
            _layouts.move_to_end(key)
            for known in itertools.chain(*recorded):
                known.addresses, known.captured.used = addresses, number
            _run(recorded, place, stream, fill)
            return
        groups = loops()
        keeping = tensors if layout is not None and layout.recordable and aligned(addresses) else None
        built = _build(groups, place, where, keeping)
        for runner in itertools.chain(*built):
            runner.captured.used = number
        try:
            _run(built, place, stream, fill)
        finally:
            _retire(where)
        if layout is None:
            _layouts[key] = _Layout()
            while len(_layouts) > MAX_CALLS:
                _layouts.popitem(last=False)
        elif keeping is not None:
            layout.recorded = _recorded(built)
            layout.recordable = layout.recorded is not None


def _build(
    groups: Groups, place: _Place, where: tuple[int, int], tensors: Sequence[Tensor] | None
) -> list[list[_Built]]:
    """A runner for each loop, on the two working memories in turn."""
    device = place.streams.steps.device

    def captured(loop: StepLoop, buffer: int) -> _Captured:
        key = (loop.signature, buffer, *where)
        if key not in _captured:
            _captured[key] = _capture(loop, place.memories[buffer], place.done, device)
        return _captured[key]

    with torch.inference_mode(False):  # what is kept serves calls in any mode
        for k, memory in enumerate(place.memories):
            size = memory.needs(loop.memory_bytes for loops in groups for loop in loops[k::2])
            if size:
                _forget([key for key in _captured if key[1:] == (k, *where)])
                in_a_thread(torch.cuda.current_stream(device), partial(memory.become, size, device))
        return [[_Built(captured(loop, k % 2), loop, tensors, {}) for k, loop in enumerate(loops)] for loops in groups]


def _recorded(built: Sequence[Sequence[_Built]]) -> list[list[_Recorded]] | None:
    """What was recorded; None if that is not all."""
    runners: list[list[_Recorded]] = []
    for group in built:
        runners.append([])
        for runner in group:
            launches = {part: x for part, x in runner.launches.items() if x is not None}
            if len(launches) < len(runner.launches):
                return None
            runners[-1].append(_Recorded(runner.captured, launches))
    return runners


def _run(groups: Sequence[Sequence[_Runner]], place: _Place, stream: torch.cuda.Stream, fill: Fill | None) -> None:
    try:
        _run_groups(groups, place.streams, fill)
    finally:
        place.done.record(stream)


def _run_groups(groups: Iterable[Sequence[_Runner]], streams: _Streams, fill: Fill | None) -> None:
    """Runs all groups in order. Fills once: beside the first group, or, where there is none, by itself."""
    for runners in groups:
        _run_overlapped(runners, streams, fill)
        fill = None
    if fill is not None:
        fill()


def _run_overlapped(runners: Sequence[_Runner], streams: _Streams, fill: Fill | None) -> None:
    """The steps of all loops in order; beside them what is not needed yet. Their device is the current one."""
    current = torch.cuda.current_stream(streams.steps.device)
    streams.side.wait_stream(current)
    streams.steps.wait_stream(current)
    done: torch.cuda.Event | None = None
    try:  # `torch.cuda.stream` would look up each time what was current before
        if fill is not None:
            torch.cuda.set_stream(streams.steps)
            fill()
        for k, runner in enumerate(runners):
            torch.cuda.set_stream(streams.side)
            runner.stage()
            runner.couple()
            coupled = streams.side.record_event()
            if done is not None:
                streams.side.wait_event(done)
                runners[k - 1].conclude()
                runners[k - 1].read()
            torch.cuda.set_stream(streams.steps)
            streams.steps.wait_event(coupled)
            runner.steps()
            done = streams.steps.record_event()
    finally:  # whatever happened, the caller's memory is in use until both have ended
        torch.cuda.set_stream(current)
        current.wait_stream(streams.steps)
        current.wait_stream(streams.side)
    runners[-1].conclude()
    runners[-1].read()


def _capture(loop: StepLoop, shared: Memory, done: torch.cuda.Event, device: torch.device) -> _Captured:
    memory = shared.of(loop.memory_form())
    loop.clear(memory)
    addresses, table = loop.addresses(), None
    if addresses:
        stream = torch.cuda.current_stream(device)
        table = in_a_thread(stream, lambda: torch.empty(loop.length, ADDRESSES, dtype=torch.int64, device=device))
        write_table(table, addresses)
    couple = _captured_graph(device, lambda: loop.couple(memory, table), SIDE_PRIORITY)
    steps = _captured_graph(device, lambda: loop.steps(memory, table)) if loop.captures_steps else None
    conclude = _captured_graph(device, lambda: loop.conclude(memory), SIDE_PRIORITY) if loop.concludes else None
    own = (shared.bytes,) if table is None else (shared.bytes, table)
    return _Captured(memory, own, table, couple, conclude, steps, done)


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


def _retire(latest: tuple[int, int]) -> None:
    """Drops the loops that were used longest ago, and the memories of streams that have none, or were used longest ago.

    A loop that still runs is kept until it has ended. latest: the device and stream of the latest call.
    """
    by_age = sorted(_captured, key=lambda key: _captured[key].used)
    _forget(by_age[: max(0, len(by_age) - MAX_LOOPS)])
    kept = 0
    for where in sorted(_places, key=lambda where: _places[where].used, reverse=True):
        kept += sum(len(memory.bytes) for memory in _places[where].memories)
        if kept > MAX_BYTES and where != latest:
            _forget([key for key in _captured if key[2:] == where])
    used = [latest, *{key[2:] for key in _captured}]
    for where in [where for where in _places if where not in used]:
        del _places[where]
    _retired[:] = [loop for loop in _retired if not loop.done.query()]


def _forget(keys: Iterable[tuple[Any, ...]]) -> None:
    """Retires the loops of these keys."""
    for key in keys:
        loop = _captured.pop(key)
        loop.memory, loop.own = None, ()
        _retired.append(loop)
    for layout in _layouts.values():
        layout.usable()  # lets go of what needs a loop that is gone


def captured_loops() -> int:
    """How many captured step loops are kept, over all devices and streams."""
    with _lock:
        return len(_captured)


def free_captured_loops() -> None:
    """Frees every captured step loop and its working memory. Waits for those that still run."""
    with _lock:
        for place in _places.values():
            place.done.synchronize()
        for loop in _retired:
            loop.done.synchronize()
        _layouts.clear()
        _captured.clear()
        _retired.clear()
        _places.clear()
