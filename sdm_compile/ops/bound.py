"""Kernel launches as values: launched through Triton, or bound, with everything but the addresses resolved beforehand.

Triton looks a kernel up for every launch, by its arguments' dtypes, alignments and divisibilities. Within a step loop,
and from one decode step to the next, nothing of that changes: a bound kernel passes the driver new addresses alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import gcd
from operator import itemgetter
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .checks import UnsupportedConfigurationError

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # kernels have no assembly then
ALIGNMENT = 16  # bytes; what Triton compiles a kernel's addresses for, or not
MAX_GRID = 65535  # CUDA's limit in every dimension of a grid but the first


class KernelCall(NamedTuple):
    """One launch, as every kernel is launched: parameters by position, constants and launch options by name."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # tensors, integers, and None
    options: dict[str, Any]

    def launch(self) -> None:
        """Launches through Triton on the current stream; compiles first what is not compiled yet.

        Raises:
            UnsupportedConfigurationError: more programs than a grid has room for.
        """
        self._check_grid()
        if all(self.grid):
            self.kernel[self.grid](*self.args, **self.options)
            if _noted.calls is not None:
                _noted.calls.append(self)

    def _check_grid(self) -> None:
        if max(self.grid[1:], default=0) > MAX_GRID:
            raise UnsupportedConfigurationError(
                f"one launch would need a grid of {self.grid}, of which all but the first are at most {MAX_GRID}: "
                "use fewer streams or tokens per call, or another chunk_size"
            )

    def addresses(self) -> list[int]:
        """Where its tensors lie, in the order of the parameters."""
        return [arg.data_ptr() for arg in self.args if isinstance(arg, Tensor)]


class _Noted(threading.local):
    calls: list[KernelCall] | None = None


_noted = _Noted()


@contextmanager
def noted_launches() -> Iterator[list[KernelCall]]:
    """What this thread launches through Triton meanwhile, in order."""
    calls: list[KernelCall] = []
    _noted.calls = calls
    try:
        yield calls
    finally:
        _noted.calls = None


def launches_are_watched() -> bool:
    """Whether a hook or a debug setting wants to see every launch, or kernels are interpreted."""
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    return bool(
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
        or runtime.add_stages_inspection_hook
        or compilation.instrumentation_mode
        or runtime.debug
        or INTERPRETED.value
    )


def can_bind(kernel: Any) -> bool:
    """Whether launches of this kernel may pass Triton by."""
    return not (launches_are_watched() or kernel.pre_run_hooks)


class BoundKernel:
    """The kernel of a call, compiled and loaded on the current device, for tensors of other addresses.

    Addresses may be less aligned than the call's own only where those were not aligned either.
    """

    def __init__(self, call: KernelCall) -> None:
        self.kernel = call.kernel
        compiled = call.kernel.warmup(*call.args, grid=call.grid, **call.options)
        names = call.kernel.arg_names
        values = {**call.options, **dict(zip(names, call.args, strict=False))}
        tensors = [name for name in names if isinstance(values[name], Tensor)]
        others = [name for name in names if name not in tensors]
        self._tensors = len(tensors)
        self._others = [values[name] for name in others]  # keeps no tensor alive
        self._in_order = itemgetter(*map([*tensors, *others].index, names))
        self._grid = (*call.grid, 1, 1)[:3]
        self._compiled = compiled  # unloads the function when it is dropped
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        driver = triton.runtime.driver.active
        self._stream = partial(driver.get_current_stream, driver.get_current_device())

    def launch(self, addresses: Sequence[int]) -> None:
        """Launches on the current stream, which must be of the device that it was bound on."""
        if len(addresses) != self._tensors:
            raise ValueError(f"{len(addresses)} addresses for a launch with {self._tensors} tensors")
        args = self._in_order((*addresses, *self._others))
        self._run(*self._grid, self._stream(), self._function, self._metadata, None, None, None, *args)


class CallsOfOneSignature:
    """Launches `call(*tensors)` for tensors that differ from call to call in their addresses alone."""

    def __init__(self, call: Callable[..., KernelCall]) -> None:
        self._call = call
        self._bound: BoundKernel | None = None

    def launch(self, *tensors: Tensor) -> None:
        """Launches on the current stream; bound, where every tensor is aligned and nothing wants to see launches."""
        addresses = [*map(Tensor.data_ptr, tensors)]
        if self._bound is not None and can_bind(self._bound.kernel) and aligned(addresses):
            self._bound.launch(addresses)
            return
        call = self._call(*tensors)
        call.launch()
        if all(call.grid) and can_bind(call.kernel) and aligned(addresses):
            self._bound = BoundKernel(call)


def aligned(addresses: Sequence[int]) -> bool:
    """Whether each address, or distance between two, is one that Triton compiles for."""
    return gcd(ALIGNMENT, *addresses) == ALIGNMENT


def each_step(call: Callable[[int], KernelCall], steps: int) -> Callable[[int], None]:
    """Launches `call(step)` for any step. The calls may differ in their tensors' addresses alone, evenly spaced."""
    first = call(0)
    if steps == 1 or not can_bind(first.kernel):
        return lambda step: call(step).launch()
    start, second = first.addresses(), call(1).addresses()
    strides = [b - a for a, b in zip(start, second, strict=True)]
    if not aligned((*start, *strides)):
        return lambda step: call(step).launch()  # Triton compiles a kernel for each mixture of alignments
    kernel = BoundKernel(first)
    return lambda step: kernel.launch([a + step * stride for a, stride in zip(start, strides, strict=True)])


def eviction_hint(bank: Tensor, rows: int) -> str:
    """The hint for bank rows that are not needed again soon, in a launch that moves so many.

    Measured on an H200, us per step with the hint on read rows and on the write: 23.9 against 25.1 where the gather
    moves 34 MB; 520 against 507 where it moves 1 GB, which no order of eviction keeps in a cache of 60 MB. On the rows
    before a backward's step: 37.8 against 38.5 where they are 34 MB; 128.8 against 126.4 where 134 MB.
    """
    return "evict_first" if rows * bank.shape[1] * bank.element_size() <= 64 * 2**20 else ""
