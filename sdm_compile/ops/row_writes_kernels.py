"""Triton kernel that sorts each token's writes by what they mean for the bank's rows.

A row is written once per chunk, by the program of the token that writes it first. So of a token's writes come first
those whose rows other tokens write too, and then those whose rows are this token's alone; writes to rows that an
earlier token wrote, and entries without a slot, are left out. Each kind keeps its order. SPEC section 5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .layout import empty

ENTRIES = 128  # of a program of one warp


class RowWrites(NamedTuple):
    """The rows that each token writes; of a token's W places those behind its last row hold anything."""

    slot: Tensor  # [steps, P, C, W] int32; or int64, the address of the row before the step
    decay: Tensor  # [steps, P, C, W] float32, exp(Lt) of the slot
    weight: Tensor  # [steps, P, C, W] float32, of the token's own write
    link: Tensor  # [steps, P, C, W] int32, the slot's next entry, where there is one
    ordinal: Tensor | None  # [steps, P, C, W] int32, of the slot's group; None if nobody asks
    shared: Tensor  # [steps, P, C] int32, how many rows other tokens write too
    rows: Tensor  # [steps, P, C] int32, how many rows


def empty_row_writes(
    tokens: tuple[int, ...], writes: int, like: Tensor, ordinals: bool, addresses: bool = False
) -> RowWrites:
    """Fresh `RowWrites` for tokens = (steps, P, C)."""
    of_writes = (*tokens, writes)
    return RowWrites(
        slot=empty(of_writes, like, torch.int64 if addresses else torch.int32),
        decay=empty(of_writes, like, torch.float32),
        weight=empty(of_writes, like, torch.float32),
        link=empty(of_writes, like, torch.int32),
        ordinal=empty(of_writes, like, torch.int32) if ordinals else None,
        shared=empty(tokens, like, torch.int32),
        rows=empty(tokens, like, torch.int32),
    )


@triton.jit
def _row_writes_kernel(
    p_k_idx,
    p_k_rows,
    p_lead_value,
    p_write_w,
    p_lead_index,
    p_ordinals,
    p_slot,
    p_decay,
    p_weight,
    p_link,
    p_ordinal,
    p_shared,
    p_rows,
    tokens,
    W: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """BT tokens, all writes of each."""
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_w = tl.arange(0, BW)
    m_t = o_t < tokens
    at = o_t[:, None] * W + o_w[None, :]
    m_w = m_t[:, None] & (o_w < W)[None, :]
    slot = tl.load(p_k_idx + at, mask=m_w, other=-1)
    decay = tl.load(p_lead_value + at, mask=m_w, other=-1.0)
    weight = tl.load(p_write_w + at, mask=m_w, other=0.0)
    link = tl.load(p_lead_index + at, mask=m_w, other=-1)
    written = (slot >= 0) & ~(decay < 0)  # NaN too
    shared = written & (link >= 0)
    alone = written & (link < 0)
    count = tl.sum(shared.to(tl.int32), axis=1)
    of_shared = tl.cumsum(shared.to(tl.int32), axis=1)
    of_alone = count[:, None] + tl.cumsum(alone.to(tl.int32), axis=1)
    place = o_t[:, None] * W + tl.where(shared, of_shared, of_alone) - 1
    if p_k_rows is not None:
        tl.store(p_slot + place, tl.load(p_k_rows + at, mask=written, other=0), mask=written)
    else:
        tl.store(p_slot + place, slot, mask=written)
    tl.store(p_decay + place, decay, mask=written)
    tl.store(p_weight + place, weight, mask=written)
    tl.store(p_link + place, link, mask=written)
    if p_ordinal is not None:
        tl.store(p_ordinal + place, tl.load(p_ordinals + at, mask=written, other=0), mask=written)
    tl.store(p_shared + o_t, count, mask=m_t)
    tl.store(p_rows + o_t, tl.sum(written.to(tl.int32), axis=1), mask=m_t)


def row_writes_call(
    k_idx: Tensor,
    leads: tuple[Tensor, Tensor],
    write_w: Tensor,
    ordinals: Tensor | None,
    out: RowWrites,
    k_rows: Tensor | None = None,
) -> KernelCall:
    """Fills `out` from contiguous tensors, by entry.

    k_rows: the addresses of the rows at k_idx, where `out` has those.
    leads: exp(Lt) of its slot at the slot's first write and -1 at the others, float32; and the slot's next entry or -1,
        int32. ordinals: int32, None where `out` has none.
    """
    writes = k_idx.shape[-1]
    tokens, width = k_idx.numel() // writes, triton.next_power_of_2(writes)
    block = max(1, ENTRIES // width)
    tensors = (k_idx, k_rows, leads[0], write_w, leads[1], ordinals, *out)
    options = dict(W=writes, BT=block, BW=width, num_warps=1)
    return KernelCall(_row_writes_kernel, (triton.cdiv(tokens, block),), (*tensors, tokens), options)
