"""How step loops reach the device: captured once per signature and replayed for every eager call.

A captured loop takes the addresses that differ between calls, the bank's above all, from a small table on the device,
which a kernel writes just before the replay. Loops are kept per device and stream; all loops of a stream share two
working memories, which they take in turn, and two streams never share one. SPEC section 5.

What comes before and after a loop's steps (staging, Phase 1, the solve; the readings) does not touch the bank, so it
runs on a second stream, under the steps of the neighbouring loops.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .bound import KernelCall

MAX_LOOPS = 32  # captured loops kept at a time, over all signatures, devices and streams
MAX_BYTES = 4 * 2**30  # of working memory kept, over all devices and streams, beside that of the latest call
ADDRESSES = 6  # a step's entries in a table; even, so that every step's are aligned to 16 bytes


def launches_early(bank: Tensor) -> bool:
    """Whether a kernel can be launched before the one in front of it has ended: on a GPU from Hopper on."""
    return bank.is_cuda and torch.cuda.get_device_capability(bank.device)[0] >= 9


class StepAddress(NamedTuple):
    """Where something lies that is not a loop's own: at its first step, and how many bytes further at each next one."""

    first: int
    stride: int = 0


class StepLoop(Protocol):
    """A call's step loop, as `replay` runs it. `memory` is its working memory; nothing in it outlives the loop."""

    @property
    def signature(self) -> Hashable:
        """Everything that `steps` depends on besides its addresses and what its memory holds."""

    @property
    def length(self) -> int:
        """How many steps it has."""

    def addresses(self) -> Sequence[StepAddress]:
        """What stands in its table, at most `ADDRESSES`."""

    def memory_form(self) -> Any:
        """The working memory: a nest of meta tensors."""

    @property
    def memory_bytes(self) -> int:
        """What that takes, see `memory_bytes`."""

    def clear(self, memory: Any) -> None:
        """Fills the memory so that no launch on it touches a bank row."""

    def stage(self, memory: Any) -> None:
        """Launches what reads the call's inputs."""

    def couple(self, memory: Any, table: Tensor | None) -> None:
        """Launches what stands between, on the memory, and on what it may take from the table."""

    @property
    def concludes(self) -> bool:
        """Whether there is something to `conclude`."""

    def conclude(self, memory: Any) -> None:
        """Launches what stands between the steps and `read`, on the memory alone."""

    def steps(self, memory: Any, table: Tensor | None) -> None:
        """Launches the steps; step s takes the addresses from table[s], where there is a table."""

    def read(self, memory: Any) -> None:
        """Launches what writes the call's outputs."""


def eviction_hint(bank: Tensor, rows: int) -> str:
    """The hint for bank rows that are not needed again soon, in a launch that moves so many.

    Measured on an H200, us per step with the hint on read rows and on the write: 23.9 against 25.1 where the gather
    moves 34 MB; 520 against 507 where it moves 1 GB, which no order of eviction keeps in a cache of 60 MB.
    """
    return "evict_first" if rows * bank.shape[1] * bank.element_size() <= 64 * 2**20 else ""


@triton.jit
def from_table(p, p_table, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pointer p, at the address that is a step's entry n of a table: a multiple of 16.

    The part of a step may be at another address where its rows are no multiple of 16 bytes: a kernel then knows of no
    row where it is, and relies on nothing.
    """
    return tl.multiple_of(tl.load(p_table + n).to(tl.pointer_type(p.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=["steps", "a0", "s0", "a1", "s1", "a2", "s2", "a3", "s3", "a4", "s4", "a5", "s5"])
def _write_table_kernel(  # type: ignore[no-untyped-def]
    p_table,
    steps,
    a0: tl.int64,
    s0: tl.int64,
    a1: tl.int64,
    s1: tl.int64,
    a2: tl.int64,
    s2: tl.int64,
    a3: tl.int64,
    s3: tl.int64,
    a4: tl.int64,
    s4: tl.int64,
    a5: tl.int64,
    s5: tl.int64,
    B: tl.constexpr,
):
    firsts, strides = (a0, a1, a2, a3, a4, a5), (s0, s1, s2, s3, s4, s5)
    step = tl.arange(0, B)
    for n in tl.static_range(len(firsts)):
        tl.store(p_table + step * len(firsts) + n, firsts[n] + step * strides[n], mask=step < steps)


def _write_table(table: Tensor, loop: StepLoop) -> None:
    """Fills a loop's table [steps, ADDRESSES]."""
    addresses = [*loop.addresses()]
    addresses += [StepAddress(0)] * (ADDRESSES - len(addresses))
    options = {"B": triton.next_power_of_2(loop.length), "num_warps": 1}
    KernelCall(_write_table_kernel, (1,), (table, loop.length, *itertools.chain(*addresses)), options).launch_again()


class _Memory:
    """Working memory that loops take one after the other: as large as the largest needs it."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def needs(self, loops: Sequence[StepLoop]) -> int:
        """How large it has to become for these loops; 0 if it is large enough."""
        size = max((loop.memory_bytes for loop in loops), default=0)
        return size if size > len(self.bytes) else 0

    def become(self, size: int, device: torch.device) -> None:
        """Takes fresh memory instead of what it had, which is freed first, if no view of it is left."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def of(self, loop: StepLoop) -> Any:
        """The loop's memory."""
        form = loop.memory_form()
        starts = iter(_layout(form)[0])

        def view(x: Tensor) -> Tensor:
            start = next(starts)
            return self.bytes[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)

        return tree_map_only(Tensor, view, form)


def own_memory(loop: StepLoop, device: torch.device) -> Any:
    """Working memory of one loop that shares it with no other."""
    memory = _Memory()
    memory.become(loop.memory_bytes, device)
    return memory.of(loop)


def memory_bytes(form: Any) -> int:
    """What a working memory of this form takes."""
    return _layout(form)[1]


def _layout(form: Any) -> tuple[list[int], int]:
    """Where each tensor of a memory starts, on multiples of 512 bytes, and where the last one ends."""
    starts, end = [], 0
    for x in tree_leaves(form):
        if isinstance(x, Tensor):
            starts.append(end)
            end += (x.numel() * x.element_size() + 511) // 512 * 512
    return starts, end


class _Runner(Protocol):
    """One loop's working memory, and a way to run what needs nothing else on the current stream."""

    memory: Any

    def couple(self, loop: StepLoop) -> None: ...

    def conclude(self, loop: StepLoop) -> None: ...

    def steps(self, loop: StepLoop) -> None: ...


_R = TypeVar("_R", bound=_Runner)
_T = TypeVar("_T")


@dataclass
class _Plain:
    """Launches one by one, on working memory of one call alone: what an outer capture records."""

    memory: Any

    def couple(self, loop: StepLoop) -> None:
        loop.couple(self.memory, None)

    def conclude(self, loop: StepLoop) -> None:
        if loop.concludes:
            loop.conclude(self.memory)

    def steps(self, loop: StepLoop) -> None:
        loop.steps(self.memory, None)


@dataclass
class _Captured:
    memory: Any  # None once it is retired: memory is reused in the order of its stream, and may go before the graphs
    table: Tensor  # [steps, ADDRESSES] int64 on the device
    couple_graph: torch.cuda.CUDAGraph
    conclude_graph: torch.cuda.CUDAGraph | None
    steps_graph: torch.cuda.CUDAGraph
    done: torch.cuda.Event  # after the latest call that used it

    def couple(self, loop: StepLoop) -> None:
        _write_table(self.table, loop)
        self.couple_graph.replay()

    def conclude(self, loop: StepLoop) -> None:
        if self.conclude_graph is not None:
            self.conclude_graph.replay()

    def steps(self, loop: StepLoop) -> None:
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
_captured: OrderedDict[tuple[Any, ...], _Captured] = OrderedDict()  # by signature, which memory, device and stream
_retired: list[_Captured] = []
_streams: dict[tuple[int, int], _Streams] = {}
_memories: dict[tuple[int, int], tuple[_Memory, _Memory]] = {}


def run_plainly(groups: Sequence[Sequence[StepLoop]], device: torch.device) -> None:
    """Runs all loops one after the other by plain launches on the current stream."""
    memories, streams = (_Memory(), _Memory()), _new_streams(device)
    for k, memory in enumerate(memories):
        memory.become(memory.needs([loop for loops in groups for loop in loops[k::2]]), device)
    for loops in groups:
        _run_overlapped(loops, _runners(loops, lambda loop, k: _Plain(memories[k].of(loop))), streams)


def replay(groups: Sequence[Sequence[StepLoop]], device: torch.device) -> None:
    """Runs all loops one after the other on the current stream, each as one replay; captures what is missing first."""
    stream = torch.cuda.current_stream(device)
    where = (stream.device_index, stream.cuda_stream)

    def runner(loop: StepLoop, buffer: int) -> _Captured:
        key = (loop.signature, buffer, *where)
        captured = _captured.get(key)
        if captured is None:
            captured = _captured[key] = _capture(loop, _memories[where][buffer].of(loop), device)
        _captured.move_to_end(key)
        return captured

    with _lock:
        if where not in _streams:
            _streams[where] = _new_streams(device)
            _memories[where] = (_Memory(), _Memory())
        with torch.inference_mode(False):  # what is kept serves calls in any mode
            for k, memory in enumerate(_memories[where]):
                size = memory.needs([loop for loops in groups for loop in loops[k::2]])
                if size:
                    _forget([key for key in _captured if key[1:] == (k, *where)])
                    _in_a_thread(stream, partial(memory.become, size, device))
            runners = [_runners(loops, runner) for loops in groups]
        try:
            for loops, runners_of_group in zip(groups, runners, strict=True):
                _run_overlapped(loops, runners_of_group, _streams[where])
        finally:
            for captured in itertools.chain(*runners):
                captured.done.record(stream)
            _retire(where)


def _runners(loops: Sequence[StepLoop], runner_of: Callable[[StepLoop, int], _R]) -> list[_R]:
    """A runner for each loop, on two working memories in turn."""
    return [runner_of(loop, k % 2) for k, loop in enumerate(loops)]


def _run_overlapped(loops: Sequence[StepLoop], runners: Sequence[_Runner], streams: _Streams) -> None:
    """The steps of all loops in order; beside them what is not needed yet."""
    current = torch.cuda.current_stream(streams.steps.device)
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
                    runners[k - 1].conclude(loops[k - 1])
                    loops[k - 1].read(runners[k - 1].memory)
            with torch.cuda.stream(streams.steps):
                streams.steps.wait_event(coupled)
                runner.steps(loop)
                done = streams.steps.record_event()
    finally:  # whatever happened, the caller's memory is in use until both have ended
        current.wait_stream(streams.steps)
        current.wait_stream(streams.side)
    runners[-1].conclude(loops[-1])
    loops[-1].read(runners[-1].memory)


def _capture(loop: StepLoop, memory: Any, device: torch.device) -> _Captured:
    loop.clear(memory)
    stream = torch.cuda.current_stream(device)
    table = _in_a_thread(stream, lambda: torch.empty(loop.length, ADDRESSES, dtype=torch.int64, device=device))
    _write_table(table, loop)
    couple = _captured_graph(device, lambda: loop.couple(memory, table), SIDE_PRIORITY)
    steps = _captured_graph(device, lambda: loop.steps(memory, table))
    conclude = _captured_graph(device, lambda: loop.conclude(memory), SIDE_PRIORITY) if loop.concludes else None
    return _Captured(memory, table, couple, conclude, steps, torch.cuda.Event())


def _in_a_thread(stream: torch.cuda.Stream, allocate: Callable[[], _T]) -> _T:
    """What `allocate` returns: memory that is kept beyond the call.

    The calling thread may be allocating from a pool whose owner accounts for all that is left in it, as compiled code
    does before it captures itself: a thread of its own is not.
    """

    def on_the_stream() -> _T:
        with torch.cuda.stream(stream):
            return allocate()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(on_the_stream).result()


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
    _forget(list(_captured)[: max(0, len(_captured) - MAX_LOOPS)])
    used = list(dict.fromkeys(key[2:] for key in reversed(_captured)))  # the latest first
    kept = 0
    for where in [latest, *(where for where in used if where != latest)]:
        kept += sum(len(memory.bytes) for memory in _memories[where])
        if kept > MAX_BYTES and where != latest:
            _forget([key for key in _captured if key[2:] == where])
    used = [latest, *{key[2:] for key in _captured}]
    for where in [where for where in _memories if where not in used]:
        del _memories[where], _streams[where]
    _retired[:] = [loop for loop in _retired if not loop.done.query()]


def _forget(keys: Iterable[tuple[Any, ...]]) -> None:
    """Retires the loops of these keys."""
    for key in keys:
        loop = _captured.pop(key)
        loop.memory = None
        _retired.append(loop)


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
        _streams.clear()
        _memories.clear()
