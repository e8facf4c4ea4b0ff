"""Triton kernels around the slot rows of a backward: what its entries need beforehand, and what becomes of their dots.

    numbers   for every step, which row of the snapshot a group's slot had before it
    weights   what an entry brings of what its token sent back
    dots      each entry's dot, from the order of the slots to its write or read

All of them work on many steps at once, and on what `SlotGroups` holds of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .slot_groups_kernels import entry_parts
from .slot_parts import of_this_part, slot_parts
from .slot_sort_kernels import PLACES
from .snapshot_tiles import addressable
from .step_table import from_table, rows_before


@triton.jit
def _row_numbers_kernel(
    p_where,
    p_payload,
    p_rows,
    p_previous,
    p_table,
    p_slot,
    p_ordinal,
    p_number,
    num_slots,
    steps,
    rows_per_step,
    DP,
    E: tl.constexpr,
    F: tl.constexpr,
    B: tl.constexpr,
    TABLE: tl.constexpr,
):
    """All steps of a part of one stream's slots, the last step first: a slot's row of the snapshot before each.

    That is the row that the step saved of a written slot, or, of versions, the one that it made its own from; and else
    the one that `where` has. Then `where` is told. p_previous: None without versions.
    TABLE: the addresses of `where`, the payload, the first step's rows in it, and `previous` stand in p_table.
    """
    if TABLE:
        p_payload = from_table(p_payload, p_table, 2)
        p_where = from_table(p_where, p_table, 4)
        p_rows = from_table(p_rows, p_table, 5)
        if p_previous is not None:
            p_previous = from_table(p_previous, p_table, 6)
    p = tl.program_id(0).to(tl.int64)
    first = rows_before(p_payload, p_rows, DP) + p * E
    blocks: tl.constexpr = (F + B - 1) // B
    o_b = tl.arange(0, B)
    last = ((steps - 1) * tl.num_programs(0) + p) * F
    slot = tl.load(p_slot + last + o_b, mask=o_b < F, other=-1)
    ordinal = tl.load(p_ordinal + last + o_b, mask=o_b < F, other=-1)
    for i in range(0, steps * blocks):
        step = steps - 1 - i // blocks
        o_g, o_next = i % blocks * B + o_b, (i + 1) % blocks * B + o_b
        chunk = (step * tl.num_programs(0) + p) * F
        # The next ones come while these are numbered.
        next_chunk = (tl.maximum(0, steps - 1 - (i + 1) // blocks) * tl.num_programs(0) + p) * F
        next_slot = tl.load(p_slot + next_chunk + o_next, mask=o_next < F, other=-1)
        next_ordinal = tl.load(p_ordinal + next_chunk + o_next, mask=o_next < F, other=-1)
        mine = of_this_part(slot)
        used = mine & (slot >= 0) & (slot < num_slots)
        number = tl.load(p_where + slot, mask=used & (ordinal < 0), other=-1)
        own = (first + step.to(tl.int64) * rows_per_step).to(tl.int32) + ordinal
        if p_previous is not None:
            own = tl.load(p_previous + own, mask=used & (ordinal >= 0), other=-1)
        tl.store(p_number + chunk + o_g, tl.where(ordinal < 0, number, own), mask=mine & (o_g < F))
        tl.store(p_where + slot, own, mask=used & (ordinal >= 0))
        slot, ordinal = next_slot, next_ordinal
        tl.debug_barrier()  # other threads read what was stored, in the next step


@triton.jit
def _places(p_keys, C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """This program's B places: the chunk, the places, which hold a write and which a read, the token, the number."""
    entries: tl.constexpr = C * (W + R)
    chunk = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * B + tl.arange(0, B)
    entry = tl.load(p_keys + chunk * entries + place, mask=place < entries, other=-1).to(tl.int32)
    token, read, own = entry_parts(tl.maximum(entry, 0), W, R)
    return chunk, place, (entry >= 0) & ~read, (entry >= 0) & read, token, own


@triton.jit
def _entry_weights_kernel(
    p_keys,
    p_k_eff,
    p_q_w,
    p_beta,
    p_source,
    p_weight,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """B places of one chunk: where an entry finds du or dy, and what it brings of it."""
    chunk, place, write, read, token, own = _places(p_keys, C, W, R, B)
    at = chunk * (C * (W + R)) + place
    beta = tl.load(p_beta + chunk * C + token, mask=write, other=0.0)
    write_weight = -beta * tl.load(p_k_eff + chunk * (C * W) + own, mask=write, other=0.0)
    read_weight = tl.load(p_q_w + chunk * (C * R) + own, mask=read, other=0.0)
    tl.store(p_weight + at, tl.where(read, read_weight, write_weight), mask=write | read)
    tl.store(p_source + at, 2 * token + read.to(tl.int32), mask=write | read)


@triton.jit
def _entry_dots_kernel(
    p_keys,
    p_dots,
    p_beta,
    p_dk_eff,
    p_dq_w,
    parts,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """B places of one chunk: each dot is its parts' sum, in order, and goes to its write, times -beta, or its read."""
    entries: tl.constexpr = C * (W + R)
    chunk, place, write, read, token, own = _places(p_keys, C, W, R, B)
    p_dots += chunk * parts * entries + place
    dot = tl.load(p_dots, mask=write | read, other=0.0)
    for part in range(1, parts):
        dot += tl.load(p_dots + part * entries, mask=write | read, other=0.0)
    beta = tl.load(p_beta + chunk * C + token, mask=write, other=0.0)
    tl.store(p_dk_eff + chunk * (C * W) + own, -beta * dot, mask=write)
    tl.store(p_dq_w + chunk * (C * R) + own, dot, mask=read)


def row_numbers_call(
    where: Tensor,
    payload: Tensor,
    rows: Tensor,
    previous: Tensor | None,
    table: Tensor | None,
    slot: Tensor,
    ordinal: Tensor,
    numbers: Tensor,
    *,
    rows_per_step: int,
    rows_per_stream: int,
) -> KernelCall:
    """Fills numbers [steps, P, F] int32 for slot and ordinal of as many groups; see `SlotEntries`.

    Args:
        where: [num_slots] int32, the row of the snapshot that the next later step saved, -1 for none; updated. Of
            versions: the one that is current.
        payload: [rows, *] the snapshot's of all steps and streams. rows: its part from the first of these steps and
            streams on. previous: [rows] int32 of versions, see `Saved`, or None. With a `table` these addresses, and
            that of `where`, come from its entries 2, 5, 6 and 4.
        slot, ordinal: [steps, P, F] int32, of one step at least.
        rows_per_step, rows_per_stream: of the payload, of all streams of a step and of one of them.
    """
    steps, streams, entries = slot.shape
    payload, rows = addressable(payload), addressable(rows)
    block, parts = slot_parts(entries, streams)
    options = dict(E=rows_per_stream, F=entries, B=block, TABLE=table is not None, num_warps=max(1, block // 256))
    tensors = (where, payload, rows, previous, where if table is None else table, slot, ordinal, numbers)
    args = (*tensors, where.shape[0], steps, rows_per_step, payload.shape[1])
    return KernelCall(_row_numbers_kernel, (streams, parts), args, options)


def entry_weights_call(
    keys: Tensor, k_eff: Tensor, q_w: Tensor, beta: Tensor, sources: Tensor, weights: Tensor
) -> KernelCall:
    """Fills `sources` [N, F] int32, see `SlotEntries`, and `weights` [N, F] float32: -k_eff beta of a write, q_w of a
    read; in the order of the keys [N, F].

    k_eff [N, C, W], q_w [N, C, R] and beta [N, C, 1], contiguous float32. Stays where there is no slot.
    """
    chunks, chunk, writes = k_eff.shape
    options = dict(C=chunk, W=writes, R=q_w.shape[2], B=PLACES, num_warps=1, enable_fp_fusion=False)
    grid = (triton.cdiv(keys.shape[1], PLACES), chunks)
    return KernelCall(_entry_weights_kernel, grid, (keys, k_eff, q_w, beta, sources, weights), options)


def entry_dots_call(keys: Tensor, dots: Tensor, beta: Tensor, dk_eff: Tensor, dq_w: Tensor) -> KernelCall:
    """Fills dk_eff [N, C, W] and dq_w [N, C, R] from dots [N, parts, F] in the order of the keys [N, F].

    A write's dot is taken times -beta [N, C, 1]. All contiguous; float32. Stays where there is no slot.
    """
    chunks, chunk, writes = dk_eff.shape
    options = dict(C=chunk, W=writes, R=dq_w.shape[2], B=PLACES, num_warps=1, enable_fp_fusion=False)
    grid = (triton.cdiv(keys.shape[1], PLACES), chunks)
    return KernelCall(_entry_dots_kernel, grid, (keys, dots, beta, dk_eff, dq_w, dots.shape[1]), options)
