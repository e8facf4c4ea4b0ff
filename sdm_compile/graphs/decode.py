"""One decode step as a CUDA graph, for any callable: `DecodeGraph`.

step = DecodeGraph(model, state, tokens)      captured here; tokens [B, 1] is an example
logits, state = step(tokens)                  copies in and replays; the state is advanced in place
logits, state = step(tokens, entries=chosen)  batch row b uses entry chosen[b] of the state
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .capture import Watch, capture, numeric_settings, refuse_while_capturing, restored, warm_up
from .entries import chooses
from .reach import Reached

PADDING = -1  # the entry of a batch row that is none


class DecodeGraph:
    """A decode step, captured for a few batch sizes and replayed. Where there is no CUDA device, `fn` runs each time.

    A smaller batch runs in the next larger size: inputs are padded with zeros, and entries with -1. Construction runs
    `fn` a few times for every size, with gradients off like every call; state, `mutates` and random numbers are then
    as they were. To PyTorch the state was written to all the same, so that a draft of before is refused by its commit:
    make the graph first, and draft then. A call copies its inputs, replays on the current stream, and waits for
    nothing.

    What a graph relies on is looked at before every replay. It is captured again, which takes as long as construction,
    where a tensor of the state or of `mutates` has moved, a parameter, buffer or submodule was replaced, moved or
    added, a module's `training` changed, or the settings did: autocast, the precision of matmuls, deterministic
    kernels. It is captured again, too, where a module, tensor or function that `fn` refers to by name was replaced: in
    its closure or globals, in attributes of objects there or of the one that it is a method of, in lists and dicts
    among them, in a `functools.partial`, and likewise for the methods and functions that it names (global functions
    that those name only in the same file). Not noticed is what it reaches by `getattr`, as an attribute of an imported
    module, or as a plain object that a module holds. Other Python values that `fn` reads are those of the capture.

    A capture clears cuBLAS's workspaces on every stream of the process. A CUDA graph of your own that was captured
    earlier, on a stream that had a workspace already, goes on to use its freed memory: capture such graphs on a stream
    on which no matmul has run.

    Args:
        fn: `fn(*inputs, state)` does one step, advances the state by writing into its tensors, and returns a pytree. A
            model or layer of this package fits as it is. Nothing takes over a new state that is merely returned. On
            CUDA it must do the same work every time, and not wait for the device.
        state: a pytree of tensors and objects, used where it is. Of an object with a method `at(entries)`, such as an
            SDMState or LMState, `fn` gets `object.at(entries)`, entries [size] int64; an entry of -1 is a row that
            reads zeros and writes nothing. A state with tensors outside such objects allows one batch size only.
        example_inputs: tensors [B, ...].
        batch_sizes: which sizes to capture; None: B alone. All of them share one memory pool.
        mutates: tensors that the step changes besides the state, such as buffers of a module.
        pooled: False gives `fn` the state as it is, without entries: one batch size, and a few kernels less per step;
            construction then copies the state and restores it, where otherwise nothing is written.
    Attributes:
        batch_sizes: the sizes, ascending.
        device: where it runs.
    Raises:
        CaptureError: `fn` cannot be captured (the cause says why), or the current stream is being captured. Whatever
            `fn` raises itself when it first runs comes as it is. Everything is usable as before, in both cases.
        ValueError: the arguments do not fit together. TypeError: one is not a tensor.
    Note: one call at a time; threads wait for each other. Construction waits for the device.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        state: Any,
        *example_inputs: Tensor,
        batch_sizes: Sequence[int] | None = None,
        mutates: Iterable[Tensor] = (),
        pooled: bool = True,
    ) -> None:
        self._fn, self._state, self._mutates = fn, state, list(mutates)
        self._lock = threading.Lock()
        _check_tensors("example input", example_inputs)
        _check_tensors("mutates", self._mutates)
        if not example_inputs:
            raise ValueError("a decode step needs at least one input, a tensor [B, ...], to know its batch by")
        first = example_inputs[0]
        for i, x in enumerate(example_inputs):
            if x.dim() == 0 or x.shape[0] == 0 or x.shape[0] != first.shape[0] or x.device != first.device:
                raise ValueError(
                    f"example input {i} has shape {list(x.shape)} on {x.device}; expected [B, ...] with the first "
                    f"one's B, at least 1, on its device: it has shape {list(first.shape)} on {first.device}"
                )
        self.device = first.device
        self._graphed = self.device.type == "cuda"
        self._examples = [x.detach().clone() for x in example_inputs]
        parts = [part for part in pytree.tree_leaves(state, is_leaf=chooses) if chooses(part)]
        self._choosing = pooled and bool(parts)
        if self._choosing and any(getattr(part, "entries", None) is not None for part in parts):
            raise ValueError(
                "the state is one of chosen entries, but a DecodeGraph chooses them: make it from the whole, "
                "state.at(None), and give `entries` with each call; or pooled=False, for these alone"
            )
        self._can_pad = not self._plain_tensors()
        self.batch_sizes = self._sizes(batch_sizes, first.shape[0])
        self._size_for = {rows: size for size in reversed(self.batch_sizes) for rows in range(1, size + 1)}
        self._steps: dict[int, _Step] = {}
        self._watched: _Watched | None = None
        self._written: list[Tensor] = []  # of the state and `mutates`, what has a version
        self._forms = self._watch().state.forms()
        for form in self._forms:
            if self._graphed and form.device != self.device:
                raise ValueError(f"{form}: expected it where the inputs are, on {self.device}")
        with self._lock, torch.no_grad():
            self._refuse_while_capturing()
            self._turn = _Turn(self.device) if self._graphed else None
            self._build()

    def __call__(self, *inputs: Tensor, entries: Tensor | None = None) -> Any:
        """Runs one step.

        Args:
            inputs: as the example's, with any batch B up to the largest size.
            entries: [B] int64 on the inputs' device: the entry of the state that each batch row uses, none twice; a
                negative one is padding; so is one beyond the state's capacity on CUDA, which the CPU refuses. None: 0
                to B - 1.
        Returns:
            What `fn` returned. Tensors [size, ...] are cut to their first B rows, by themselves and in tuples, lists
            and dicts; what other objects hold, such as a draft's pending rows, stays whole. On CUDA all are views of
            memory that the next call writes: `clone()` what is to outlast it. The state, and anything that is part
            of it, comes back as the caller's own object. Anything else on CUDA is what it was at the capture.
        Raises:
            ValueError: inputs, entries, or a tensor of the state differ from those of the construction in shape, dtype
                or device. TypeError: an input is not a tensor. CaptureError: the current stream is being captured, or
                it had to be captured again and cannot.
        """
        with self._lock, torch.no_grad():
            rows = self._check(inputs, entries)
            self._refuse_while_capturing()
            if self._turn is not None:
                self._turn.begin(self._steps.values())
            if self._watched is None or self._watched.changed():
                self._build()
            step = self._steps[self._size_for[rows]]
            step.fill(inputs, entries, rows)
            if step.graph is None:
                step.keep(self._fn(*step.inputs, step.state))
            else:
                step.graph.replay()
                torch.autograd.graph.increment_version(self._written)  # as writes do that are no replays
            if self._turn is not None:
                self._turn.end()
            return step.outputs(rows)

    def _sizes(self, wanted: Sequence[int] | None, batch: int) -> tuple[int, ...]:
        if wanted is not None and not isinstance(wanted, Iterable):
            raise TypeError(f"batch_sizes is {wanted!r}; expected ints, such as (1, {batch})")
        sizes = (batch,) if wanted is None else tuple(sorted(set(wanted)))
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"batch_sizes are {wanted}; expected at least one int above 0")
        if not self._can_pad and sizes != (batch,):
            raise ValueError(
                f"batch_sizes are {wanted}; the state holds tensors that get no entries (outside of any object with "
                f"`at(entries)`, or not pooled) and cannot be padded: the only size is that of the example, {batch}"
            )
        return sizes

    def _check(self, inputs: tuple[Tensor, ...], entries: Tensor | None) -> int:
        """The batch of a call's arguments."""
        if len(inputs) != len(self._examples):
            raise ValueError(f"got {len(inputs)} inputs; expected {len(self._examples)}")
        _check_tensors("input", inputs)
        batch = inputs[0].shape[:1]
        for i, (x, example) in enumerate(zip(inputs, self._examples, strict=True)):
            expected = (batch + example.shape[1:], example.dtype, example.device)
            if (x.shape, x.dtype, x.device) != expected:
                raise ValueError(
                    f"input {i} has shape {list(x.shape)}, {x.dtype}, on {x.device}; expected "
                    f"{list(expected[0]) if batch else '[B, ...]'}, {example.dtype}, on {example.device}"
                )
        rows = batch[0]
        if rows not in self._size_for or not (self._can_pad or rows in self.batch_sizes):
            sizes = f"captured sizes: {', '.join(map(str, self.batch_sizes))}"
            why = "" if self._can_pad else "; the state's tensors cannot be padded"
            raise ValueError(f"the inputs have a batch of {rows}, for which there is no graph ({sizes}{why})")
        if entries is None:
            return rows
        if not self._choosing:
            raise ValueError("entries were given, but nothing in the state has a method `at(entries)`, or not pooled")
        if not isinstance(entries, Tensor):
            raise TypeError(
                f"entries is a {type(entries).__name__}; expected an int64 tensor [{rows}] on {self.device}"
            )
        if (entries.shape, entries.dtype, entries.device) != ((rows,), torch.int64, self.device):
            raise ValueError(
                f"entries have shape {list(entries.shape)}, {entries.dtype}, on {entries.device}; expected [{rows}], "
                f"torch.int64, on {self.device}"
            )
        return rows

    def _refuse_while_capturing(self) -> None:
        if self._graphed:
            refuse_while_capturing(self.device, "a DecodeGraph cannot be made or called")

    def _watch(self) -> _Watched:
        state = Watch({"state": self._state, "mutates": self._mutates}, layouts=True)
        if not self._graphed:
            return _Watched(state, Watch({}, layouts=False), None)
        return _Watched(state, Reached(self._fn), self.device.type)

    def _plain_tensors(self) -> list[Tensor]:
        """Those of the state that are in no object which gets entries."""
        parts = pytree.tree_leaves(self._state, is_leaf=chooses)
        plain = [part for part in parts if not (self._choosing and chooses(part))]
        return Watch({"state": plain}, layouts=True).tensors

    def _build(self) -> None:
        """Makes a step for every size, the largest first, so that the others fit into its memory."""
        watched = self._watch()
        self._refuse_other(watched)
        self._watched = None
        self._steps.clear()
        pool = torch.cuda.graph_pool_handle() if self._graphed else None
        with restored([*self._plain_tensors(), *self._mutates], self.device):
            for size in reversed(self.batch_sizes):
                step = _Step(size, self._examples, self._state, self._choosing)
                call = functools.partial(self._fn, *step.inputs, step.state)
                warm_up(call, self.device)
                if not watched.state.unchanged():
                    watched.state.put_back()
                    raise ValueError("fn put another tensor into the state; it must write into the one there: copy_()")
                if pool is not None:
                    captured = capture(call, self.device, pool)
                    step.graph = captured.graph
                    step.keep(captured.result)
                self._steps[size] = step
        self._watched = self._watch()  # what the first run of `fn` made is part of it
        self._written = [x for x in self._watched.state.tensors if not x.is_inference()]
        if self._turn is not None:
            self._turn.end()

    def _refuse_other(self, watched: _Watched) -> None:
        """Raises where what there is now cannot be captured in place of what was captured before."""
        forms = watched.state.forms()
        for was, now in zip(self._forms, forms, strict=False):
            if was != now:
                raise ValueError(f"{was} became {now}: make a new DecodeGraph for it")
        if len(forms) != len(self._forms):
            raise ValueError(f"the state held {len(self._forms)} tensors, and now {len(forms)}: make a new DecodeGraph")
        if self._watched is not None:
            gone = self._watched.found_in_modules(self._mutates) - watched.found_in_modules(self._mutates)
            if gone:
                raise ValueError(
                    f"{', '.join(sorted(gone))} of the module was replaced, and is in `mutates`: make a new DecodeGraph"
                )


class _Watched:
    """What a graph relies on."""

    def __init__(self, state: Watch, reached: Watch, device_type: str | None) -> None:
        self.state, self._model, self._device_type = state, reached, device_type
        self._settings = self._settings_now()

    def _settings_now(self) -> tuple[object, ...]:
        return () if self._device_type is None else numeric_settings(self._device_type)

    def changed(self) -> bool:
        return not (self.state.unchanged() and self._model.unchanged() and (self._settings == self._settings_now()))

    def found_in_modules(self, tensors: Sequence[Tensor]) -> set[str]:
        """The names of those of the tensors that a module holds."""
        ids = set(map(id, tensors))
        return {name for name, x in zip(self._model.names, self._model.tensors, strict=True) if id(x) in ids}


class _Step:
    """One batch size: its buffers, the state at its entries, its graph, and what the graph returned."""

    def __init__(self, size: int, examples: Sequence[Tensor], state: Any, choosing: bool) -> None:
        self.size = size
        self.graph: torch.cuda.CUDAGraph | None = None
        self._filled = min(size, examples[0].shape[0])  # rows of the inputs that may not be zero
        self._chosen = 0  # rows of the entries that may not be padding
        self._in_order = False  # whether those are 0, 1, ..
        with torch.inference_mode(False), torch.no_grad():  # calls in any mode write to these
            self.inputs = [x.new_zeros(size, *x.shape[1:]) for x in examples]
            for buffer, x in zip(self.inputs, examples, strict=True):
                buffer[: self._filled].copy_(x[: self._filled])
            self._order = torch.arange(size, device=examples[0].device)
            self._entries = torch.full_like(self._order, PADDING)
        self.state = state
        if choosing:
            self.state = pytree.tree_map(
                lambda part: part.at(self._entries) if chooses(part) else part, state, is_leaf=chooses
            )
        self._owned: dict[int, Any] = {}  # by id, what `fn` gets as the state or a part of it: the caller's own object
        _match(self.state, state, self._owned)

    def buffers(self) -> list[Tensor]:
        return [*self.inputs, self._order, self._entries]

    def fill(self, inputs: Sequence[Tensor], entries: Tensor | None, rows: int) -> None:
        """Puts a call's arguments into the buffers; the rows behind them are zeros and padding."""
        for buffer, x in zip(self.inputs, inputs, strict=True):
            if rows < self._filled:
                buffer[rows : self._filled].zero_()
            (buffer if rows == self.size else buffer[:rows]).copy_(x)
        self._filled = rows
        if entries is None and self._in_order and rows == self._chosen:
            return
        if rows < self._chosen:
            self._entries[rows : self._chosen].fill_(PADDING)
        self._entries[:rows].copy_(self._order[:rows] if entries is None else entries)
        self._chosen, self._in_order = rows, entries is None

    def keep(self, result: Any) -> None:
        """Takes what `fn` returned, for `outputs`."""
        owned = set(self._owned)  # ids alone: `tree_flatten` leaves a cycle of references behind
        leaves, self._spec = pytree.tree_flatten(
            result, is_leaf=lambda x: id(x) in owned or not isinstance(x, tuple | list | dict)
        )
        self._leaves = [self._owned.get(id(x), x) for x in leaves]
        self._cuts: dict[int, list[Any]] = {self.size: self._leaves}

    def outputs(self, rows: int) -> Any:
        """The result, cut to so many rows."""
        if rows not in self._cuts:
            self._cuts[rows] = [x[:rows] if self._has_rows(x) else x for x in self._leaves]
        return pytree.tree_unflatten(self._cuts[rows], self._spec)

    def _has_rows(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == self.size and id(x) not in self._owned


class _Turn:
    """Puts calls that come on different streams one behind the other on the device."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._ended = torch.cuda.Event()
        self._begin()

    def _begin(self) -> None:
        self._handle = torch._C._cuda_getCurrentRawStream(self._index)
        self._stream = torch.cuda.current_stream(self._index)

    def begin(self, steps: Iterable[_Step]) -> None:
        """Comes to the current stream with these steps, behind what was there before."""
        if torch._C._cuda_getCurrentRawStream(self._index) == self._handle:
            return
        self._begin()
        self._stream.wait_event(self._ended)
        for step in steps:
            for buffer in step.buffers():
                buffer.record_stream(self._stream)

    def end(self) -> None:
        self._ended.record(self._stream)


def _match(view: Any, own: Any, found: dict[int, Any]) -> None:
    """Collects, by the id of each part of a view of the caller's state, the caller's own object in its place."""
    if type(view) is not type(own) or id(view) in found or (isinstance(view, Tensor) and view is not own):
        return
    if isinstance(view, dict):
        pairs = [(view[key], own[key]) for key in view.keys() & own.keys()]
    elif isinstance(view, list | tuple):
        pairs = list(zip(view, own, strict=False))
    elif isinstance(view, Tensor):
        pairs = []
    elif hasattr(view, "__dict__") and not callable(view):
        pairs = [(vars(view)[key], vars(own)[key]) for key in vars(view).keys() & vars(own).keys()]
    else:
        return
    found[id(view)] = own
    for pair in pairs:
        _match(*pair, found)


def _check_tensors(what: str, values: Sequence[object]) -> None:
    for i, x in enumerate(values):
        if not isinstance(x, Tensor):
            raise TypeError(f"{what} {i} is a {type(x).__name__}; expected a tensor")
