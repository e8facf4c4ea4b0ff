"""Capture of a callable into a CUDA graph, and whether what the graph depends on is still as it was.

A graph replays launches with the addresses, shapes and settings of its capture. The runners of this package capture
through `capture`, after `warm_up` within `restored`; before every replay they ask `numeric_settings` and `Watch`
whether anything changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, getitem, is_
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..ops.situation import Situation, current_situation
from .entries import chooses

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as Pool  # what `torch.cuda.graph_pool_handle` returns

T = TypeVar("T")

WARM_UPS = 2  # the first compiles and loads kernels; from the second on, a step does what it always does


class CaptureError(RuntimeError):
    """A callable could not be captured, or cannot be now. The cause says why; everything is usable as before."""


def refuse_while_capturing(device: torch.device, what: str) -> None:
    """Raises CaptureError where the current stream is being captured."""
    if current_situation(device) is Situation.CAPTURING:
        raise CaptureError(
            f"{what} while the current stream is being captured into a CUDA graph: do it outside of the capture, or "
            "call the plain function inside"
        )


@dataclass(frozen=True)
class Captured(Generic[T]):
    """A graph, and what the callable returned during its capture: tensors in the graph's own pool."""

    graph: torch.cuda.CUDAGraph
    result: T


@contextmanager
def restored(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Leaves these tensors, the CPU's random state and the device's as they were before the block, bit by bit."""
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        with torch.no_grad():
            kept = [x.clone() for x in tensors]
        try:
            yield
        finally:
            with torch.no_grad():
                for x, was in zip(tensors, kept, strict=True):
                    x.copy_(was)


def warm_up(call: Callable[[], object], device: torch.device) -> None:
    """Runs a callable so often on the stream that captures; without a CUDA device once, to see that it can run."""
    if device.type != "cuda":
        call()
        return
    with _capture_stream(device):
        for _ in range(WARM_UPS):
            call()


def capture(call: Callable[[], T], device: torch.device, pool: Pool) -> Captured[T]:
    """Captures one call of a warmed-up callable. Nothing runs on the device.

    Memory that earlier graphs have given up is returned to the device first, so that captures and drops do not add up.

    Args:
        pool: which memory the graph uses. Graphs that share one must not replay at the same time, and what a graph
            returned is valid until another one of the pool replays.
    Raises:
        CaptureError: the callable raised, or did what cannot be captured, or no capture can begin. It has ended then,
            and the device, its streams and its random numbers can be used as before, as can graphs in the pool; but
            the next capture needs another pool.
    """
    graph = torch.cuda.CUDAGraph()
    with _capture_stream(device):
        torch.cuda.empty_cache()
        # cuBLAS keeps one workspace per stream for good. Two graphs captured with it would write to it side by side
        # when they are replayed on two streams: each takes one from its own pool instead.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with _Recording(graph, device, pool):
                result = call()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
    return Captured(graph, result)


_lock = threading.RLock()  # over the stream that captures
_streams: dict[int, torch.cuda.Stream] = {}
_abandoned: list[torch.cuda.CUDAGraph] = []  # the allocator of pinned memory may still ask these what they capture


@contextmanager
def _capture_stream(device: torch.device) -> Iterator[None]:
    """The current stream is the one that captures, behind the caller's work and in front of what the caller does next.

    Autocast casts weights anew: a graph must not use copies that autocast keeps and frees.
    """
    with _lock:
        if device.index not in _streams:
            _streams[device.index] = torch.cuda.Stream(device)
        stream, current = _streams[device.index], torch.cuda.current_stream(device)
        stream.wait_stream(current)
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            torch.set_autocast_cache_enabled(caches)
            current.wait_stream(stream)


class _Recording:
    """Begins a capture on the current stream and ends it, whatever happened in between."""

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device, pool: Pool) -> None:
        self._graph, self._device, self._pool = graph, device, pool

    def __enter__(self) -> None:
        # Not `torch.cuda.graph`, which synchronises, and leaves a failed capture half open.
        try:
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except RuntimeError as error:
            refused = CaptureError(f"a capture into a CUDA graph cannot begin: {_reason(error)}")
            try:
                self._abandon(began=False)
            except RuntimeError as failed:
                refused.add_note(f"cleaning up failed too: {_reason(failed)}")
            raise refused from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError as ended:
            self._abandon(began=True)
            error = error or ended
        else:
            if error is not None:
                self._graph.reset()
        if not isinstance(error, Exception):
            return
        try:
            raise CaptureError(
                f"this cannot be captured into a CUDA graph: {_reason(error)} (the cause, above, says where). A "
                "captured call must not wait for the device or copy from it (.item(), .cpu(), printing a tensor, "
                "shapes that depend on values), nor copy from memory that is not pinned; what is kept of an "
                "earlier training step must be detached"
            ) from error
        finally:
            del error  # whose traceback holds this frame, and in those above it tensors of the failed capture

    def _abandon(self, began: bool) -> None:
        """Does what PyTorch leaves undone where CUDA cannot begin or end a capture.

        Before 2.14 the pool stays taken and the random generator believes that it is being captured; in some versions
        allocations still go to the pool. In those, the allocator of pinned memory goes on to believe that it is being
        captured into, which nothing can undo: another capture into the pool cannot begin.
        """
        index = self._device.index
        allocating = _was_allocating(index, self._pool)
        if allocating:
            _abandoned.append(self._graph)
        self._graph.reset()
        if torch.__version__ < "2.14":
            if began or allocating:  # otherwise it was refused before it took the pool
                torch._C._cuda_releasePool(index, self._pool)
            x, graph = torch.zeros((), device=self._device), torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            x.zero_()
            graph.capture_end()  # which tells the generator


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _was_allocating(index: int, pool: Pool) -> bool:
    """Whether new memory still came from the pool; it no longer does."""
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:
        return False
    return True


def numeric_settings(device_type: str) -> tuple[object, ...]:
    """What, outside of a callable, decides which kernels it launches: the precision of matmuls and convolutions,
    autocast, and whether kernels must be deterministic. Not grad mode: a runner sets that itself.

    It takes 2 us: PyTorch's public names for these take 4 us more, and one of them raises where precisions were set in
    two ways.
    """
    autocast = torch.is_autocast_enabled(device_type)
    return (
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch.get_deterministic_debug_mode(),
        torch._C._get_cudnn_deterministic(),
        torch.get_autocast_dtype(device_type) if autocast else None,
    )


@dataclass(frozen=True)
class Form:
    """What a watched tensor is, apart from where."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, name: str, x: Tensor) -> Form:
        return cls(name, x.shape, x.dtype, x.device)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype} on {self.device}"


PARTS = ("_parameters", "_buffers", "_modules")  # of a module's attributes, those of which it shows the contents

_dtype, _shape, _training = attrgetter("dtype"), attrgetter("shape"), attrgetter("training")


class Watch:
    """Whether tensors are where they were, of modules and of nests of dicts, lists, tuples and objects.

    Of a module: its parameters, buffers and submodules (not what is added to a module that had none), its other
    attributes that are tensors, have an `at` method, or are dicts, lists or tuples in which there are tensors, and
    `training`. Of any other object: the attributes in which there are tensors.

    Args:
        roots: the objects, by name.
        layouts: whether shapes and strides must be the same as well as addresses and dtypes.
    """

    def __init__(self, roots: dict[str, object], layouts: bool) -> None:
        self._containers: list[Any] = []
        self._keys: list[Any] = []
        self._children: list[object] = []
        self._sized: list[Any] = []
        self._modules: list[nn.Module] = []
        self._found: dict[int, bool] = {}  # by id, whether there is a tensor in it
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self._walk_roots(roots)
        self._layouts = layouts
        self._lengths = list(map(len, self._sized))
        self._was_training = list(map(_training, self._modules))
        self._addresses = list(map(Tensor.data_ptr, self.tensors))
        self._dtypes = list(map(_dtype, self.tensors))
        self._shapes = list(map(_shape, self.tensors))
        self._strides = list(map(Tensor.stride, self.tensors))

    def forms(self) -> list[Form]:
        """Of every tensor, now."""
        return list(map(Form.of, self.names, self.tensors))

    def unchanged(self) -> bool:
        """Whether the same tensors are at the same places and addresses. About 0.2 us per tensor."""
        try:
            if not all(map(is_, map(getitem, self._containers, self._keys), self._children)):
                return False
        except (KeyError, IndexError):
            return False
        return (
            list(map(len, self._sized)) == self._lengths
            and list(map(_training, self._modules)) == self._was_training
            and list(map(Tensor.data_ptr, self.tensors)) == self._addresses
            and list(map(_dtype, self.tensors)) == self._dtypes
            and not (self._layouts and self._laid_out_otherwise())
        )

    def put_back(self) -> None:
        """Undoes what was replaced, but for what changed in a tensor itself."""
        for container, key, child in zip(self._containers, self._keys, self._children, strict=True):
            container[key] = child

    def _laid_out_otherwise(self) -> bool:
        return (
            list(map(_shape, self.tensors)) != self._shapes or list(map(Tensor.stride, self.tensors)) != self._strides
        )

    def _walk_roots(self, roots: dict[str, object]) -> None:
        for name, root in roots.items():
            self._walk(name, root)

    def _walk(self, name: str, node: object) -> bool:
        """Adds what is in a node, once; whether there is a tensor."""
        if id(node) in self._found:
            return self._found[id(node)]
        if not (isinstance(node, Tensor | dict | list | tuple) or hasattr(node, "__dict__")):
            return self._walk_into(name, node)  # not one of those whose id lasts
        self._found[id(node)] = True  # for what is in it and leads back to it
        self._found[id(node)] = self._walk_into(name, node)
        return self._found[id(node)]

    def _walk_into(self, name: str, node: object) -> bool:
        if isinstance(node, Tensor):
            self.names.append(name)
            self.tensors.append(node)
            return True
        if isinstance(node, nn.Module):
            self._modules.append(node)
            for part in PARTS:
                self._all_of(name, getattr(node, part), "{}.{}")
            for key, x in list(vars(node).items()):
                if key not in PARTS and (isinstance(x, Tensor | dict | list | tuple) or chooses(x)):
                    self._edge(f"{name}.{key}", vars(node), key, x)
            return True
        if isinstance(node, dict):
            return self._all_of(name, node, "{}[{!r}]")
        if isinstance(node, list | tuple):
            return self._all_of(name, node, "{}[{}]")
        return self._walk_other(name, node)

    def _walk_other(self, name: str, node: object) -> bool:
        if isinstance(node, type) or callable(node) or not hasattr(node, "__dict__"):
            return False
        return any([self._edge(f"{name}.{key}", vars(node), key, x) for key, x in list(vars(node).items())])

    def _all_of(self, name: str, node: Any, form: str) -> bool:
        items = list(node.items() if isinstance(node, dict) else enumerate(node))
        found = any([self._edge(form.format(name, key), node, key, x) for key, x in items])
        if found and not isinstance(node, tuple):
            self._sized.append(node)
        return found

    def _edge(self, name: str, container: Any, key: object, child: object) -> bool:
        found = self._walk(name, child)
        if (found or child is None) and not isinstance(container, tuple):
            self._containers.append(container)
            self._keys.append(key)
            self._children.append(child)
        return found
