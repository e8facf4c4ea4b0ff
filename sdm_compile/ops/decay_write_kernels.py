"""Triton kernel of the decay-and-write: one program updates G groups' rows, BD columns of each."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .launch import eviction_hint
from .layout import StepGroups


@triton.jit
def _decay_write_kernel(
    p_bank,
    p_table,
    p_delta,
    p_write_w,
    p_group_decay,
    p_order,
    p_group_start,
    p_group_slot,
    p_first_weight,
    p_first_token,
    num_slots,
    D,
    C: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    BD: tl.constexpr,
    TABLE: tl.constexpr,
    FIRST: tl.constexpr,
    EVICT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """TABLE: the bank's address stands in p_table. FIRST: each group's first weight and token stand beside its ordinal,
    so that most rows need no second look-up before their delta. EARLY: the kernel is launched before the dual matmul
    has ended, and waits for it only when it needs the delta."""
    if TABLE:
        p_bank = tl.load(p_table).to(tl.pointer_type(p_bank.dtype.element_ty))
        p_bank = tl.multiple_of(p_bank, 16)
    entries: tl.constexpr = C * W
    p = tl.program_id(2).to(tl.int64)
    o_g = tl.program_id(1) * G + tl.arange(0, G)
    m_g = o_g < entries
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    slot = tl.load(p_group_slot + p * entries + o_g, mask=m_g, other=-1)
    start = tl.load(p_group_start + p * (entries + 1) + o_g, mask=m_g, other=0)
    end = tl.load(p_group_start + p * (entries + 1) + o_g + 1, mask=m_g, other=0)
    decay = tl.load(p_group_decay + p * entries + o_g, mask=m_g, other=0.0)
    used = m_g & (slot >= 0) & (slot < num_slots)
    if FIRST:
        weight = tl.load(p_first_weight + p * entries + o_g, mask=used, other=0.0)
        token = tl.load(p_first_token + p * entries + o_g, mask=used, other=0)
    else:
        entry = tl.load(p_order + p * entries + start, mask=used, other=0)
        weight = tl.load(p_write_w + p * entries + entry, mask=used, other=0.0)
        token = entry // W
    m_row = used[:, None] & m_d[None, :]
    at = slot.to(tl.int64)[:, None] * D + o_d[None, :]
    row = tl.load(p_bank + at, mask=m_row, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    delta = tl.load(p_delta + (p * C + token)[:, None] * D + o_d[None, :], mask=m_row, other=0.0)
    row = row * decay[:, None] + weight[:, None] * delta
    longest = tl.max(tl.where(used, end - start, 0), axis=0)
    for n in range(1, longest):
        more = used & (start + n < end)
        entry = tl.load(p_order + p * entries + start + n, mask=more, other=0)
        weight = tl.load(p_write_w + p * entries + entry, mask=more, other=0.0)
        m_more = more[:, None] & m_d[None, :]
        delta = tl.load(p_delta + (p * C + entry // W)[:, None] * D + o_d[None, :], mask=m_more, other=0.0)
        row += weight[:, None] * delta
    tl.store(p_bank + at, row.to(p_bank.dtype.element_ty), mask=m_row, eviction_policy=EVICT)


@dataclass(frozen=True)
class DecayWriteConfig:
    groups: int
    columns: int
    warps: int

    @staticmethod
    def from_shapes(chunk: int, head_dim: int) -> DecayWriteConfig:
        # Measured on an H200, us per whole step with 1024 columns: one group per program, 25.1 with one warp and 25.4
        # with two at a chunk of 64, 508 and 500 at 256; 27 and 589 with four groups of 256 columns. With 64 columns: 32
        # groups and four warps 17.2, 16 and two 17.4, 16 and one 19.5.
        columns = min(1024, triton.next_power_of_2(head_dim))
        if head_dim % columns and head_dim > 256:
            columns = 256
        if columns <= 128:
            return DecayWriteConfig(groups=2048 // columns, columns=columns, warps=4)
        return DecayWriteConfig(groups=1024 // columns, columns=columns, warps=1 if chunk <= 64 else 2)


def write_warps(streams: int, chunk: int, writes: int, head_dim: int) -> int:
    """Warps that one step's write launches."""
    config = DecayWriteConfig.from_shapes(chunk, head_dim)
    programs = triton.cdiv(head_dim, config.columns) * triton.cdiv(chunk * writes, config.groups) * streams
    return programs * config.warps


def launch_decay_write(
    bank: Tensor,
    table: Tensor | None,
    delta: Tensor,
    groups: StepGroups,
    first: tuple[Tensor, Tensor] | None,
    early: bool = False,
) -> None:
    """One step, in place on a contiguous bank, from contiguous [P, *] inputs.

    `first`: (weight, token) of each group's first write [P, E]. With a `table` the kernel takes the bank's address from
    its first entry, and from `bank` the dtype and shape alone. `early`: see the kernel.
    """
    streams, chunk, writes = groups.write_w.shape
    num_slots, width = bank.shape
    if not streams:
        return
    config = DecayWriteConfig.from_shapes(chunk, width)
    first_weight, first_token = first or (groups.write_w, groups.order)
    grid = (triton.cdiv(width, config.columns), triton.cdiv(chunk * writes, config.groups), streams)
    _decay_write_kernel[grid](
        *(bank, bank if table is None else table, delta, groups.write_w, groups.group_decay),
        *(groups.order, groups.group_start, groups.group_slot, first_weight, first_token, num_slots, width),
        C=chunk,
        W=writes,
        G=config.groups,
        BD=config.columns,
        TABLE=table is not None,
        FIRST=first is not None,
        EVICT=eviction_hint(bank, streams * chunk * writes * 2),
        EARLY=early,
        num_warps=config.warps,
        enable_fp_fusion=True,
        launch_pdl=early,
    )
