"""Calls like one that was made before, about which nothing is left to be found out.

Two calls are alike if their tensors agree in all that the dispatcher, the checks and the choice of a launch go by:
type, dispatch keys (with those that this thread includes or leaves out), dtype, device, shape, strides, and whether
they require a gradient. What compares them are the guards by which compiled code knows its inputs: 1.0 us for eight
tensors on a CPU, where their shapes, dtypes and devices as a key of a dictionary take 2.4, and one way through the
dispatcher 2.5.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Not public: without it no call is known.
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

MAX_KEYS = 256
MAX_ALIKE = 8  # calls of one key

_T = TypeVar("_T")


class KnownCalls(Generic[_T]):
    """What is known of calls, by their tensors."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Any, _T], ...]] = {}  # by key, the latest first
        self._lock = threading.Lock()  # over changes of it

    def find(self, key: Hashable, tensors: Sequence[Tensor]) -> _T | None:
        """What is known of calls like this one. key: any part of what makes them alike."""
        for guards, known in self._known.get(key, ()):
            if guards.check(*tensors):
                return known
        return None

    def add(self, key: Hashable, tensors: Sequence[Tensor], known: _T) -> None:
        """Keeps what is known of calls like this one, and none of its tensors.

        Does nothing where a tensor is one that the dispatcher would replace first, such as a view of the negative.
        """
        if TensorGuards is None or not all(map(_is_ordinary, tensors)):
            return
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        with self._lock:
            if len(self._known) >= MAX_KEYS:
                self._known.clear()
            self._known[key] = ((guards, known), *self._known.get(key, ()))[:MAX_ALIKE]


def _is_ordinary(x: Tensor) -> bool:
    """Whether it has no dispatch keys but those of any strided tensor."""
    keys = torch._C._dispatch_keys
    with torch.inference_mode(False):
        strided = torch.empty(0, device=x.device)
    return not keys(x).raw_repr() & ~keys(strided).raw_repr()


def unobserved() -> bool:
    """Whether nothing wants to see this thread's calls of ops: no tracer, mode, transform, profiler or forward AD."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )
