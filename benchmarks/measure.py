"""How the benchmarks time a call, measure its memory, and compare its values."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from sdm_compile.ops.launch import free_captured_loops

HOST_REPEATS = 25  # of eager calls that wait for the host, whose time varies more than the device's
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}  # norm-relative, against float64 on the rounded inputs
Result = TypeVar("Result")


def milliseconds(call: Callable[[], object], calls: int = 1, repeats: int = 5) -> float:
    """Median over `repeats` of the mean device time of `calls` back-to-back calls."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def host_milliseconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Median over `repeats` of the time until a call on an idle device returns."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def captured(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the call, and what it returned while it was captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def replay_ms(call: Callable[[], object]) -> float:
    graph, _ = captured(call)
    return milliseconds(graph.replay)


def kernel_us(call: Callable[[], object], name: str, calls: int = 20) -> float:
    """Mean device time of the kernels in whose name `name` stands, over some calls; not a number where none ran."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    kernels = [event for event in profile.key_averages() if name in event.key]
    launches = sum(event.count for event in kernels)
    return sum(event.self_device_time_total for event in kernels) / launches if launches else math.nan


def peak_gib(call: Callable[[], object]) -> tuple[float, float]:
    """GiB allocated at most during a call that finds no captured loop to use, and before it."""
    free_captured_loops()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30, before / 2**30


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The error's norm over that of what was expected; infinite where it is not a number."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    error = ((actual - expected).norm() / expected.norm()).item()
    return math.inf if math.isnan(error) else error


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, on any two devices, agree in dtype, shape and every bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(x.detach().to(a.device).contiguous().view(torch.uint8) for x in (a, b)))


def exact(inputs: list[Tensor]) -> list[Tensor]:
    return [x.cpu().double() if x.is_floating_point() else x.cpu() for x in inputs]
