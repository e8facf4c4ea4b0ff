"""The fast path of repeated eager calls: one whose tensors agree with an earlier call's skips dispatcher and checks.

Two calls are alike if their tensors agree in all that the dispatcher, the checks and the choice of a launch go by:
type, dispatch keys (with those that this thread includes or leaves out), dtype, device, shape, strides, and whether
they require a gradient. What compares them are the guards by which compiled code knows its inputs: 1.0 us for eight
tensors on a CPU, where one way through the dispatcher takes 2.5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

TensorGuards: Any
try:  # None of it is public. Without all of it no call is known.
    from torch._C import (
        _are_functorch_transforms_active,
        _dispatch_keys,
        _is_torch_function_mode_enabled,
        _is_tracing,
        _len_torch_dispatch_stack,
    )
    from torch._C._autograd import _profiler_enabled
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

MAX_SHAPES = 256
MAX_ALIKE = 8  # calls whose first two tensors have the same shapes

Key = tuple[torch.Size, torch.Size]  # the shapes of a call's first two tensors
Work = Callable[..., Any]


class KnownCalls:
    """Of one op's calls: which function runs calls with tensors like these, of which there are two or more."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[tuple[Any, Work], ...]] = {}
        self._lock = threading.Lock()  # over changes of it

    def find(self, tensors: Sequence[Tensor]) -> Work | None:
        """The function that runs calls like this one, if one is known."""
        for x in tensors:
            if type(x) is not Tensor or x.is_nested:  # what has no shape, or another one each time it is asked
                return None
        for guards, work in self._known.get(_key(tensors), ()):
            if guards.check(*tensors):
                return work
        return None

    def has_room(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `add` would keep anything: calls whose strides, say, are never the same have no more than a few."""
        return len(self._known.get(_key(tensors), ())) < MAX_ALIKE

    def add(self, tensors: Sequence[Tensor], work: Work) -> None:
        """Keeps the function that runs calls like this one, which `can_be_known`, and none of its tensors."""
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        key = _key(tensors)
        with self._lock:
            if key not in self._known and len(self._known) >= MAX_SHAPES:
                self._known.clear()
            self._known[key] = (*self._known.get(key, ()), (guards, work))[:MAX_ALIKE]


def _key(tensors: Sequence[Tensor]) -> Key:
    return tensors[0].shape, tensors[1].shape


def can_be_known(args: Sequence[Any]) -> bool:
    """Whether a call can be recognised by its arguments, and may be: they are distinct plain tensors that require no
    gradient, as what becomes of those depends on the grad mode, and that the dispatcher would not replace first."""
    return (
        TensorGuards is not None
        and all(type(x) is Tensor for x in args)
        and len({*map(id, args)}) == len(args)  # the guards know no tensor that stands for two
        and not any(x.requires_grad or _dispatch_keys(x).raw_repr() & ~_strided_keys(x.device) for x in args)
    )


@lru_cache
def _strided_keys(device: torch.device) -> int:
    """The dispatch keys of any strided tensor there; a view of the negative, say, has others too."""
    with torch.inference_mode(False):
        return _dispatch_keys(torch.empty(0, device=device)).raw_repr()


def unobserved() -> bool:
    """Whether no tracer, mode, transform, profiler or forward AD wants to see this thread's calls of ops.

    Not noticed, as PyTorch offers no way to ask: an `ExecutionTraceObserver` without a profiler, and a kernel of the op
    that is replaced after a call became known.
    """
    return TensorGuards is not None and not (
        torch.compiler.is_compiling()
        or _is_torch_function_mode_enabled()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or _is_tracing()
        or _profiler_enabled()
        or profiler._is_profiler_enabled  # in whatever thread
        or forward_ad._current_level >= 0
    )
