"""Inputs of the public write/read and decode calls: one list of named cases, made in any dtype from a seed.

And settings of layers, which between them take every path through one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """The positional arguments of the public calls."""

    memory: Tensor
    k_idx: Tensor
    k_val: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    q_idx: Tensor
    q_val: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.to(dtype) if x.is_floating_point() else x for x in self))

    def clone(self) -> Inputs:
        return Inputs(*(x.clone() for x in self))

    def requiring_grad(self, *names: str) -> Inputs:
        """Fresh leaves, of which those named (all float ones, where none is named) require a gradient."""
        leaves = Inputs(*(x.detach().clone() for x in self))
        for name in names or FLOATS:
            getattr(leaves, name).requires_grad_()
        return leaves

    def floats(self) -> list[Tensor]:
        return [getattr(self, name) for name in FLOATS]

    def tokens(self, start: int, stop: int) -> Inputs:
        """The tokens from start to stop of every stream."""
        return Inputs(self.memory, *(x[:, start:stop] for x in self[1:]))

    def stream(self, p: int) -> Inputs:
        """One stream alone, on the whole bank."""
        return Inputs(self.memory, *(x[p : p + 1] for x in self[1:]))


FLOATS = ("memory", "k_val", "v", "beta", "g", "q_val")


@dataclass(frozen=True)
class Case:
    """Sizes are mutually unequal wherever nothing else is said, so that no two can be mixed up unnoticed."""

    name: str
    streams: int = 2  # P
    tokens: int = 11  # T
    writes: int = 3  # W
    reads: int = 4  # R
    head_dim: int = 5  # D
    slots: int = 9  # S, per stream
    spare_slots: int = 1  # bank rows that no stream owns
    chunk_size: int = 4
    write_gates: bool = False  # g [P, T, W] instead of [P, T, 1]
    gate_shift: float = 0.0  # added to the log-decay, which is below zero otherwise
    erased: float = 0.0  # share of gates that are -inf
    no_slot: float = 0.0  # share of ids that are negative
    no_token: float = 0.0  # share of tokens whose write ids are all negative, and likewise of their read ids
    repeated: float = 0.0  # share of writes that repeat an earlier slot of their token
    signed: bool = False  # weights of either sign and unit length, and strengths from -1 to 2, not just 0 to 1
    id_dtype: torch.dtype = torch.int64

    def make(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        """The same numbers in every dtype, up to its rounding."""
        generator = torch.Generator().manual_seed(seed)
        lead = (self.streams, self.tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, dtype=torch.float64)

        def ids(width: int) -> Tensor:
            order = uniform(*lead, max(width, self.slots)).argsort(-1)[..., :width] % self.slots
            ids = order + self.slots * torch.arange(self.streams)[:, None, None]
            hidden = (uniform(*lead, width) < self.no_slot) | (uniform(*lead, 1) < self.no_token)
            return ids.masked_fill(hidden, -1 - int(uniform(1) * 9))

        def weights(width: int) -> Tensor:
            x = normal(*lead, width)
            return torch.nn.functional.normalize(x, dim=-1) if self.signed else x.softmax(-1)

        k_idx = ids(self.writes)
        earlier = (uniform(*lead, self.writes) * torch.arange(self.writes)).long()
        k_idx = torch.where(uniform(*lead, self.writes) < self.repeated, k_idx.gather(-1, earlier), k_idx)
        gates = self.gate_shift - uniform(*lead, self.writes if self.write_gates else 1)
        strengths = uniform(*lead, 1)
        return Inputs(
            memory=normal(self.streams * self.slots + self.spare_slots, self.head_dim),
            k_idx=k_idx.to(self.id_dtype),
            k_val=weights(self.writes),
            v=normal(*lead, self.head_dim),
            beta=3 * strengths - 1 if self.signed else strengths,
            g=gates.masked_fill(uniform(*gates.shape) < self.erased, float("-inf")),
            q_idx=ids(self.reads).to(self.id_dtype),
            q_val=weights(self.reads),
        ).to(dtype)


RAGGED = Case("ragged")
REUSE = Case("heavy reuse", streams=2, tokens=37, slots=4, chunk_size=16)
SIGNED = Case("signed weights", signed=True)
TANGLED = Case(
    "everything at once",
    tokens=23,
    chunk_size=7,
    write_gates=True,
    erased=0.1,
    no_slot=0.2,
    no_token=0.2,
    repeated=0.3,
)
CASES = [
    RAGGED,
    Case("whole chunks", tokens=12),
    Case("one token", tokens=1),
    Case("one of everything", 1, 1, 1, 1, 1, 1, 0, 1),
    Case("one stream", streams=1, reads=2),
    Case("dense", writes=6, reads=6, slots=6, streams=3),
    Case("one slot", writes=1, slots=1, reads=3),
    REUSE,
    Case("gates per write", write_gates=True),
    Case("gates above zero", gate_shift=0.7),
    Case("gates above zero, per write", gate_shift=0.7, write_gates=True),
    Case("erased by token", erased=0.3),
    Case("erased by write", erased=0.3, write_gates=True),
    Case("always erased", erased=1.0),
    Case("erased in reused slots", tokens=37, slots=4, chunk_size=16, erased=0.2, write_gates=True),
    Case("some ids without a slot", no_slot=0.4),
    Case("some tokens without a slot", no_token=0.4),
    Case("no slot at all", no_slot=1.0),
    Case("repeated slots", repeated=0.5),
    Case("repeated slots, gates per write", repeated=0.5, write_gates=True),
    TANGLED,
    SIGNED,
    Case("int32 ids", id_dtype=torch.int32, no_slot=0.2),
    Case("chunks of one", chunk_size=1),
    Case("chunks of 3", chunk_size=3, streams=1, tokens=20),
    Case("chunks of 64", chunk_size=64, tokens=67, streams=1),
    Case("a chunk of 256", chunk_size=256, tokens=130, streams=1, slots=40),
    Case("wide", streams=1, writes=17, reads=9, slots=23, head_dim=33),
    Case("widest", streams=1, tokens=3, writes=256, reads=256, slots=257, head_dim=2),
]


SEVERAL = [RAGGED, REUSE, TANGLED, SIGNED]


def group_slots(k_idx: Tensor, chunk_size: int) -> Tensor:
    """[steps * P * C * W] the slot that each row of a compact snapshot stands for, -1 for none."""
    streams, tokens, writes = k_idx.shape
    steps, none = (tokens + chunk_size - 1) // chunk_size, 2**62
    ids = torch.nn.functional.pad(k_idx.long(), (0, 0, 0, steps * chunk_size - tokens), value=-1)
    ids = ids.view(streams, steps, chunk_size * writes).transpose(0, 1).sort(-1).values
    distinct = (ids >= 0) & torch.cat([ids[..., :1] >= 0, ids[..., 1:] > ids[..., :-1]], -1)
    slots = torch.where(distinct, ids, none).sort(-1).values
    return torch.where(slots == none, -1, slots).flatten()


def upstream(inputs: Inputs, seed: int = 1) -> list[Tensor]:
    """Gradients to arrive at the readings and at the final bank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*inputs.k_idx.shape[:2], inputs.memory.shape[1]), inputs.memory.shape)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(inputs.memory.dtype) for s in shapes]


def gradients(
    outputs: Sequence[Tensor], inputs: Inputs, given: Sequence[Tensor | None], retain_graph: bool = True
) -> list[Tensor]:
    """Gradients of every float input, zeros where nothing depends on one.

    `given` holds what arrives at each output; an output with None has no part in it.
    """
    pairs = [(out, grad) for out, grad in zip(outputs, given, strict=True) if grad is not None]
    outs, grads = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outs, inputs.floats(), grads, retain_graph=retain_graph, materialize_grads=True))


def values_and_gradients(call: Callable[..., Sequence[Tensor]], inputs: Inputs) -> list[Tensor]:
    """Readings, final bank and the joint gradients of every float input of `call(*inputs)`."""
    inputs = inputs.requiring_grad()
    outputs = call(*inputs)
    values = [out.detach() for out in outputs]
    return values + gradients(outputs, inputs, upstream(inputs), retain_graph=False)

LAYER_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "all": {
        "normalize_readings": True,
        "output_gate": True,
        "query_batchnorm": True,
        "key_weighted_decay": True,
        "read_act": "l2_normalize",
    },
    "one head, zero memory": {"num_heads": 1, "backprop_on_memory": False},
}
