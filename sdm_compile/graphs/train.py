"""A whole training step as one CUDA graph: forward, loss, backward, accumulation, clipping and the optimizer's step.

The first step of a shape runs eagerly: it compiles what has to be compiled, and makes the optimizer's state. The second
one is captured, which runs nothing, and then replayed, as is every later one. Both are steps that were asked for, so
nothing has to be undone: a run through graphs takes the very steps of a run without, with the learning rate rounded to
float32.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .capture import Captured, CaptureError, capture, refuse_while_capturing
from .host_state import (
    PLAIN_TYPES,
    Attribute,
    cut_spent_graphs,
    difference,
    fingerprint,
    restored_on_failure,
    tensor_attributes,
)

RESTLESS = 3  # steps in a row before each of which something changed, after which a warning says so


@dataclass
class _Shape:
    """One shape's graph, and the memory that it reads."""

    inputs: list[Any]  # the batch's leaves
    written: list[Tensor]  # by the step: parameters and buffers
    step: Captured[tuple[Tensor, Tensor | None]]  # gives the loss and the norm


class TrainGraph:
    """Training steps, captured and replayed on a GPU, the same steps run one operation at a time on a CPU.

    Equivalent code of `step(batch)`, with accumulate = 1:

        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)  # the model's, and the optimizer's others
        optimizer.step()
        optimizer.zero_grad()

    On a GPU a shape's first step is eager, the second is captured. From then on Python runs no more, so what a step
    does must not depend on Python's state. Changes of the following are noticed, and are followed by an eager step and
    another capture: parameters and buffers that were replaced, `requires_grad`, attributes of modules that are numbers
    or strings (`training` is one), tensors in their attributes and in lists, tuples and dicts there, settings of the
    optimizer, its state after `load_state_dict`, and PyTorch's settings of precision and determinism. Values in tensors
    are read by the replay, so loading weights needs no new capture. After a change of anything else (an attribute that
    is an object, what `loss_fn` closes over) call `reset()`. If a step assigns a new tensor to an attribute, the
    attribute keeps the tensor of the latest capture, into which the replays of that shape write. A tensor that one
    step hands to the next has to be updated in place.

    Learning rates are free to change, by a scheduler or by hand: on a GPU each group's `lr` becomes a float32 tensor
    there, and a number that is put in its place is copied into it, rounded, before the step.

    A graph keeps the memory of its step until it is dropped. Steps are taken from one thread at a time. A capture frees
    the step loops that eager calls of the ops have captured, whoever made them, and waits for those that still run; and
    it clears cuBLAS's workspaces on every stream of the process. A CUDA graph of your own that was captured earlier, on
    a stream that had a workspace already, goes on to use its freed memory: capture such graphs on a stream on which no
    matmul has run.

    Args:
        model: its parameters, and those of the optimizer, are all on one device.
        loss_fn: `loss_fn(model, batch)` gives the mean loss, a tensor of one element. It may call a compiled form of
            the model, compiled in the default mode.
        optimizer: on a GPU one that can be captured: `capturable=True`, or SGD with `fused=True`.
        accumulate: how many equal parts the batch's tensors are cut into, along their first dimension; the gradients
            of the parts' mean losses are averaged. Tensors of no dimension go to every part.
        max_norm: what the norm of all gradients together is clipped to; None for no clipping.
        autocast: the dtype that autocast takes in `loss_fn`; None for no autocast.
        max_graphs: how many shapes of batches are captured; steps of any others are eager.
    Raises:
        ValueError: a setting out of range; parameters on several devices, or none; an optimizer that cannot be
            captured. TypeError: the optimizer is something else.
        CaptureError: a CUDA graph is being captured.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: int = 1,
        max_norm: float | None = None,
        autocast: torch.dtype | None = None,
        max_graphs: int = 4,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("optimizer is LBFGS, whose step calls the model as often as it likes; use another one")
        for name, value in (("accumulate", accumulate), ("max_graphs", max_graphs)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"autocast is {autocast!r}; expected torch.bfloat16, torch.float16 or None")
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
            raise ValueError(f"max_norm must be a number above 0, or None for no clipping, got {max_norm!r}")
        self.model, self.optimizer, self.max_graphs = model, optimizer, max_graphs
        self._loss_fn, self._accumulate, self._max_norm, self._autocast = loss_fn, accumulate, max_norm, autocast
        self.device = self._common_device()
        self._shapes: dict[Any, _Shape | None] = {}  # by shape; None: had its eager step
        self._pool: Any = None  # the graphs' memory; a capture that failed leaves another one to the next
        self._fingerprint: list[Any] = []  # after the latest eager step; empty: there was none
        self._outputs: set[Attribute] = set()  # in which a step leaves tensors, as its replays do
        self._changes = 0  # how many steps in a row something changed before
        self._warned: set[str] = set()
        self._stream: torch.cuda.Stream | None = None  # of the latest step
        self._rates: list[Tensor] = []  # each group's learning rate
        self._norm: Tensor | None = None
        self._captures = self.device.type == "cuda"
        if self._captures:
            refuse_while_capturing(self.device, "TrainGraph was constructed")
            _check_capturable(optimizer)
            optimizer._warned_capturable_if_run_uncaptured = True  # that it also runs eagerly needs no warning
            self._hold_learning_rates()

    def step(self, batch: Any) -> Tensor:
        """Takes one step.

        Args:
            batch: a tensor, or a nest of them (any pytree) with numbers and strings among them; moved to the model's
                device. A batch of pinned memory must stay as it is until it has been copied there.
        Returns:
            The loss, a tensor of its own: on a GPU, reading it waits for the step.
        Raises:
            TypeError: something else in the batch.
            ValueError: the batch cannot be cut, or `loss_fn` gave no loss.
            CaptureError: the step cannot be captured, or something else is being captured. The step was not taken;
                model and optimizer are as they were.
            RuntimeError: autocast is on.
        """
        if torch.is_autocast_enabled(self.device.type):
            raise RuntimeError(
                "step() was called with autocast on, whose copies of the parameters would grow stale; leave it off and "
                "give TrainGraph the dtype, as autocast=torch.bfloat16"
            )
        with torch.inference_mode(False), torch.enable_grad():
            leaves, structure = pytree.tree_flatten(batch)
            self._check_leaves(leaves)
            return self._step_on_gpu(leaves, structure) if self._captures else self._eager(leaves, structure)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients together in the latest step, before clipping; None without max_norm, or a step."""
        return None if self._norm is None else self._norm.clone()

    @property
    def captured(self) -> int:
        """How many graphs there are now."""
        return sum(shape is not None for shape in self._shapes.values())

    def reset(self) -> None:
        """Drops every graph: the next step of each shape is eager again, the one after it captured."""
        self._shapes.clear()
        self._pool = None
        self._fingerprint = []

    def _step_on_gpu(self, leaves: list[Any], structure: pytree.TreeSpec) -> Tensor:
        refuse_while_capturing(self.device, "step() was called")
        self._follow_stream()
        self._hold_learning_rates()
        self._drop_what_is_stale()
        shape = (structure, *((x.shape, x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves))
        if shape in self._shapes:
            captured = self._shapes[shape]
            if captured is None:
                captured = self._shapes[shape] = self._capture(leaves, structure)
            return self._replay(captured, leaves)
        loss = self._eager(leaves, structure)
        now = fingerprint(self.model, self.optimizer, self._outputs)
        if now != self._fingerprint:  # by this step: graphs of other shapes are of what was before
            if self.captured or now[:-1] != self._fingerprint[:-1]:
                self.reset()
            self._fingerprint = now
        if len(self._shapes) < self.max_graphs:
            self._shapes[shape] = None
        else:
            self._warn(
                f"batches of more than max_graphs={self.max_graphs} shapes: steps of the others run eagerly, which is "
                "slower; pad the batches, or raise max_graphs",
                stacklevel=4,
            )
        return loss

    def _eager(self, leaves: list[Any], structure: pytree.TreeSpec) -> Tensor:
        moved = [x.detach().to(self.device, non_blocking=True) if isinstance(x, Tensor) else x for x in leaves]
        # What was made in inference mode cannot be part of a backward: an ordinary copy can.
        moved = [x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in moved]
        with _uncached_autocast() if self._captures else nullcontext():
            loss, self._norm = self._run(pytree.tree_unflatten(moved, structure))
        return loss.clone()

    def _replay(self, captured: _Shape, leaves: list[Any]) -> Tensor:
        for static, x in zip(captured.inputs, leaves, strict=True):
            if isinstance(x, Tensor):
                static.copy_(x.detach(), non_blocking=True)
        captured.step.graph.replay()
        torch.autograd.graph.increment_version(captured.written)  # as writes do that are no replays
        loss, self._norm = captured.step.result
        self._changes = 0
        return loss.clone()

    def _capture(self, leaves: list[Any], structure: pytree.TreeSpec) -> _Shape:
        """A graph of the step on batches like this one; runs nothing."""
        inputs = [torch.empty_like(x, device=self.device) if isinstance(x, Tensor) else x for x in leaves]
        batch = pytree.tree_unflatten(inputs, structure)
        _free_captured_loops()
        pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None
        cut_spent_graphs(self.model.modules())  # first, as what is to be restored is kept
        with restored_on_failure(self.model, self.optimizer):
            attributes = tensor_attributes(self.model.modules())
            self._fingerprint[-1] = {key: x for key, x in attributes.items() if key not in self._outputs}
            step = capture(lambda: self._run(batch), self.device, pool)
            self._leave_out(attributes, tensor_attributes(self.model.modules()))
            changed = self._changed()
            if changed:
                raise CaptureError(
                    f"the step itself changes {changed}, which its replays would not do; keep what changes in a tensor "
                    "on the device and change it in place"
                )
        self._pool = pool
        updated = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        buffers = [x for x in self.model.buffers() if not x.is_inference()]
        return _Shape(inputs, [*updated, *buffers], step)

    def _run(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The step: loss and gradient norm. Begins and ends with no gradients, also where it fails."""
        parameters = self._parameters()
        losses: list[Tensor] = []
        norm: Tensor | None = None
        try:
            _drop_gradients(parameters)
            for part in self._parts(batch):
                with torch.autocast(self.device.type, self._autocast) if self._autocast else nullcontext():
                    loss = self._loss_fn(self.model, part)
                _check_loss(loss)
                (loss if self._accumulate == 1 else loss / self._accumulate).backward()
                losses.append(loss.detach())
            if self._max_norm is not None:
                norm = nn.utils.clip_grad_norm_(parameters, self._max_norm)
            self.optimizer.step()
        finally:
            _drop_gradients(parameters)
        return losses[0] if self._accumulate == 1 else torch.stack(losses).mean(), norm

    def _parts(self, batch: Any) -> Iterator[Any]:
        if self._accumulate == 1:
            yield batch
            return
        leaves, structure = pytree.tree_flatten(batch)
        for i in range(self._accumulate):
            parts = [x.tensor_split(self._accumulate)[i] if isinstance(x, Tensor) and x.dim() else x for x in leaves]
            yield pytree.tree_unflatten(parts, structure)

    def _parameters(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return list(dict.fromkeys([*self.model.parameters(), *(p for group in groups for p in group["params"])]))

    def _common_device(self) -> torch.device:
        devices = {p.device for p in self._parameters()}
        if len(devices) != 1:
            named = ", ".join(sorted(map(str, devices))) or "there are none"
            raise ValueError(f"parameters must be on one device, got {named}")
        return devices.pop()

    def _check_leaves(self, leaves: list[Any]) -> None:
        for x in leaves:
            if not isinstance(x, Tensor) and type(x) not in PLAIN_TYPES:
                raise TypeError(f"a batch holds tensors, numbers and strings, got {type(x).__name__}")
            if isinstance(x, Tensor) and x.dim() and x.shape[0] % self._accumulate:
                raise ValueError(
                    f"accumulate={self._accumulate} does not divide the first dimension of a tensor of the batch, "
                    f"of shape {tuple(x.shape)}"
                )

    def _follow_stream(self) -> None:
        """Steps share memory: on another stream than the latest one, this one waits for it."""
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
            inputs = [x for shape in self._shapes.values() if shape is not None for x in shape.inputs]
            for x in (*inputs, *self._rates):
                if isinstance(x, Tensor):
                    x.record_stream(stream)
        self._stream = stream

    @torch.no_grad()
    def _hold_learning_rates(self) -> None:
        """Every group's `lr` is the tensor that the graphs read, and holds what the group's `lr` was."""
        for i, group in enumerate(self.optimizer.param_groups):
            rate = group["lr"]
            if i == len(self._rates):
                fits = isinstance(rate, Tensor) and rate.device == self.device and rate.dtype == torch.float32
                held = rate if fits else torch.empty((), dtype=torch.float32, device=self.device)
                self._rates.append(held)
            held = self._rates[i]
            if rate is not held:
                if isinstance(rate, Tensor) and rate.device == self.device:
                    held.copy_(rate.reshape(held.shape))
                else:
                    held.fill_(float(rate))
                group["lr"] = held

    def _drop_what_is_stale(self) -> None:
        changed = self._changed() if self._fingerprint else None
        if changed is None:
            return
        self.reset()
        self._changes += 1
        if self._changes == RESTLESS:
            message = f"every step runs eagerly, as before each of the last {RESTLESS} something changed: {changed}"
            self._warn(message, stacklevel=5)

    def _leave_out(self, before: dict[Attribute, Any], after: dict[Attribute, Any]) -> None:
        """Compares no longer the attributes that the step itself has replaced."""
        self._outputs |= {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        for key in self._outputs:
            self._fingerprint[-1].pop(key, None)

    def _changed(self) -> str | None:
        """What changed since the latest eager step, in words."""
        now = fingerprint(self.model, self.optimizer, self._outputs)
        return difference(self._fingerprint, now, self.model, self.optimizer)

    def _warn(self, message: str, stacklevel: int) -> None:
        """Once; `stacklevel` is that of the caller of `step`."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=stacklevel)


def _check_capturable(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not group.get("capturable", True):
            raise ValueError(f"{name} keeps its step count on the host; construct it with capturable=True")
        if isinstance(optimizer, torch.optim.SGD) and not group["fused"]:
            raise ValueError(f"{name} takes its learning rate from the host; construct it with fused=True")


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        if isinstance(loss, Tensor) and loss.numel() == 1:
            got = "one that requires no gradient"
        raise ValueError(f"loss_fn must return a tensor of one element that requires a gradient, got {got}")


@contextmanager
def _uncached_autocast() -> Iterator[None]:
    """As in a capture: what is compiled now must not be compiled again there, for another setting."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _drop_gradients(parameters: list[Tensor]) -> None:
    for p in parameters:
        p.grad = None


def _free_captured_loops() -> None:
    """Frees the step loops that eager calls of the ops have captured, those of others in this process too, and waits
    for those that still run: a graph has its own memory for that."""
    if importlib.util.find_spec("triton") is None:  # without it, nothing has captured one
        return
    from ..ops.launch import free_captured_loops

    free_captured_loops()
