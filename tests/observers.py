"""Tensors that calls may be known by, and others; what observes calls of ops, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def pair() -> list[Tensor]:
    return [torch.ones(4, 3), torch.zeros(2, dtype=torch.int32)]


class Disabled(Tensor):
    """Without `__torch_function__`, like a parameter; but a subclass that may have a dispatch of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Plain(Tensor):
    """With the functions of a tensor, and its dispatch keys."""


OTHERS: dict[str, Callable[[], Tensor]] = {
    "shape": lambda: torch.ones(5, 3),
    "rank": lambda: torch.ones(4, 3, 1),
    "strides": lambda: torch.ones(3, 4).t(),
    "dtype": lambda: torch.ones(4, 3, dtype=torch.bfloat16),
    "device": lambda: torch.ones(4, 3, device="meta"),
    "requires_grad": lambda: torch.ones(4, 3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(4, 3), requires_grad=False),
    "subclass without functions": lambda: torch.ones(4, 3).as_subclass(Disabled),
    "subclass": lambda: torch.ones(4, 3).as_subclass(Plain),
    "sparse": lambda: torch.ones(4, 3).to_sparse(),
    "a bit that says negative": lambda: torch._neg_view(torch.ones(4, 3)),
    "zeros without memory": lambda: torch._efficientzerotensor((4, 3)),
    "made in inference mode": torch.inference_mode()(lambda: torch.ones(4, 3)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "no tensor": lambda: 3,  # type: ignore[dict-item,return-value]
}


CAN: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.ones(4, 3),
    "transposed": lambda: torch.ones(3, 4).t(),
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "a view": lambda: torch.ones(5, 3)[1:],
    "made in inference mode": OTHERS["made in inference mode"],
}
CANNOT = {
    name: OTHERS[name]
    for name in (
        *("requires_grad", "parameter", "subclass", "subclass without functions", "sparse", "nested"),
        *("no tensor", "a bit that says negative", "zeros without memory"),
    )
}


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def profiled(all_threads: bool = False) -> Iterator[None]:
    config = torch.profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config):
        yield


NOBODY: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad mode": nullcontext,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
}
OBSERVERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": Watching,
    "function mode": Functions,
    "default device": lambda: torch.device("cpu"),
    "fake tensors": FakeTensorMode,
    "profiler": profiled,
    "profiler of all threads": lambda: profiled(all_threads=True),
    "forward AD": forward_ad.dual_level,
}
