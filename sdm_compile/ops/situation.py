"""Who is asking: an eager call, one that is being captured into a CUDA graph, or a tracer that runs fake kernels."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


class Situation(Enum):
    EAGER = "eager"
    CAPTURING = "capturing"
    TRACING = "tracing"


def current_situation(device: torch.device) -> Situation:
    """The situation of the call that is running on `device` now.

    Meant for inside an op's kernel; elsewhere `runs_now` has to rule tracing out first.
    """
    kind = device.type
    if kind == "cuda":
        return situation_on_cuda()
    return Situation.TRACING if kind == "meta" else Situation.EAGER


def situation_on_cuda() -> Situation:
    """`current_situation` of the current CUDA device."""
    return Situation.CAPTURING if torch.cuda.is_current_stream_capturing() else Situation.EAGER


def runs_now(tensor: Tensor) -> bool:
    """Whether a call with this tensor runs as it is made, so that Python may look at what the tensor is.

    A call that is traced or captured runs at another time, on tensors as they are then; one that functorch transforms
    (vmap, grad) gets tensors without an address or values of their own.
    """
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):  # first, for a tracer to go no further
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    tracing = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)  # make_fx, FakeTensorMode
    if any(torch._C._get_dispatch_mode(key) is not None for key in tracing):
        return False
    return current_situation(tensor.device) is Situation.EAGER


def autocast_is_on(device: torch.device) -> bool:
    """Whether calls there are under autocast, which the meta device has none of."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
