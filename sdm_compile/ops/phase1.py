"""Phase 1: the gate sums of every chunk's slot groups, and the matrices A and QK that couple its tokens.

    L_iw  = sum of the slot's gates until token i       k_eff = k_val exp(L)    write_w = k_val exp(Lt - L)
    Lq_ir = the same at a read                          q_w = q_val exp(Lq)     group_decay = exp(Lt)
    A_ij  = sum over shared slots k_val k_val' exp(L - L'), j < i
    QK_ij = sum over shared slots q_val k_val' exp(Lq - L'), j <= i

Inputs are staged chunks [steps, P, C, *]; outputs are `layout.ChunkFields`. Ops: `phase1` and `phase1_bwd`.

No sum is a difference of two cumulative sums: each is taken by walking the slot's group backwards from the entry, so
that it stays exact for long groups and for g = -inf. On the CPU all walks advance together, one place per iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    accumulate_dtype,
    check_devices,
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    check_staged_ids,
)
from .layout import ChunkFields, WriteGroups, empty, empty_chunk_fields
from .registry import register

_INPUTS = "Tensor k_idx, Tensor k_val, Tensor g, Tensor q_idx, Tensor q_val"


def _check_phase1(k_idx: Tensor, k_val: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor) -> None:
    for name, ids, layout in (("k_idx", k_idx, "[steps, P, C, W]"), ("q_idx", q_idx, "[steps, P, C, R]")):
        check_rank(name, ids, layout)
        check_staged_ids(name, ids)
    outer = k_idx.shape[:3]
    check_shape("k_val", k_val, k_idx.shape, "[steps, P, C, W] like k_idx")
    check_rank("g", g, "[steps, P, C, 1 or W]")
    check_shape("g", g, (*outer, 1 if g.shape[3] == 1 else k_idx.shape[3]), "[steps, P, C, 1 or W]")
    check_shape("q_idx", q_idx, (*outer, q_idx.shape[3]), "[steps, P, C, R]")
    check_shape("q_val", q_val, q_idx.shape, "[steps, P, C, R] like q_idx")
    for name, tensor in (("k_val", k_val), ("q_val", q_val)):
        check_float(name, tensor)
    check_dtype("g", g, accumulate_dtype(k_val.dtype), f"with {k_val.dtype} weights")
    check_devices(k_idx=k_idx, k_val=k_val, g=g, q_idx=q_idx, q_val=q_val)


def _empty_phase1_outputs(k_idx: Tensor, k_val: Tensor, q_idx: Tensor) -> ChunkFields:
    steps, streams, chunk, writes = k_idx.shape
    return empty_chunk_fields((steps, streams), chunk, writes, q_idx.shape[3], k_val, accumulate_dtype(k_val.dtype))


class _Sorted(NamedTuple):
    """The call's valid write entries, sorted by (chunk, slot, token), flat over chunks. n entries in G groups."""

    entry: Tensor  # [n] flat index into [N, E]
    chunk: Tensor  # [n] which of the N chunks
    token: Tensor  # [n] token within the chunk
    key: Tensor  # [n] ascending (chunk, slot, token) key
    first: Tensor  # [n] place of the group's first entry
    group: Tensor  # [n] group number over the whole call
    last: Tensor  # [G] place of each group's last entry


def _chunk_base(ids: Tensor, slots: int) -> Tensor:
    """[N, 1]: the smallest group key of each chunk, so that keys of different chunks never meet."""
    return torch.arange(ids.shape[0], device=ids.device)[:, None] * slots


def _sort_entries(k_idx: Tensor, slots: int) -> _Sorted:
    """k_idx [N, C, W]; `slots` is above every id."""
    chunks, tokens, writes = k_idx.shape
    ids = k_idx.reshape(chunks, tokens * writes).long()
    token = torch.arange(tokens * writes, device=ids.device) // writes
    keys = ((_chunk_base(ids, slots) + ids) * tokens + token).flatten()
    entry = (ids >= 0).flatten().nonzero()[:, 0]
    key, place = keys[entry].sort()
    entry = entry[place]
    owner = key // tokens
    starts = torch.ones_like(owner, dtype=torch.bool)
    starts[1:] = owner[1:] != owner[:-1]
    group = starts.cumsum(0) - 1
    start = starts.nonzero()[:, 0]
    last = torch.cat([start[1:], start.new_full((1,), len(key))])[: len(start)] - 1
    return _Sorted(entry, entry // (tokens * writes), key % tokens, key, start[group], group, last)


class _Reads(NamedTuple):
    """The read entries that a write of their chunk reaches."""

    entry: Tensor  # [m] flat index into [N, C * R]
    token: Tensor  # [m] token within the chunk
    place: Tensor  # [m] place, among the sorted writes, of the slot's last write at or before the token


def _find_reads(q_idx: Tensor, writes: _Sorted, slots: int) -> _Reads:
    chunks, tokens, reads = q_idx.shape
    ids = q_idx.reshape(chunks, tokens * reads).long()
    token = (torch.arange(tokens * reads, device=ids.device) // reads).expand(chunks, -1).flatten()
    keys = ((_chunk_base(ids, slots) + ids) * tokens).flatten() + token
    place = torch.searchsorted(writes.key, keys, right=True) - 1
    met = (ids >= 0).flatten() & (place >= 0)
    if len(writes.key):
        met &= writes.key[place.clamp_min(0)] // tokens == keys // tokens
    entry = met.nonzero()[:, 0]
    return _Reads(entry, token[entry], place[entry])


def _walk(place: Tensor, first: Tensor, total: Tensor, gates: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Walks every group backwards from `place` until its `first` entry, all at once.

    Yields (who, at, between) per distance: the walkers still inside their group, the place where each stands, and its
    `total` so far, which does not yet hold the gate at that place. `total` [walkers] is advanced in place and ends as
    its start plus the gates of every place that was visited.
    """
    who = torch.arange(len(place), device=place.device)
    while True:
        inside = place >= first
        if not bool(inside.all()):
            who, place, first = who[inside], place[inside], first[inside]
        if not len(who):
            return
        yield who, place, total[who]
        total[who] += gates[place]
        place = place - 1


class _Walks(NamedTuple):
    """Phase 1's inputs in walking order."""

    writes: _Sorted
    reads: _Reads
    k: Tensor  # [n] k_val of the sorted writes
    gates: Tensor  # [n] their gates
    q: Tensor  # [m] q_val of the reads that meet a write


def _num_slots(*ids: Tensor) -> int:
    """How many slots there are up to the highest one."""
    return max([1, *(int(x.max()) + 1 for x in ids if x.numel())])


def _prepare(k_idx: Tensor, k_val: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor) -> _Walks:
    """Inputs with steps and streams flattened: [N, C, *]."""
    slots = _num_slots(k_idx, q_idx)
    writes = _sort_entries(k_idx, slots)
    reads = _find_reads(q_idx, writes, slots)
    dtype = g.dtype
    return _Walks(
        writes,
        reads,
        k_val.to(dtype).flatten()[writes.entry],
        g.expand(k_val.shape).reshape(-1)[writes.entry],
        q_val.to(dtype).flatten()[reads.entry],
    )


def _fill_groups(writes: _Sorted, k_idx: Tensor, groups: WriteGroups) -> Tensor:
    """Fills the groups of k_idx [steps, P, C, W]; returns the place [G] of each one among all [steps * P * E]."""
    chunks, entries = k_idx.shape[:2].numel(), k_idx.shape[2:].numel()
    # Where each chunk's entries and groups begin, and the ordinals within the chunk.
    group_chunk = writes.chunk[writes.last]
    first_group = torch.searchsorted(group_chunk, torch.arange(chunks))
    ordinal = torch.arange(len(group_chunk)) - first_group[group_chunk]
    before = torch.searchsorted(writes.chunk, torch.arange(chunks + 1))
    place = torch.arange(len(writes.entry)) - before[writes.chunk]
    groups.order.view(-1).fill_(-1)[writes.chunk * entries + place] = (writes.entry % entries).int()
    starts = groups.group_start.view(chunks, entries + 1)
    starts.copy_(before[1:, None] - before[:-1, None])
    starts.view(-1)[group_chunk * (entries + 1) + ordinal] = (writes.first[writes.last] - before[group_chunk]).int()
    slot = k_idx.reshape(-1)[writes.entry[writes.last]]
    groups.group_slot.view(-1).fill_(-1)[group_chunk * entries + ordinal] = slot
    return group_chunk * entries + ordinal


def write_groups_cpu(k_idx: Tensor) -> WriteGroups:
    """What Phase 1 makes of the write slots [steps, P, C, W] alone, on the CPU."""
    entries = k_idx.shape[2:].numel()
    sizes = (entries, entries + 1, entries)
    groups = WriteGroups(*(empty((*k_idx.shape[:2], size), k_idx, torch.int32) for size in sizes))
    _fill_groups(_sort_entries(k_idx.flatten(0, 1), _num_slots(k_idx)), k_idx, groups)
    return groups


def _phase1_cpu(k_idx: Tensor, k_val: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor) -> tuple[Tensor, ...]:
    _check_phase1(k_idx, k_val, g, q_idx, q_val)
    outs = _empty_phase1_outputs(k_idx, k_val, q_idx)
    tokens = k_idx.shape[2]
    w = _prepare(*(x.flatten(0, 1) for x in (k_idx, k_val, g, q_idx, q_val)))
    writes, reads = w.writes, w.reads

    a, qk = outs.A.view(-1).zero_(), outs.QK.view(-1).zero_()
    row = (writes.chunk * tokens + writes.token) * tokens
    until, later = w.gates.clone(), torch.zeros_like(w.gates)
    for who, at, between in _walk(torch.arange(len(w.k)) - 1, writes.first, until, w.gates):
        a.index_add_(0, row[who] + writes.token[at], w.k[who] * w.k[at] * between.exp())
        later[at] += w.gates[who]
    at_read = torch.zeros_like(w.q)
    row = writes.chunk[reads.place] * tokens * tokens + reads.token * tokens
    for who, at, between in _walk(reads.place, writes.first[reads.place], at_read, w.gates):
        qk.index_add_(0, row[who] + writes.token[at], w.q[who] * w.k[at] * between.exp())

    outs.k_eff.view(-1).zero_()[writes.entry] = w.k * until.exp()
    outs.write_w.view(-1).zero_()[writes.entry] = w.k * later.exp()
    outs.q_w.copy_(q_val.masked_fill(q_idx < 0, 0)).view(-1)[reads.entry] = w.q * at_read.exp()

    place = _fill_groups(writes, k_idx, WriteGroups(outs.order, outs.group_start, outs.group_slot))
    outs.group_decay.view(-1).fill_(1)[place] = until[writes.last].exp()
    return outs


def _phase1_cuda(k_idx: Tensor, k_val: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor) -> tuple[Tensor, ...]:
    from .phase1_kernels import empty_phase1_scratch, launch_phase1

    _check_phase1(k_idx, k_val, g, q_idx, q_val)
    outs = _empty_phase1_outputs(k_idx, k_val, q_idx)
    chunks, entries = outs.order.shape[:2].numel(), outs.order.shape[2]
    k_idx, k_val, g, q_idx, q_val = (x.contiguous() for x in (k_idx, k_val, g, q_idx, q_val))
    launch_phase1(k_idx, k_val, g, q_idx, q_val, outs, empty_phase1_scratch(chunks, entries, k_val))
    return outs


def _phase1_fake(k_idx: Tensor, k_val: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor) -> tuple[Tensor, ...]:
    _check_phase1(k_idx, k_val, g, q_idx, q_val)
    return _empty_phase1_outputs(k_idx, k_val, q_idx)


def _check_phase1_bwd(
    dk_eff: Tensor,
    dq_w: Tensor,
    dwrite_w: Tensor,
    dA: Tensor,
    dQK: Tensor,
    dgroup_decay: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
) -> None:
    _check_phase1(k_idx, k_val, g, q_idx, q_val)
    steps, streams, chunk, writes = k_idx.shape
    for name, grad, shape, layout in (
        ("dk_eff", dk_eff, k_val.shape, "[steps, P, C, W]"),
        ("dq_w", dq_w, q_val.shape, "[steps, P, C, R]"),
        ("dwrite_w", dwrite_w, k_val.shape, "[steps, P, C, W]"),
        ("dA", dA, (steps, streams, chunk, chunk), "[steps, P, C, C]"),
        ("dQK", dQK, (steps, streams, chunk, chunk), "[steps, P, C, C]"),
        ("dgroup_decay", dgroup_decay, (steps, streams, chunk * writes), "[steps, P, C * W]"),
    ):
        check_shape(name, grad, shape, layout)
        check_dtype(name, grad, g.dtype, f"with {g.dtype} gates")
    check_devices(k_idx=k_idx, dk_eff=dk_eff, dq_w=dq_w, dwrite_w=dwrite_w, dA=dA, dQK=dQK, dgroup_decay=dgroup_decay)


def _empty_phase1_bwd_outputs(k_val: Tensor, g: Tensor, q_val: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the accumulate dtype, which is g's."""
    return tuple(empty(tuple(x.shape), x, g.dtype) for x in (k_val, g, q_val))  # type: ignore[return-value]


def _phase1_bwd_cpu(
    dk_eff: Tensor,
    dq_w: Tensor,
    dwrite_w: Tensor,
    dA: Tensor,
    dQK: Tensor,
    dgroup_decay: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
) -> tuple[Tensor, ...]:
    _check_phase1_bwd(dk_eff, dq_w, dwrite_w, dA, dQK, dgroup_decay, k_idx, k_val, g, q_idx, q_val)
    dk_val, dg, dq_val = _empty_phase1_bwd_outputs(k_val, g, q_val)
    tokens, width = k_idx.shape[2:]
    entries = tokens * width
    w = _prepare(*(x.flatten(0, 1) for x in (k_idx, k_val, g, q_idx, q_val)))
    writes, reads = w.writes, w.reads
    dA, dQK = dA.reshape(-1), dQK.reshape(-1)
    dk_eff, dwrite_w = dk_eff.reshape(-1)[writes.entry], dwrite_w.reshape(-1)[writes.entry]
    dq_w_flat = dq_w.reshape(-1)[reads.entry]

    until, later = w.gates.clone(), torch.zeros_like(w.gates)
    dk, dL = torch.zeros_like(w.k), torch.zeros_like(w.k)
    row = (writes.chunk * tokens + writes.token) * tokens
    for who, at, between in _walk(torch.arange(len(w.k)) - 1, writes.first, until, w.gates):
        da = dA[row[who] + writes.token[at]] * between.exp()
        dk[who] += w.k[at] * da
        dk[at] += w.k[who] * da
        a = w.k[who] * w.k[at] * da
        dL[who] += a
        dL[at] -= a
        later[at] += w.gates[who]
    at_read, dq, dLq = torch.zeros_like(w.q), torch.zeros_like(w.q), torch.zeros_like(w.q)
    row = writes.chunk[reads.place] * tokens * tokens + reads.token * tokens
    for who, at, between in _walk(reads.place, writes.first[reads.place], at_read, w.gates):
        db = dQK[row[who] + writes.token[at]] * between.exp()
        dq[who] += w.k[at] * db
        dk.index_add_(0, at, w.q[who] * db)
        b = w.q[who] * w.k[at] * db
        dLq[who] += b
        dL.index_add_(0, at, b, alpha=-1)

    write_term = dwrite_w * w.k * later.exp()
    dL += dk_eff * w.k * until.exp() - write_term
    dk += dk_eff * until.exp() + dwrite_w * later.exp()
    dLq += dq_w_flat * w.q * at_read.exp()
    dq += dq_w_flat * at_read.exp()
    group_chunk = writes.chunk[writes.last]
    ordinal = torch.arange(len(group_chunk)) - torch.searchsorted(group_chunk, group_chunk)
    dLt = dgroup_decay.reshape(-1)[group_chunk * entries + ordinal] * until[writes.last].exp()
    dLt.index_add_(0, writes.group, write_term)

    # A gate counts in the L of its own and all later places of its group, in the Lq of reads there, and in Lt.
    dL.index_add_(0, reads.place, dLq)
    dgate = dL + dLt[writes.group]
    for who, at, _ in _walk(torch.arange(len(w.k)) - 1, writes.first, torch.zeros_like(dL), w.gates):
        dgate[at] += dL[who]

    dk_val.zero_().view(-1)[writes.entry] = dk
    dq_val.copy_(dq_w.masked_fill(q_idx < 0, 0)).view(-1)[reads.entry] = dq
    per_write = torch.zeros_like(dk_val).view(-1)
    per_write[writes.entry] = dgate
    per_write = per_write.view(dk_val.shape)
    dg.copy_(per_write if g.shape[3] == width else per_write.sum(-1, keepdim=True))
    return dk_val, dg, dq_val


def _phase1_bwd_cuda(
    dk_eff: Tensor,
    dq_w: Tensor,
    dwrite_w: Tensor,
    dA: Tensor,
    dQK: Tensor,
    dgroup_decay: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
) -> tuple[Tensor, ...]:
    from .phase1_bwd_kernels import empty_phase1_bwd_scratch, launch_phase1_bwd

    _check_phase1_bwd(dk_eff, dq_w, dwrite_w, dA, dQK, dgroup_decay, k_idx, k_val, g, q_idx, q_val)
    outs = _empty_phase1_bwd_outputs(k_val, g, q_val)
    grads = [x.contiguous() for x in (dk_eff, dq_w, dwrite_w, dA, dQK, dgroup_decay)]
    inputs = [x.contiguous() for x in (k_idx, k_val, g, q_idx, q_val)]
    launch_phase1_bwd(grads, inputs, outs, empty_phase1_bwd_scratch(k_idx, q_idx))
    return outs


def _phase1_bwd_fake(
    dk_eff: Tensor,
    dq_w: Tensor,
    dwrite_w: Tensor,
    dA: Tensor,
    dQK: Tensor,
    dgroup_decay: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
) -> tuple[Tensor, ...]:
    _check_phase1_bwd(dk_eff, dq_w, dwrite_w, dA, dQK, dgroup_decay, k_idx, k_val, g, q_idx, q_val)
    return _empty_phase1_bwd_outputs(k_val, g, q_val)


phase1_bwd_op = register(
    "phase1_bwd(Tensor dk_eff, Tensor dq_w, Tensor dwrite_w, Tensor dA, Tensor dQK, Tensor dgroup_decay, "
    f"{_INPUTS}) -> (Tensor, Tensor, Tensor)",
    cpu=_phase1_bwd_cpu,
    cuda=_phase1_bwd_cuda,
    fake=_phase1_bwd_fake,
)


def _setup_phase1(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(*output[6:])


def _phase1_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    k_idx, k_val, g, q_idx, q_val = ctx.saved_tensors  # once: checkpointing unpacks each tensor only once
    dk_val, dg, dq_val = phase1_bwd_op(*grads[:6], k_idx, k_val, g, q_idx, q_val)
    return None, dk_val.to(k_val.dtype), dg, None, dq_val.to(q_val.dtype)


phase1_op = register(
    f"phase1({_INPUTS}) -> ({', '.join(['Tensor'] * len(ChunkFields._fields))})",
    cpu=_phase1_cpu,
    cuda=_phase1_cuda,
    fake=_phase1_fake,
    setup_context=_setup_phase1,
    backward=_phase1_backward,
)


def phase1(k_idx: Tensor, k_val: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor) -> ChunkFields:
    """The slot groups, gate sums and coupling matrices of every chunk.

    Args:
        k_idx: [steps, P, C, W] int32 bank rows, distinct within a token; negative means no slot.
        k_val: [steps, P, C, W] weights, bank dtype.
        g: [steps, P, C, 1 or W] log-decay, accumulate dtype; -inf erases.
        q_idx, q_val: [steps, P, C, R] int32 bank rows and weights.
    Returns:
        `ChunkFields`, fresh memory.
    Raises:
        ValueError: shapes disagree or ids are not int32.
    Note: differentiable in k_val, g and q_val; SPEC section 2, backward section 3.
    """
    return ChunkFields(*phase1_op(k_idx, k_val, g, q_idx, q_val))
