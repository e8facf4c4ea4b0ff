"""Triton kernel of the token gather: one program sums one token's write rows and then its read rows, BD columns.

Its backward is launches of the kernels that a backward step has for its slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall, eviction_hint
from .slot_entries_kernels import entry_dots_call, entry_weights_call
from .slot_groups_kernels import empty_slot_groups, launch_slot_groups
from .snapshot import StepRows
from .snapshot_tiles import convert
from .step_bwd_kernels import Banks, SlotEntries, SlotRowsConfig, slot_rows_call
from .step_table import from_table


@triton.jit
def load_entries(p_idx, p_weight, o_n, N: tl.constexpr):
    """The slots and weights of a token's entries o_n."""
    m_n = o_n < N
    return tl.load(p_idx + o_n, mask=m_n, other=-1), tl.load(p_weight + o_n, mask=m_n, other=0.0)


@triton.jit
def has_slot(slot, num_slots):
    """Whether a slot is in the bank, and no -1: in one comparison. Of addresses, whether there is one."""
    if slot.dtype == tl.int64:
        return slot > 0
    else:
        return slot.to(tl.uint32, bitcast=True) < num_slots.to(tl.uint32)


@triton.jit
def row_addresses(p_bank, slot, o_d, D: tl.constexpr):
    """Of columns o_d [BD] of rows `slot` [N]: [N, BD]. int64 are addresses of the rows themselves, multiples of 16."""
    if slot.dtype == tl.int64:
        return tl.multiple_of(slot.to(p_bank.dtype), 16)[:, None] + o_d[None, :]
    else:
        return (p_bank + o_d)[None, :] + slot[:, None].to(tl.int64) * D


@triton.jit
def row_sum(
    p_bank,
    p_idx,
    p_weight,
    entries,
    o_d,
    m_d,
    num_slots,
    D: tl.constexpr,
    N: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    EVICT: tl.constexpr,
    p_ordinal=None,
    p_snapshot=None,
):
    """sum over N rows of weight times bank[idx], BN rows at a time, of which `entries` are the first ones' entries.

    p_ordinal: of the rows to be saved, -1 elsewhere, into the chunk's rows at p_snapshot; None for none. The grid has
    no third dimension.
    """
    # Every fourth row to one of four sums, as four rows come at once; threads add theirs up at the end.
    SUMS: tl.constexpr = min(BN, 4)
    total = tl.zeros([SUMS, BD], tl.float32)
    idx, weight = entries
    # Not unrolled, as the compiler cannot know the grid: it would ask for more rows at once than registers hold.
    for n in range(0, N * tl.num_programs(2), BN):
        o_n = n + tl.arange(0, BN)
        held = has_slot(idx[:, None], num_slots) & m_d[None, :]
        rows = tl.load(row_addresses(p_bank, idx, o_d, D), mask=held, other=0.0, eviction_policy=EVICT)
        weight = tl.where(has_slot(idx, num_slots), weight, 0.0)
        if p_ordinal is not None:
            ordinal = tl.load(p_ordinal + o_n, mask=o_n < N, other=-1)
            p_saved = row_addresses(p_snapshot, ordinal, o_d, D)
            tl.store(p_saved, rows, mask=held & (ordinal >= 0)[:, None], eviction_policy="evict_first")
        idx, following = load_entries(p_idx, p_weight, o_n + BN, N)  # while the rows come
        products = convert(rows, tl.float32) * weight[:, None]
        total += tl.sum(tl.reshape(products, [BN // SUMS, SUMS, BD]), axis=0)
        weight = following
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["num_slots"])
def _token_gather_kernel(
    p_bank,
    p_table,
    p_k_idx,
    p_k_eff,
    p_q_idx,
    p_q_w,
    p_v,
    p_beta,
    p_retrieved,
    p_inter,
    p_kept,
    num_slots,
    D: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
    TABLE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr,
    EVICT: tl.constexpr,
):
    """TABLE: the addresses of the bank and p_kept stand in p_table. RESIDUAL: store u = beta (v - retrieved) instead of
    retrieved. KEEP: store retrieved into p_kept too."""
    if TABLE:
        p_bank = from_table(p_bank, p_table, 0)
        if KEEP:
            p_kept = from_table(p_kept, p_table, 3)
    token = tl.program_id(1).to(tl.int64)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    # The rows to be written come last, so that the write finds them in the cache.
    p_idx, p_weight = p_q_idx + token * R, p_q_w + token * R
    entries = load_entries(p_idx, p_weight, tl.arange(0, BR), R)
    inter = row_sum(p_bank, p_idx, p_weight, entries, o_d, m_d, num_slots, D, R, BR, BD, EVICT)
    tl.store(p_inter + token * D + o_d, inter, mask=m_d)
    p_idx, p_weight = p_k_idx + token * W, p_k_eff + token * W
    entries = load_entries(p_idx, p_weight, tl.arange(0, BW), W)
    retrieved = row_sum(p_bank, p_idx, p_weight, entries, o_d, m_d, num_slots, D, W, BW, BD, "")
    if KEEP:
        tl.store(p_kept + token * D + o_d, retrieved, mask=m_d)
    if RESIDUAL:
        v = tl.load(p_v + token * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        retrieved = tl.load(p_beta + token) * (v - retrieved)
    tl.store(p_retrieved + token * D + o_d, retrieved, mask=m_d)


def columns_per_program(head_dim: int, itemsize: int) -> int:
    """Pieces of 128 bytes of a row, or all of a shorter one."""
    return min(128 // itemsize, triton.next_power_of_2(head_dim))


@dataclass(frozen=True)
class TokenGatherConfig:
    columns: int
    rows_w: int
    rows_r: int
    warps: int

    @staticmethod
    def from_shapes(writes: int, reads: int, head_dim: int, itemsize: int) -> TokenGatherConfig:
        # Measured on an H200, us per step of 128 tokens x 128 rows x 2 KB: 10.9 with one warp, 64 columns and 32 rows
        # per load; 12.3 with 32 columns, 11.2 with 128, 15.4 with two warps, 27.1 with four.
        return TokenGatherConfig(
            columns=columns_per_program(head_dim, itemsize),
            rows_w=min(32, triton.next_power_of_2(writes)),
            rows_r=min(32, triton.next_power_of_2(reads)),
            warps=1,
        )


def token_gather_call(
    bank: Tensor,
    table: Tensor | None,
    k_idx: Tensor,
    k_eff: Tensor,
    q_idx: Tensor,
    q_w: Tensor,
    residual: tuple[Tensor, Tensor] | None,
    retrieved: Tensor,
    inter: Tensor,
    kept: Tensor | None = None,
) -> KernelCall:
    """One step: fills retrieved and inter [P, C, D] from contiguous inputs.

    With `residual` = (v, beta) `retrieved` receives u = beta (v - retrieved), and `kept` [P, C, D] what was retrieved.
    With a `table` the kernel takes the addresses of the bank and `kept` from its entries 0 and 3, and from these
    tensors the dtypes and shapes alone.
    """
    streams, chunk, writes = k_idx.shape
    reads, (num_slots, width) = q_idx.shape[2], bank.shape
    config = TokenGatherConfig.from_shapes(writes, reads, width, bank.element_size())
    v, beta = residual or (retrieved, retrieved)
    tensors = (
        *(bank, bank if table is None else table, k_idx, k_eff, q_idx, q_w),
        *(v, beta, retrieved, inter, retrieved if kept is None else kept),
    )
    options = dict(
        W=writes,
        R=reads,
        BW=config.rows_w,
        BR=config.rows_r,
        BD=config.columns,
        TABLE=table is not None,
        RESIDUAL=residual is not None,
        KEEP=kept is not None,
        EVICT=eviction_hint(bank, streams * chunk * (writes + reads)),
        num_warps=config.warps,
        enable_fp_fusion=True,
    )
    grid = (triton.cdiv(width, config.columns), streams * chunk)
    return KernelCall(_token_gather_kernel, grid, (*tensors, num_slots, width), options)


def launch_token_gather_bwd(
    dretrieved: Tensor, dinter: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:
    """Fills one step's gradients of the bank, k_eff and q_w, or None where one is not wanted; all contiguous.

    They are what a backward step makes of a bank that has no gradient yet, where nothing decays. `inputs`: the op's.
    """
    bank, k_idx, k_eff, q_idx, q_w = inputs
    # One kernel makes all of them, wanted or not.
    dbank, dk_eff, dq_w = (
        torch.zeros_like(x) if grad is None else grad.zero_() for x, grad in zip((bank, k_eff, q_w), grads, strict=True)
    )
    streams, chunk, writes = k_idx.shape
    groups, scratch = empty_slot_groups(streams, chunk, writes, q_idx.shape[2], k_idx)
    launch_slot_groups(k_idx, q_idx, groups, scratch)
    beta = k_eff.new_full((streams, chunk, 1), -1.0)  # which leaves weights and dots as they are
    sources, weights = torch.empty_like(groups.slot), k_eff.new_empty(groups.slot.shape)
    entry_weights_call(groups.keys, k_eff, q_w, beta, sources, weights).launch()
    # No group decays, and the row of every slot is the bank's own.
    none = torch.full_like(groups.slot, -1)
    entries = SlotEntries(groups.start, groups.slot, groups.lead, none, none, sources, weights, k_eff.flatten(1))
    parts = SlotRowsConfig.from_shapes(chunk, bank.shape[1]).parts(bank.shape[1])
    dots = k_eff.new_zeros(streams, parts, groups.slot.shape[1])
    banks = Banks(dbank, bank, StepRows(bank, weights, "none"))
    slot_rows_call(banks, entries, dretrieved, dinter, dots, dots).launch()
    entry_dots_call(groups.keys, dots, beta, dk_eff, dq_w).launch()
