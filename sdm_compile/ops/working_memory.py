"""Memory of a step loop: one allocation that several loops take in turn, each as a nest of tensors of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_T = TypeVar("_T")

Fill = Callable[[], object]
"""Initialises the tensor that a call's steps update. Nothing before the steps may need it: the two run side by side."""


class Memory:
    """Working memory that loops take one after the other: as large as the largest needs it."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def needs(self, sizes: Iterable[int]) -> int:
        """How large it has to become for the largest of these sizes; 0 if it is large enough."""
        size = max(sizes, default=0)
        return size if size > len(self.bytes) else 0

    def become(self, size: int, device: torch.device) -> None:
        """Takes fresh memory instead of what it had, which is freed first, if no view of it is left."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def of(self, form: Any) -> Any:
        """A nest of tensors like these meta tensors, from the start of the memory on; those of one storage share it."""
        starts = iter(_layout(form)[0])

        def view(x: Tensor) -> Tensor:
            start = next(starts)
            return self.bytes[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)

        return tree_map_only(Tensor, view, form)


def in_turn(*forms: dict[str, Any]) -> list[dict[str, Any]]:
    """These forms, in one memory that they take in turn: what one holds is lost where another is filled."""
    memory = Memory()
    memory.become(max(map(memory_bytes, forms)), torch.device("meta"))
    return [memory.of(form) for form in forms]


def memory_bytes(form: Any) -> int:
    """What a working memory of this form takes."""
    return _layout(form)[1]


def _layout(form: Any) -> tuple[list[int], int]:
    """Where each tensor of a memory starts, and where the last one ends. Storages start on multiples of 512 bytes."""
    starts, end = [], 0
    storages: dict[int, int] = {}  # where each one starts
    for x in tree_leaves(form):
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = end
                end += (storage.nbytes() + 511) // 512 * 512
            starts.append(storages[storage._cdata] + int(x.storage_offset()) * x.element_size())
    return starts, end


def in_a_thread(stream: torch.cuda.Stream, allocate: Callable[[], _T]) -> _T:
    """What `allocate` returns: memory that is kept beyond the call.

    The calling thread may be allocating from a pool whose owner accounts for all that is left in it, as compiled code
    does before it captures itself: a thread of its own is not.
    """

    def on_the_stream() -> _T:
        with torch.cuda.stream(stream):
            return allocate()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(on_the_stream).result()
