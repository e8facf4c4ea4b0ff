"""Triton kernels of the versions of rows: where each row is that a step reads, and the bank after the last step.

A call that keeps versions writes no row over another one. Row `chunk * E + ordinal` of its snapshot is what the chunk
made of a group's slot: a version of the slot's row, written once, and read by every step up to the slot's next write.
The first one is the row of the bank before the call, which stays as it is. So what the backward needs of a row before a
step has been stored when it was made, and no bank is copied to begin with. SPEC sections 4 and 5.

    links     every version's predecessor, and each slot's latest version so far
    rows      for each entry the address of its row before the step
    latest    the bank after the call, each slot's latest version
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .slot_parts import of_this_part, slot_parts
from .step_table import from_table, rows_before


@triton.jit(do_not_specialize=["num_slots", "steps", "rows_per_step"])
def _version_links_kernel(
    p_payload,
    p_rows,
    p_latest,
    p_previous,
    p_table,
    p_group_slot,
    num_slots,
    steps,
    rows_per_step,
    D,
    E: tl.constexpr,
    B: tl.constexpr,
    TABLE: tl.constexpr,
):
    """All steps of a part of one stream's slots, in order.

    TABLE: the addresses of the first four stand in p_table, from entry 1 on.
    """
    if TABLE:
        p_payload = from_table(p_payload, p_table, 1)
        p_rows = from_table(p_rows, p_table, 2)
        p_latest = from_table(p_latest, p_table, 3)
        p_previous = from_table(p_previous, p_table, 4)
    p = tl.program_id(0).to(tl.int64)
    first = rows_before(p_payload, p_rows, D) + p * E
    p_group_slot += p * E
    blocks: tl.constexpr = (E + B - 1) // B
    o_b = tl.arange(0, B)
    slot = tl.load(p_group_slot + o_b, mask=o_b < E, other=-1)
    for i in range(0, steps * blocks):
        o_g, o_next = i % blocks * B + o_b, (i + 1) % blocks * B + o_b
        p_next = p_group_slot + (tl.minimum(steps - 1, (i + 1) // blocks) * tl.num_programs(0)).to(tl.int64) * E
        following = tl.load(p_next + o_next, mask=o_next < E, other=-1)  # while these are noted
        used = of_this_part(slot) & (slot >= 0) & (slot < num_slots)
        own = first + i // blocks * rows_per_step.to(tl.int64) + o_g
        before = tl.load(p_latest + slot, mask=used, other=-1)
        tl.store(p_previous + own, before, mask=used)
        tl.store(p_latest + slot, own.to(tl.int32), mask=used)
        slot = following
        tl.debug_barrier()  # other threads read what was stored, in the next step


@triton.jit(do_not_specialize=["num_slots", "streams", "rows_per_step"])
def _version_rows_kernel(
    p_source,
    p_payload,
    p_rows,
    p_latest,
    p_previous,
    p_table,
    p_k_idx,
    p_q_idx,
    p_k_rows,
    p_q_rows,
    num_slots,
    streams,
    rows_per_step,
    D,
    E: tl.constexpr,
    F: tl.constexpr,
    B: tl.constexpr,
    TABLE: tl.constexpr,
):
    """B of one chunk's E writes or F reads. TABLE: the addresses of the first five stand in p_table."""
    if TABLE:
        p_source = from_table(p_source, p_table, 0)
        p_payload = from_table(p_payload, p_table, 1)
        p_rows = from_table(p_rows, p_table, 2)
        p_latest = from_table(p_latest, p_table, 3)
        p_previous = from_table(p_previous, p_table, 4)
    chunk = tl.program_id(1).to(tl.int64)
    block, N = tl.program_id(0), E
    p_idx, p_out = p_k_idx + chunk * E, p_k_rows + chunk * E
    if block >= (E + B - 1) // B:
        block -= (E + B - 1) // B
        p_idx, p_out, N = p_q_idx + chunk * F, p_q_rows + chunk * F, F
    own = rows_before(p_payload, p_rows, D) + chunk // streams * rows_per_step + chunk % streams * E
    o_n = block * B + tl.arange(0, B)
    slot = tl.load(p_idx + o_n, mask=o_n < N, other=-1)
    used = (slot >= 0) & (slot < num_slots)
    version = tl.load(p_latest + slot, mask=used, other=-1).to(tl.int64)
    # The latest one so far may be of this step, or of a later one.
    later = version >= own
    while tl.max(later.to(tl.int32), axis=0) > 0:
        version = tl.load(p_previous + version, mask=later, other=version.to(tl.int32)).to(tl.int64)
        later = version >= own
    p_row = tl.where(version >= 0, p_payload + version * D, p_source + slot.to(tl.int64) * D)
    tl.store(p_out + o_n, tl.where(used, p_row.to(tl.int64), 0), mask=o_n < N)


@triton.jit
def _latest_rows_kernel(p_bank, p_source, p_payload, p_latest, num_slots, D, B: tl.constexpr, BD: tl.constexpr):
    """BD columns of B rows of the bank."""
    parts = tl.cdiv(D, BD)
    slot = tl.program_id(0) // parts * B + tl.arange(0, B)
    o_d = tl.program_id(0) % parts * BD + tl.arange(0, BD)
    version = tl.load(p_latest + slot, mask=slot < num_slots, other=-1)
    mask = (slot < num_slots)[:, None] & (o_d < D)[None, :]
    at = slot[:, None].to(tl.int64) * D + o_d[None, :]
    p_row = tl.where(
        (version >= 0)[:, None], p_payload + version[:, None].to(tl.int64) * D + o_d[None, :], p_source + at
    )
    tl.store(p_bank + at, tl.load(p_row, mask=mask, other=0.0), mask=mask)


class Versions(NamedTuple):
    """What a call's versions are found in, in the order of a step's entries in a table; contiguous."""

    source: Tensor  # [num_slots, D] the bank before the call
    payload: Tensor  # [rows, D] the snapshot's of all steps and streams
    rows: Tensor  # its part from the first of the steps and streams at hand on
    latest: Tensor  # [num_slots] int32, which row of the payload a slot's latest version is, -1: the source's
    previous: Tensor  # [rows] int32, likewise the version that a version was made from


def version_links_call(versions: Versions, table: Tensor | None, group_slot: Tensor, rows_per_step: int) -> KernelCall:
    """Notes the versions that some steps make of their groups' slots [steps, P, E]: in `latest` and `previous`.

    table: the step's entries, or None. rows_per_step: of the payload, of all streams.
    """
    steps, streams, entries = group_slot.shape
    block, parts = slot_parts(entries, streams)
    options = dict(E=entries, B=block, TABLE=table is not None, num_warps=max(1, block // 256))
    tensors = (*versions[1:], versions.latest if table is None else table, group_slot)
    sizes = (len(versions.latest), steps, rows_per_step, versions.source.shape[1])
    return KernelCall(_version_links_kernel, (streams, parts), (*tensors, *sizes), options)


def version_rows_call(
    versions: Versions,
    table: Tensor | None,
    idx: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    rows_per_step: int,
) -> KernelCall:
    """Fills `rows`, int64, with the addresses of the rows at k_idx [steps, P, C, W] and q_idx [steps, P, C, R], before
    each step; 0 where there is no slot. What the steps make has been linked, and nothing later."""
    steps, streams, chunk, writes = idx[0].shape
    entries, reads = chunk * writes, chunk * idx[1].shape[3]
    block = 512
    options = dict(E=entries, F=reads, B=block, TABLE=table is not None, num_warps=4)
    tensors = (*versions, versions.latest if table is None else table, *idx, *rows)
    sizes = (len(versions.latest), streams, rows_per_step, versions.source.shape[1])
    grid = (triton.cdiv(entries, block) + triton.cdiv(reads, block), steps * streams)
    return KernelCall(_version_rows_kernel, grid, (*tensors, *sizes), options)


def latest_rows_call(bank: Tensor, source: Tensor, payload: Tensor, latest: Tensor) -> KernelCall:
    """Fills the bank [num_slots, D] with each slot's latest version; see `Versions`. All of one dtype."""
    num_slots, width = bank.shape
    columns = min(1024, triton.next_power_of_2(width))
    rows = 4096 // columns
    grid = (triton.cdiv(num_slots, rows) * triton.cdiv(width, columns),)
    args = (bank, source, payload, latest, num_slots, width)
    return KernelCall(_latest_rows_kernel, grid, args, dict(B=rows, BD=columns, num_warps=4))
