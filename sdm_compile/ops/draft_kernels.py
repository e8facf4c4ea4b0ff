"""Triton kernels of draft and commit: where every row of a draft comes from, its tokens, and the copy into the bank.

A stream's write entry `e = token * W + w` has a row of its own among the pending ones. Only the last of its slot's
entries counts, and of one token's the first: the kernels find it by comparing ids, with no matrix of pairs in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .decode_kernels import DecodeConfig, decode_token, load_ids


@triton.jit
def _serving_entry(p_ids, idx, valid, entries, W: tl.constexpr, BX: tl.constexpr):
    """For each id: among the first `entries` write entries at p_ids, the first one of its slot in the last token that
    has any; -1 where there is none."""
    best = tl.full(idx.shape, -1, tl.int32)
    for e in range(0, entries, BX):
        o_e = e + tl.arange(0, BX)
        written = tl.load(p_ids + o_e, mask=o_e < entries, other=-1).to(tl.int64)
        rank = o_e + W - 1 - 2 * (o_e % W)  # a token's entries in reverse order
        same = (idx[:, None] == written[None, :]) & valid[:, None]
        best = tl.maximum(best, tl.max(tl.where(same, rank[None, :], -1), axis=1))
    return tl.where(best >= 0, best + W - 1 - 2 * (best % W), -1)


@triton.jit(do_not_specialize=["num_slots", "tokens"])
def _sources_kernel(
    p_k_idx,
    p_q_idx,
    p_sources,
    p_slots,
    num_slots,
    tokens,
    W: tl.constexpr,
    R: tl.constexpr,
    BE: tl.constexpr,
    BX: tl.constexpr,
):
    """BE ids of one token, writes or reads: the entry whose row each one takes, and for a write the slot it writes."""
    WRITES: tl.constexpr = (W + BE - 1) // BE
    PARTS: tl.constexpr = WRITES + (R + BE - 1) // BE
    part = tl.program_id(0) % PARTS
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    t = (token % tokens).to(tl.int32)  # within its stream
    p_ids = p_k_idx + (token - t) * W
    p_sources += token * (W + R)
    if part < WRITES:
        o_n = part * BE + tl.arange(0, BE)
        idx, valid = load_ids(p_k_idx + token * W, o_n, num_slots, W)
        tl.store(p_sources + o_n, _serving_entry(p_ids, idx, valid, t * W, W, BX), mask=o_n < W)
        first = _serving_entry(p_k_idx + token * W, idx, valid, W, W, BX) == o_n
        tl.store(p_slots + token * W + o_n, tl.where(valid & first, idx, -1).to(tl.int32), mask=o_n < W)
    else:
        o_n = (part - WRITES) * BE + tl.arange(0, BE)
        idx, valid = load_ids(p_q_idx + token * R, o_n, num_slots, R)
        tl.store(p_sources + W + o_n, _serving_entry(p_ids, idx, valid, (t + 1) * W, W, BX), mask=o_n < R)


@triton.jit
def _source_rows(p_bank, p_new_rows, p_sources, idx, o_n, o_d, D: tl.constexpr, N: tl.constexpr):
    """Addresses [G, BD] of the rows that a token's entries o_n take: new ones of the stream, or the bank's."""
    source = tl.load(p_sources + o_n, mask=o_n < N, other=-1)
    # Chosen with the columns in place: chosen addresses of rows, spread later, would be loaded element by element.
    p_new = p_new_rows + source.to(tl.int64)[:, None] * D + o_d
    return tl.where((source >= 0)[:, None], p_new, p_bank + idx[:, None] * D + o_d)


@triton.jit(do_not_specialize=["num_slots", "tokens"])
def _draft_kernel(
    p_bank,
    p_k_idx,
    p_k_val,
    p_v,
    p_beta,
    p_g,
    p_q_idx,
    p_q_val,
    p_sources,
    p_readings,
    p_new_rows,
    p_repeats,
    num_slots,
    tokens,
    D: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
    GW: tl.constexpr,
    GR: tl.constexpr,
    GATES: tl.constexpr,
    BD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BD columns of one stream's tokens, one after the other, each as the decode step has it."""
    TILES: tl.constexpr = (D + BD - 1) // BD
    tile = tl.program_id(0) % TILES
    stream = (tl.program_id(0) // TILES).to(tl.int64)
    p_new_rows += stream * tokens * W * D
    o_d = tile * BD + tl.arange(0, BD)[None, :]
    m_d = o_d < D
    for t in range(tokens):
        token = stream * tokens + t
        p_token_sources = p_sources + token * (W + R)
        m_k, p_k_rows, p_token_rows, m_q, p_q_rows = (), (), (), (), ()
        for n in tl.static_range(0, W, GW):
            o_n = n + tl.arange(0, GW)
            idx, valid = load_ids(p_k_idx + token * W, o_n, num_slots, W)
            m_k += (valid,)
            p_k_rows += (_source_rows(p_bank, p_new_rows, p_token_sources, idx, o_n, o_d, D, W),)
            p_token_rows += (p_new_rows + (t * W + o_n).to(tl.int64)[:, None] * D + o_d,)
        for n in tl.static_range(0, R, GR):
            o_n = n + tl.arange(0, GR)
            idx, valid = load_ids(p_q_idx + token * R, o_n, num_slots, R)
            m_q += (valid,)
            p_q_rows += (_source_rows(p_bank, p_new_rows, p_token_sources + W, idx, o_n, o_d, D, R),)
        # Its barrier between the write and the read also stands between this token's rows and the later tokens.
        decode_token(
            p_k_rows, p_token_rows, m_k, p_q_rows, m_q, p_k_idx + token * W, p_k_val + token * W, p_v, p_beta,
            p_g + token * (W if GATES else 1), p_q_val + token * R, p_readings, p_repeats,
            num_slots, token, tile, o_d, m_d, D, W, BW, GW, GR, GATES, BD, EARLY, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots", "tokens"])
def _commit_kernel(
    p_bank,
    p_new_rows,
    p_slots,
    p_accepted,
    num_slots,
    tokens,
    D: tl.constexpr,
    W: tl.constexpr,
    BE: tl.constexpr,
    BX: tl.constexpr,
    BD: tl.constexpr,
):
    """BE entries of one stream: those that serve their slot after the accepted tokens go to the bank."""
    entries = tokens * W
    parts = tl.cdiv(entries, BE)
    part = tl.program_id(0) % parts
    stream = (tl.program_id(0) // parts).to(tl.int64)
    # Any count of either id dtype, clamped before it is narrowed.
    accepted = tl.load(p_accepted + stream).to(tl.int64)
    accepted = tl.minimum(tl.maximum(accepted, 0), tokens.to(tl.int64)).to(tl.int32)
    o_e = part * BE + tl.arange(0, BE)
    p_slots += stream * entries
    idx = tl.load(p_slots + o_e, mask=o_e < accepted * W, other=-1).to(tl.int64)
    valid = (idx >= 0) & (idx < num_slots)
    if tl.max(valid.to(tl.int32), axis=0) > 0:
        keep = valid & (_serving_entry(p_slots, idx, valid, accepted * W, W, BX) == o_e)
        p_from = p_new_rows + (stream * entries + o_e) * D
        p_to = p_bank + idx * D
        for d in range(0, D, BD):
            o_d = d + tl.arange(0, BD)[None, :]
            mask = keep[:, None] & (o_d < D)
            tl.store(p_to[:, None] + o_d, tl.load(p_from[:, None] + o_d, mask=mask, other=0.0), mask=mask)


@dataclass(frozen=True)
class DraftConfig:
    """None of these but the step's own changes a bit."""

    step: DecodeConfig
    ids: int  # that one program finds the sources of
    written: int  # ids that it compares them with at a time
    warps: int

    @staticmethod
    def from_shapes(streams: int, writes: int, reads: int, head_dim: int, itemsize: int) -> DraftConfig:
        """itemsize: bytes per element of the bank."""
        step = DecodeConfig.from_shapes(streams, writes, reads, head_dim, itemsize)
        return DraftConfig(step, ids=16, written=min(128, max(16, triton.next_power_of_2(writes))), warps=2)


@dataclass(frozen=True)
class CommitConfig:
    """None of these changes a bit."""

    entries: int  # of one program
    written: int  # entries that it compares them with at a time
    columns: int  # that it copies at a time
    warps: int

    @staticmethod
    def from_shapes(writes: int, head_dim: int) -> CommitConfig:
        return CommitConfig(
            entries=8,
            written=min(128, max(16, triton.next_power_of_2(writes))),
            columns=min(512, triton.next_power_of_2(head_dim)),
            warps=4,
        )


def sources_call(
    config: DraftConfig, k_idx: Tensor, q_idx: Tensor, num_slots: int, sources: Tensor, slots: Tensor
) -> KernelCall:
    """Fills `sources` [P, T, W + R] with the write entry of its stream whose row each id takes, -1 for the bank, and
    `slots` [P, T, W] with the slots written, -1 where there is none or the token has it already; both int32."""
    streams, tokens, writes = k_idx.shape
    reads = q_idx.shape[2]
    parts = triton.cdiv(writes, config.ids) + triton.cdiv(reads, config.ids)
    options = dict(W=writes, R=reads, BE=config.ids, BX=config.written, num_warps=config.warps)
    args = (k_idx, q_idx, sources, slots, num_slots, tokens)
    return KernelCall(_sources_kernel, (streams * tokens * parts,), args, options)


def draft_call(
    config: DecodeConfig,
    bank: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    sources: Tensor,
    readings: Tensor,
    new_rows: Tensor,
    repeats: Tensor,
) -> KernelCall:
    """Fills `readings` [P, T, D] and `new_rows` [P, T, W, D]; repeats: int64, added to. All are contiguous."""
    (num_slots, head_dim), (streams, tokens, writes) = bank.shape, k_idx.shape
    options = dict(
        D=head_dim,
        W=writes,
        R=q_idx.shape[2],
        BW=triton.next_power_of_2(writes),
        GW=config.rows_w,
        GR=config.rows_r,
        GATES=g.shape[-1] != 1,
        BD=config.columns,
        EARLY=config.early,
        num_warps=config.warps,
        num_stages=1,  # a token reads what an earlier one wrote: no load may be moved ahead of its token
        enable_fp_fusion=False,
    )
    tensors = (bank, k_idx, k_val, v, beta, g, q_idx, q_val, sources, readings, new_rows, repeats)
    programs = streams * triton.cdiv(head_dim, config.columns) if tokens else 0
    return KernelCall(_draft_kernel, (programs,), (*tensors, num_slots, tokens), options)


def commit_call(config: CommitConfig, bank: Tensor, new_rows: Tensor, slots: Tensor, accepted: Tensor) -> KernelCall:
    """Copies into `bank` the rows [P, T, W, D] that serve their slots after accepted [P] tokens. All are contiguous."""
    streams, tokens, writes = slots.shape
    options = dict(
        D=bank.shape[1],
        W=writes,
        BE=config.entries,
        BX=config.written,
        BD=config.columns,
        num_warps=config.warps,
    )
    programs = streams * triton.cdiv(tokens * writes, config.entries)
    args = (bank, new_rows, slots, accepted, bank.shape[0], tokens)
    return KernelCall(_commit_kernel, (programs,), args, options)


def launch_draft(
    bank: Tensor, inputs: Sequence[Tensor], readings: Tensor, new_rows: Tensor, slots: Tensor, repeats: Tensor
) -> None:
    """The draft of contiguous inputs [P, T, *], in the order of the op."""
    k_idx, k_val, v, beta, g, q_idx, q_val = inputs
    (num_slots, head_dim), (streams, tokens, writes), reads = bank.shape, k_idx.shape, q_idx.shape[2]
    config = DraftConfig.from_shapes(streams, writes, reads, head_dim, bank.element_size())
    sources = torch.empty(streams, tokens, writes + reads, dtype=torch.int32, device=bank.device)
    sources_call(config, k_idx, q_idx, num_slots, sources, slots).launch()
    call = draft_call(config.step, bank, k_idx, k_val, v, beta, g, q_idx, q_val, sources, readings, new_rows, repeats)
    call.launch()


def launch_commit(bank: Tensor, new_rows: Tensor, slots: Tensor, accepted: Tensor) -> None:
    """The commit of contiguous tensors."""
    config = CommitConfig.from_shapes(slots.shape[2], bank.shape[1])
    commit_call(config, bank, new_rows, slots, accepted).launch()
