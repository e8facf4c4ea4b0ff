"""The shapes that stages agree on: chunks, steps, slot groups.

A call's P streams of T tokens become `steps` steps of P chunks of C tokens; a staged tensor is [steps, P, C, *] and a
step's slice of it [P, C, *]. A chunk has E = C * W write entries; entry i * W + w is write w of token i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def num_steps(tokens: int, chunk_size: int) -> int:
    return (tokens + chunk_size - 1) // chunk_size


def empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Fresh contiguous memory beside `like`, whatever the strides of `like`."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def empty_gradients(
    likes: Sequence[Tensor], mask: Sequence[bool], dtypes: Sequence[torch.dtype] | None = None
) -> tuple[Tensor, ...]:
    """A backward op's outputs: one per float input, an empty tensor where `mask` says that none is wanted."""
    dtypes = dtypes or [like.dtype for like in likes]
    return tuple(
        empty(tuple(like.shape) if wanted else (0,), like, dtype)
        for like, wanted, dtype in zip(likes, mask, dtypes, strict=True)
    )


def wanted_gradients(grads: Sequence[Tensor], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """A backward op's outputs as autograd takes them: None where nothing was wanted."""
    return tuple(grad if wanted else None for grad, wanted in zip(grads, mask, strict=True))


class Staged(NamedTuple):
    """The inputs as time-major chunks, cleaned (see `staging`): ids int32, weights and v in the bank's dtype."""

    k_idx: Tensor  # [steps, P, C, W] int32, distinct within a token, -1 for no slot
    k_val: Tensor  # [steps, P, C, W] bank dtype, 0 where there is no slot
    v: Tensor  # [steps, P, C, D] bank dtype
    beta: Tensor  # [steps, P, C, 1] accumulate dtype
    g: Tensor  # [steps, P, C, 1 or W] accumulate dtype
    q_idx: Tensor  # [steps, P, C, R] int32
    q_val: Tensor  # [steps, P, C, R] bank dtype


def empty_staged(
    lead: tuple[int, int, int],
    writes: int,
    reads: int,
    gates: int,
    head_dim: int,
    like: Tensor,
    dtype: torch.dtype,
    accumulate: torch.dtype,
) -> Staged:
    """Fresh `Staged` for `lead` = (steps, P, C) and a bank of `dtype`."""
    return Staged(
        k_idx=empty((*lead, writes), like, torch.int32),
        k_val=empty((*lead, writes), like, dtype),
        v=empty((*lead, head_dim), like, dtype),
        beta=empty((*lead, 1), like, accumulate),
        g=empty((*lead, gates), like, accumulate),
        q_idx=empty((*lead, reads), like, torch.int32),
        q_val=empty((*lead, reads), like, dtype),
    )


class ChunkFields(NamedTuple):
    """What Phase 1 makes of every chunk; float fields in the accumulate dtype.

    A chunk's groups are numbered in ascending slot order; unused ordinals are empty groups with slot -1 and decay 1.
    """

    k_eff: Tensor  # [steps, P, C, W] k_val exp(L)
    q_w: Tensor  # [steps, P, C, R] q_val exp(Lq)
    write_w: Tensor  # [steps, P, C, W] k_val exp(Lt - L)
    A: Tensor  # [steps, P, C, C] strictly lower
    QK: Tensor  # [steps, P, C, C] lower
    group_decay: Tensor  # [steps, P, E] exp(Lt) of each group
    order: Tensor  # [steps, P, E] int32 entries by (slot, token); entries without a slot are -1, last
    group_start: Tensor  # [steps, P, E + 1] int32, group o is order[start[o] : start[o + 1]]
    group_slot: Tensor  # [steps, P, E] int32 bank row of each group


class WriteGroups(NamedTuple):
    """The fields that follow from the write slots alone."""

    order: Tensor  # [steps, P, E] int32
    group_start: Tensor  # [steps, P, E + 1] int32
    group_slot: Tensor  # [steps, P, E] int32


class StepGroups(NamedTuple):
    """One step's slice of the fields that the write reads."""

    write_w: Tensor  # [P, C, W]
    group_decay: Tensor  # [P, E]
    order: Tensor  # [P, E]
    group_start: Tensor  # [P, E + 1]
    group_slot: Tensor  # [P, E]


def empty_chunk_fields(
    lead: tuple[int, int], chunk: int, writes: int, reads: int, like: Tensor, dtype: torch.dtype
) -> ChunkFields:
    """Fresh `ChunkFields` for `lead` = (steps, P), float fields in `dtype`."""
    entries = chunk * writes
    return ChunkFields(
        k_eff=empty((*lead, chunk, writes), like, dtype),
        q_w=empty((*lead, chunk, reads), like, dtype),
        write_w=empty((*lead, chunk, writes), like, dtype),
        A=empty((*lead, chunk, chunk), like, dtype),
        QK=empty((*lead, chunk, chunk), like, dtype),
        group_decay=empty((*lead, entries), like, dtype),
        order=empty((*lead, entries), like, torch.int32),
        group_start=empty((*lead, entries + 1), like, torch.int32),
        group_slot=empty((*lead, entries), like, torch.int32),
    )
