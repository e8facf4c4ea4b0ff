"""A pool of states for serving: requests come and go, and each holds one entry of a state that never moves.

pool = StatePool(model.init_state(32), model.init_state(1))
entry = pool.acquire()                        rows of the entry = rows of the initial state
model(tokens, pool.at([entry]))               with grad mode off: advances that entry alone, in place
other = pool.fork(entry)                      a second request goes on from the same prefix
kept = pool.get(entry)                        a copy: model(tokens, kept), torch.save(kept, path), kept.to("cpu")
pool.release(entry)
entry = pool.put(kept)                        goes on where it was, here or in another pool

Which entries are in use is known to the host; their rows are copied on the device, in place and without waiting, so
that captured graphs which hold the addresses go on to work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .entries import chooses

State = TypeVar("State")


class StatePool(Generic[State]):
    """Entries of a state, handed out, copied and taken back. Every error is raised before anything is written.

    Copies run on the current stream, like the calls that advance the state. Calls on one pool come one after the other,
    on the device too, whatever their entries: a call may write a whole tensor anew, such as a language model's tails.
    A pool is not for several threads at once.

    Args:
        state: a pytree of contiguous tensors, each of which consists of `capacity` equal parts along its first
            dimension, one per entry: `init_state(capacity)` of a layer or model. Used in place.
        initial: the same for one entry, such as `init_state(1)`: what an entry starts from. The pool keeps a copy.
            An LMState of more sequences is refused; an SDMState does not tell how many it has.
    Attributes:
        state: the whole of it, outside the autograd graph; the tensors stay at their addresses.
        capacity: the number of entries.
    Raises:
        ValueError: the two do not fit together, or the state is already one of chosen entries.
    """

    def __init__(self, state: State, initial: State) -> None:
        if _entries((state, initial)):
            raise ValueError("the state is one of chosen entries; a pool is made from the whole: state.at(None)")
        self.capacity = _capacity(state, initial)
        self.state: State = pytree.tree_map(torch.detach, state)
        self._leaves: list[Tensor]
        self._leaves, self._spec = pytree.tree_flatten(self.state)
        with torch.inference_mode(False), torch.no_grad():
            self._initial: list[Tensor] = [leaf.clone() for leaf in pytree.tree_leaves(initial)]
        self._held: set[int] = set()

    @property
    def held(self) -> tuple[int, ...]:
        """The entries in use, ascending."""
        return tuple(sorted(self._held))

    def at(self, entries: Sequence[int] | Tensor) -> State:
        """The state of a batch whose rows use these entries, sharing the pool's memory.

        With grad mode off alone: a call with it on leaves its state as it was, and would return a copy of the pool.

        Args:
            entries: [B], see `entries`; or an int64 tensor on the state's device, which is taken as it is: nothing
                looks at its values, and it may be changed in place between calls or replays.
        Raises:
            RuntimeError: grad mode is on. ValueError: an int that is not in use, or twice the same. TypeError: the
            state holds a tensor that is not part of an SDMState, LMState or other object with `at(entries)`.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "pool.at() was called with grad mode on, in which a call leaves the pool as it is: serve under "
                "torch.no_grad() or torch.inference_mode(); for gradients, use pool.state.at(entries)"
            )
        chosen = entries if isinstance(entries, Tensor) else self.entries(entries)

        def choose(part: Any) -> Any:
            if not chooses(part):
                raise TypeError(f"the state holds a {type(part).__name__} outside any object with `at(entries)`")
            return part.at(chosen)

        return pytree.tree_map(choose, self.state, is_leaf=chooses)

    def entries(self, entries: Sequence[int]) -> Tensor:
        """These entries [B], checked, as a DecodeGraph of the pool's state takes them: int64 on the state's device.

        Args:
            entries: in use, none twice; negative ones are padding. They are copied to the device, which waits for it.
        Raises:
            ValueError: one that is not in use, or twice the same. TypeError: no sequence.
        """
        if not isinstance(entries, Sequence):
            raise TypeError(f"entries is {entries!r}; expected one for each row of the batch, such as [0]")
        real = [entry for entry in entries if not (type(entry) is int and entry < 0)]
        self._check_held(*real)
        if len(set(real)) < len(real):
            raise ValueError(f"entries are {list(entries)}; two rows of a batch cannot use the same one")
        return torch.tensor(entries, dtype=torch.int64, device=self._leaves[0].device)

    def acquire(self) -> int:
        """Takes the first free entry, and gives it the initial rows.

        Raises:
            RuntimeError: there is none.
        """
        entry = self._free()
        self._store(entry, self._initial)
        self._held.add(entry)
        return entry

    def release(self, entry: int) -> None:
        """Gives an entry back. Its rows stay as they are until it is taken again.

        Raises:
            ValueError: it is not in use.
        """
        self._check_held(entry)
        self._held.remove(entry)

    def reset(self, *entries: int) -> None:
        """Puts the initial rows back.

        Raises:
            ValueError: an entry that is not in use.
        """
        self._check_held(*entries)
        for entry in entries:
            self._store(entry, self._initial)

    def copy(self, src: int, dst: int) -> None:
        """The rows of `dst` become those of `src`.

        Raises:
            ValueError: one of the two is not in use.
        """
        self._check_held(src, dst)
        self._store(dst, self._load(src))

    def fork(self, src: int) -> int:
        """Takes the first free entry, and gives it the rows of `src`: two requests with one prefix, or two beams.

        Raises:
            ValueError: `src` is not in use. RuntimeError: there is no free entry.
        """
        self._check_held(src)
        entry = self._free()
        self._store(entry, self._load(src))
        self._held.add(entry)
        return entry

    def get(self, entry: int) -> State:
        """What an entry holds, as a state of one sequence: a copy, outside the autograd graph, that calls advance as
        any other. The entry stays in use; to take a request out of the pool, release it then.

        Raises:
            ValueError: it is not in use.
        """
        self._check_held(entry)
        with torch.inference_mode(False), torch.no_grad():
            return pytree.tree_unflatten([part.clone() for part in self._load(entry)], self._spec)

    def put(self, state: State) -> int:
        """Takes the first free entry, and gives it a copy of this state's rows, with their bits.

        Args:
            state: of one sequence, such as `get` gave or a file held, or a model has advanced; or of one entry of this
                or another pool, as `at` gives. On any device: reading an entry's number, and copying from elsewhere,
                may wait.
        Raises:
            ValueError: it differs from this pool's entries in structure, shape or dtype. RuntimeError: there is no free
            entry.
        """
        parts = self._parts(state)
        entry = self._free()
        self._store(entry, parts)
        self._held.add(entry)
        return entry

    def _parts(self, state: Any) -> list[Tensor]:
        """The tensors of a state that fits into an entry."""
        chosen = sorted({entry for entries in _entries(state) for entry in entries.flatten().tolist()})
        if chosen:
            if len(chosen) > 1 or chosen[0] < 0:
                raise ValueError(f"the state is of the entries {chosen}; expected that of one sequence")
            state = pytree.tree_map(lambda part: part.at(None) if chooses(part) else part, state, is_leaf=chooses)
        parts, spec = pytree.tree_flatten(state)
        if spec != self._spec:
            raise ValueError(f"the state's structure is {spec}; expected the pool's, {self._spec}")
        for i, (part, initial) in enumerate(zip(parts, self._initial, strict=True)):
            if not isinstance(part, Tensor) or part.is_meta or part.layout is not torch.strided:
                kind = f"{part.layout} on {part.device}" if isinstance(part, Tensor) else type(part).__name__
                raise ValueError(f"leaf {i} of the state is a {kind}; expected a tensor of memory of its own")
            if chosen and part.dim() and chosen[0] < part.shape[0] // initial.shape[0]:
                part = parts[i] = part.narrow(0, chosen[0] * initial.shape[0], initial.shape[0])
            if (part.shape, part.dtype) != (initial.shape, initial.dtype):
                raise ValueError(
                    f"tensor {i} of the state has shape {tuple(part.shape)} and dtype {part.dtype}; an entry of this "
                    f"pool takes {tuple(initial.shape)} and {initial.dtype}, those of the initial state"
                )
        return parts

    def _free(self) -> int:
        if len(self._held) == self.capacity:
            raise RuntimeError(f"all {self.capacity} entries are in use; release one, or make a larger pool")
        return next(entry for entry in range(self.capacity) if entry not in self._held)

    def _check_held(self, *entries: int) -> None:
        for entry in entries:
            if type(entry) is not int or not 0 <= entry < self.capacity:
                raise ValueError(f"entry is {entry!r}; the pool's are the ints 0 to {self.capacity - 1}")
            if entry not in self._held:
                raise ValueError(f"entry {entry} is not in use; in use are {list(self.held)}")

    def _load(self, entry: int) -> list[Tensor]:
        """The entry's part of every tensor, as views."""
        rows = [initial.shape[0] for initial in self._initial]
        return [leaf.narrow(0, entry * n, n) for leaf, n in zip(self._leaves, rows, strict=True)]

    @torch.no_grad()
    def _store(self, entry: int, parts: list[Tensor]) -> None:
        for kept, part in zip(self._load(entry), parts, strict=True):
            kept.copy_(part)


def _entries(state: Any) -> list[Tensor]:
    """Those that its parts were given."""
    parts = pytree.tree_leaves(state, is_leaf=chooses)
    return [part.entries for part in parts if getattr(part, "entries", None) is not None]


def _capacity(state: Any, initial: Any) -> int:
    """How many times `initial` goes into `state`, the same for every tensor."""
    leaves, spec = pytree.tree_flatten(state)
    parts, part_spec = pytree.tree_flatten(initial)
    if spec != part_spec:
        raise ValueError(f"state and initial differ in structure: {spec} and {part_spec}")
    capacities = set()
    for i, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
        if not isinstance(leaf, Tensor) or not isinstance(part, Tensor):
            raise ValueError(f"leaf {i} of the state is a {type(leaf).__name__}; a pool's state holds tensors alone")
        if (leaf.dtype, leaf.device) != (part.dtype, part.device):
            raise ValueError(
                f"tensor {i} of the state is {leaf.dtype} on {leaf.device}; initial's {part.dtype} on {part.device}"
            )
        shapes = f"tensor {i} of the state has shape {tuple(leaf.shape)}, initial's {tuple(part.shape)}"
        if not leaf.dim() or leaf.shape[1:] != part.shape[1:] or not part.shape[0] or leaf.shape[0] % part.shape[0]:
            raise ValueError(f"{shapes}: expected a multiple of its first dimension, and the same others")
        if not leaf.is_contiguous():
            raise ValueError(f"tensor {i} of the state has strides {leaf.stride()}; a pool needs it contiguous")
        capacities.add(leaf.shape[0] // part.shape[0])
    for part in pytree.tree_leaves(initial, is_leaf=chooses):
        if getattr(part, "sequences", None) not in (None, 1):
            raise ValueError(f"initial is a state of {part.sequences} sequences; expected one, as init_state(1) gives")
    if len(capacities) != 1 or 0 in capacities:
        raise ValueError(f"the state's tensors have room for {sorted(capacities)} entries; expected one number above 0")
    return int(capacities.pop())
