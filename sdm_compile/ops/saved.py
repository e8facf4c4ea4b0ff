"""What a saving forward keeps for its backward: the same tensors on every device, in one place and order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import accumulate_dtype
from .layout import ChunkFields, empty, num_steps
from .snapshot import empty_snapshot


class Saved(NamedTuple):
    """What a saving forward keeps for its backward, beside its inputs and a bank, see `bank_to_keep`.

    Which entries and groups a chunk has follows from its slots: the backward finds that again.

    Ops pass it `flattened`: tracing asks of every dimension whether it is 1, so with one of size `steps` a graph would
    serve either one step or several, not both.
    """

    retrieved: Tensor  # [steps, P, C, D], flattened [steps * P * C, D]
    snapshot: Tensor  # [steps * P * E, *], undefined where there is no group
    scales: Tensor  # [steps * P * E] or [0]
    X: Tensor  # [steps, P, C, C]
    QX: Tensor  # [steps, P, C, C]
    k_eff: Tensor  # [steps, P, C, W]
    q_w: Tensor  # [steps, P, C, R]
    write_w: Tensor  # [steps, P, C, W]
    A: Tensor  # [steps, P, C, C]
    group_decay: Tensor  # [steps, P, E], flattened [steps * P * E]
    # Of versions, see `row_versions_kernels`; else [0].
    previous: Tensor  # [steps * P * E] int32, the row of the snapshot that a group's row was made from; -1: the bank's
    latest: Tensor  # [num_slots] int32, the row of the snapshot with a slot's final version; -1: never written, as the
    # forward has all slots at first

    @property
    def has_versions(self) -> bool:
        """Whether the snapshot's rows are versions."""
        return self.latest.shape[0] > 0

    def flattened(self) -> Saved:
        """The same memory without a dimension of size `steps`."""
        rows = ("snapshot", "scales", "previous", "latest")
        return self._replace(**{name: x.flatten(0, 2) for name, x in self._asdict().items() if name not in rows})

    def unflattened(self, steps: int, streams: int, chunk_size: int, writes: int) -> Saved:
        """The inverse of `flattened`."""
        names = ("retrieved", "X", "QX", "k_eff", "q_w", "write_w", "A")
        sizes = dict.fromkeys(names, (steps, streams, chunk_size))
        sizes["group_decay"] = (steps, streams, chunk_size * writes)
        return self._replace(**{name: getattr(self, name).unflatten(0, size) for name, size in sizes.items()})


def no_versions(like: Tensor) -> dict[str, Tensor]:
    """What stands in `Saved` for versions where there are none."""
    return {name: like.new_empty(0, dtype=torch.int32) for name in ("previous", "latest")}


def empty_call_snapshot(memory: Tensor, k_idx: Tensor, chunk_size: int, mode: str) -> tuple[Tensor, Tensor]:
    streams, tokens, writes = k_idx.shape
    return empty_snapshot(num_steps(tokens, chunk_size) * streams * chunk_size * writes, memory, mode)


def empty_saved(
    memory: Tensor, k_idx: Tensor, q_idx: Tensor, chunk_size: int, mode: str, versions: bool = False
) -> Saved:
    """versions: what `keeps_versions` says of the call's bank, which `memory` may stand for."""
    streams, tokens, writes = k_idx.shape
    chunks = num_steps(tokens, chunk_size) * streams
    dtype = accumulate_dtype(memory.dtype)
    snapshot, scales = empty_call_snapshot(memory, k_idx, chunk_size, mode)
    numbers = (snapshot.shape[0], memory.shape[0]) if versions else (0, 0)

    def per_token(width: int) -> Tensor:
        return empty((chunks * chunk_size, width), memory, dtype)

    return Saved(
        retrieved=per_token(memory.shape[1]),
        snapshot=snapshot,
        scales=scales,
        X=per_token(chunk_size),
        QX=per_token(chunk_size),
        k_eff=per_token(writes),
        q_w=per_token(q_idx.shape[2]),
        write_w=per_token(writes),
        A=per_token(chunk_size),
        group_decay=empty((chunks * chunk_size * writes,), memory, dtype),
        previous=empty((numbers[0],), memory, torch.int32),
        latest=empty((numbers[1],), memory, torch.int32),
    )


def saved_of(retrieved: Tensor, snapshot: Tensor, scales: Tensor, X: Tensor, QX: Tensor, fields: ChunkFields) -> Saved:
    kept = {name: getattr(fields, name) for name in Saved._fields if name in ChunkFields._fields}
    return Saved(retrieved, snapshot, scales, X, QX, **kept, **no_versions(snapshot)).flattened()
