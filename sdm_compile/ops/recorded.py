"""Recorded launches: which tensor each address belongs to is found once; a replay only adds offsets to new addresses.

What builds a launch (views, strides, a grid) takes the host longer than the launch. Two calls that agree in the layout
of their tensors make the same launches but for the addresses, and each address is that of one of the call's tensors
plus a distance, or that of memory which both calls use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .bound import BoundKernel, KernelCall, can_bind, noted_launches


class _OtherWork(TorchDispatchMode):
    """Notes whether any PyTorch operator is called that does more than to view a tensor.

    Inside of an op, `contiguous`, `reshape` and the like arrive as they are: views by their schema, copies at times.
    """

    found = False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= not (func.is_view and _memory_of(result) <= _memory_of((args, kwargs)))
        return result


def _memory_of(values: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in tree_leaves(values) if isinstance(x, Tensor)}


class RecordedLaunch:
    """A launch whose addresses are those of a call's tensors, of which `tensors` are an example, or stay as they are.

    Args:
        own: memory that stays where it is for as long as this launch is made.
    Raises:
        LookupError: a tensor of the launch lies in none of them, or in several.
    """

    def __init__(self, call: KernelCall, tensors: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        places = [_extent(x) for x in (*tensors, *own)]
        self._fixed: list[int] = []  # per address: what it is, or how far it lies behind its tensor's
        self._moving: list[tuple[int, int]] = []  # which address, of which tensor
        for n, arg in enumerate(arg for arg in call.args if isinstance(arg, Tensor)):
            start, end = _extent(arg)
            owners = [i for i, (first, last) in enumerate(places) if first <= start and end <= last]
            if start < end and len(owners) != 1:
                raise LookupError(f"a launch's tensor {n} lies in {len(owners)} of the call's tensors")
            if start < end and owners[0] < len(tensors):
                self._moving.append((n, owners[0]))
                start -= places[owners[0]][0]
            self._fixed.append(start)
        self._kernel = BoundKernel(call)

    def launch(self, addresses: Sequence[int]) -> None:
        """Launches on the current stream, for tensors of these addresses, as aligned as the example's."""
        found = self._fixed.copy()
        for n, tensor in self._moving:
            found[n] += addresses[tensor]
        self._kernel.launch(found)


def record(
    work: Callable[[], None], tensors: Sequence[Tensor], own: Sequence[Tensor] = ()
) -> list[RecordedLaunch] | None:
    """Does `work`, and returns its launches; None if it is more than launches, or not all of them can be made again.

    Args:
        tensors, own: see `RecordedLaunch`.
    """
    with _OtherWork() as other, noted_launches() as calls:
        work()
    if other.found or not all(can_bind(call.kernel) for call in calls):
        return None
    try:
        return [RecordedLaunch(call, tensors, own) for call in calls]
    except LookupError:
        return None


def _extent(x: Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the one behind the last."""
    start = x.data_ptr()
    if not x.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()
