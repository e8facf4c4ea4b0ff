"""Triton kernels of the staging: one program cleans a few tokens of one stream; see `staging` for what cleaning means.

Backwards likewise: one program fetches the gradients of what a few tokens became.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .layout import Staged

ANY_SLOT = 2**62  # ids are below, whatever the bank


@triton.jit
def _load_wide_ids(p_ids, mask, num_slots):
    """Slot ids as int64, -1 for every one that is no row of the bank."""
    ids = tl.load(p_ids, mask=mask, other=-1).to(tl.int64)
    return tl.where((ids < 0) | (ids >= num_slots), -1, ids)


@triton.jit
def _along(places, stride):
    """How far behind the first one elements lie: a stride may be any, so that int32 may be too short."""
    return places.to(tl.int64) * stride


@triton.jit
def _load_ids(p_ids, mask, num_slots):
    """The same as int32, which counts the rows of every bank."""
    return _load_wide_ids(p_ids, mask, num_slots).to(tl.int32)


@triton.jit(do_not_specialize=["tokens", "first_token"])
def _stage_token_kernel(
    p_k_idx,
    p_k_val,
    p_beta,
    p_g,
    p_q_idx,
    p_q_val,
    p_k_idx_out,
    p_k_val_out,
    p_beta_out,
    p_g_out,
    p_q_idx_out,
    p_q_val_out,
    p_silent,
    p_repeats,
    tokens,
    first_token,
    streams,
    num_slots,
    s_kp,
    s_kt,
    s_kw,
    s_kvp,
    s_kvt,
    s_kvw,
    s_bp,
    s_bt,
    s_gp,
    s_gt,
    s_gw,
    s_qp,
    s_qt,
    s_qr,
    s_qvp,
    s_qvt,
    s_qvr,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    GATES: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
    BX: tl.constexpr,
    COUNT: tl.constexpr,
):
    """BT tokens. s_k: strides of k_idx, s_kv of k_val, s_b of beta, s_g of g, s_q of q_idx, s_qv of q_val."""
    o_i = tl.program_id(0) * BT + tl.arange(0, BT)
    chunk = tl.program_id(1).to(tl.int64)  # step * streams + stream, within the slab
    p = chunk % streams
    t = first_token + (chunk // streams) * C + o_i
    m_i = o_i < C
    here = m_i & (t < tokens)  # padding tokens have no writes and no reads
    row = chunk * C + o_i
    dtype = p_k_val_out.dtype.element_ty
    o_w = tl.arange(0, BW)[None, :]
    m_w = here[:, None] & (o_w < W)
    out_w, m_out_w = row[:, None] * W + o_w, m_i[:, None] & (o_w < W)
    at_k, at_kv = (p * s_kp + t * s_kt)[:, None], (p * s_kvp + t * s_kvt)[:, None]
    ids = _load_ids(p_k_idx + at_k + _along(o_w, s_kw), m_w, num_slots)
    held = ids >= 0
    val = tl.load(p_k_val + at_kv + _along(o_w, s_kvw), mask=m_w & held, other=0.0)
    weight = val.to(dtype).to(tl.float32)
    first = tl.broadcast_to(o_w, [BT, BW])
    if not _ascending(p_k_idx + at_k, ids, here, num_slots, s_kw, W, BW):
        # So slots may repeat: the first write of the same slot, and the sum of its weights, over blocks of BX writes.
        first = tl.full([BT, BW], W, tl.int32)
        weight = tl.zeros([BT, BW], tl.float32)
        for x in tl.static_range(0, W, BX):
            o_x = x + tl.arange(0, BX)[None, :]
            m_x = here[:, None] & (o_x < W)
            ids_x = _load_ids(p_k_idx + at_k + _along(o_x, s_kw), m_x, num_slots)
            val_x = tl.load(p_k_val + at_kv + _along(o_x, s_kvw), mask=m_x, other=0.0).to(dtype).to(tl.float32)
            same = held[:, :, None] & (ids_x[:, None, :] == ids[:, :, None])
            first = tl.minimum(first, tl.min(tl.where(same, o_x[:, None, :], W), axis=2))
            weight += tl.sum(tl.where(same, val_x[:, None, :], 0.0), axis=2)
    kept = held & (first == o_w)
    tl.store(p_k_idx_out + out_w, tl.where(kept, ids, -1), mask=m_out_w)
    tl.store(p_k_val_out + out_w, tl.where(kept, weight, 0.0).to(dtype), mask=m_out_w)
    any_held = tl.max(held.to(tl.int32), axis=1) > 0
    beta = tl.load(p_beta + p * s_bp + t * s_bt, mask=here, other=0.0).to(tl.float32)
    tl.store(p_beta_out + row, tl.where(any_held, beta, 0.0), mask=m_i)
    tl.store(p_silent + row, (~any_held).to(tl.int8), mask=m_i)
    if GATES == W:
        gate = tl.load(p_g + (p * s_gp + t * s_gt)[:, None] + _along(o_w, s_gw), mask=m_w, other=0.0).to(tl.float32)
        tl.store(p_g_out + out_w, tl.where(kept, gate, 0.0), mask=m_out_w)
    else:
        gate = tl.load(p_g + p * s_gp + t * s_gt, mask=here, other=0.0).to(tl.float32)
        tl.store(p_g_out + row, tl.where(any_held, gate, 0.0), mask=m_i)
    if COUNT:
        repeats = tl.sum(tl.sum((held & (first < o_w)).to(tl.int64), axis=1), axis=0)
        if repeats > 0:
            tl.atomic_add(p_repeats, repeats)
    o_r = tl.arange(0, BR)[None, :]
    m_r = here[:, None] & (o_r < R)
    ids = _load_ids(p_q_idx + (p * s_qp + t * s_qt)[:, None] + _along(o_r, s_qr), m_r, num_slots)
    val = tl.load(p_q_val + (p * s_qvp + t * s_qvt)[:, None] + _along(o_r, s_qvr), mask=m_r & (ids >= 0), other=0.0)
    out_r, m_out_r = row[:, None] * R + o_r, m_i[:, None] & (o_r < R)
    tl.store(p_q_idx_out + out_r, ids, mask=m_out_r)
    tl.store(p_q_val_out + out_r, val.to(dtype), mask=m_out_r)


@triton.jit
def _ascending(p_ids, ids, here, num_slots, s_w, W: tl.constexpr, BW: tl.constexpr):
    """Whether each token's ids [BT, BW], which begin at p_ids [BT, 1], ascend as a top-k gives them: none repeats."""
    o_w = tl.arange(0, BW)[None, :] + 1
    after = _load_wide_ids(p_ids + _along(o_w, s_w), here[:, None] & (o_w < W), num_slots)
    ascends = (ids < after) | (o_w >= W) | ~here[:, None]
    return tl.min(tl.min(ascends.to(tl.int32), axis=1), axis=0) != 0


@triton.jit
def _staged_row(token, tokens, streams, C: tl.constexpr):
    """Where token p * tokens + t of the inputs stands among the rows of [steps, P, C]."""
    p, t = token // tokens, token % tokens
    return ((t // C) * streams + p) * C + t % C


@triton.jit(do_not_specialize=["tokens", "first_token", "count"])
def _stage_token_backward_kernel(
    p_dk_val,
    p_dbeta,
    p_dg,
    p_dq_val,
    p_k_idx,
    p_q_idx,
    p_dk_val_out,
    p_dbeta_out,
    p_dg_out,
    p_dq_val_out,
    p_silent,
    tokens,
    first_token,
    count,
    streams,
    num_slots,
    s_kp,
    s_kt,
    s_kw,
    s_qp,
    s_qt,
    s_qr,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    GATES: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
    BX: tl.constexpr,
):
    """BT tokens: each write gets the gradient of the first write to its slot. s_k: strides of k_idx, s_q of q_idx.

    The gradients are those of `count` tokens of each stream from the first on. p_silent: None if nobody asks.
    """
    number = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    here = number < streams * count
    row = _staged_row(number, count, streams, C)
    p, t = number // count, first_token + number % count
    token = p * tokens + t
    o_w = tl.arange(0, BW)[None, :]
    m_w = here[:, None] & (o_w < W)
    at_k = (p * s_kp + t * s_kt)[:, None]
    ids = _load_wide_ids(p_k_idx + at_k + _along(o_w, s_kw), m_w, num_slots)
    held = ids >= 0
    first = tl.broadcast_to(o_w, [BT, BW])
    if not _ascending(p_k_idx + at_k, ids, here, num_slots, s_kw, W, BW):
        first = tl.full([BT, BW], W, tl.int32)
        for x in tl.static_range(0, W, BX):
            o_x = x + tl.arange(0, BX)[None, :]
            ids_x = _load_wide_ids(p_k_idx + at_k + _along(o_x, s_kw), here[:, None] & (o_x < W), num_slots)
            same = held[:, :, None] & (ids_x[:, None, :] == ids[:, :, None])
            first = tl.minimum(first, tl.min(tl.where(same, o_x[:, None, :], W), axis=2))
    any_held = tl.max(held.to(tl.int32), axis=1) > 0
    if p_silent is not None:
        tl.store(p_silent + token, (~any_held).to(tl.int8), mask=here)
    out_w = token[:, None] * W + o_w
    dk_val = tl.load(p_dk_val + row[:, None] * W + first, mask=held, other=0.0)
    tl.store(p_dk_val_out + out_w, dk_val.to(p_dk_val_out.dtype.element_ty), mask=m_w)
    dbeta = tl.load(p_dbeta + row, mask=any_held, other=0.0)
    tl.store(p_dbeta_out + token, dbeta.to(p_dbeta_out.dtype.element_ty), mask=here)
    if GATES == W:
        dg = tl.load(p_dg + row[:, None] * W + o_w, mask=held & (first == o_w), other=0.0)
        tl.store(p_dg_out + out_w, dg.to(p_dg_out.dtype.element_ty), mask=m_w)
    else:
        dg = tl.load(p_dg + row, mask=any_held, other=0.0)
        tl.store(p_dg_out + token, dg.to(p_dg_out.dtype.element_ty), mask=here)
    o_r = tl.arange(0, BR)[None, :]
    m_r = here[:, None] & (o_r < R)
    read = _load_wide_ids(p_q_idx + (p * s_qp + t * s_qt)[:, None] + _along(o_r, s_qr), m_r, num_slots) >= 0
    dq_val = tl.load(p_dq_val + row[:, None] * R + o_r, mask=read, other=0.0)
    tl.store(p_dq_val_out + token[:, None] * R + o_r, dq_val.to(p_dq_val_out.dtype.element_ty), mask=m_r)


@triton.jit(do_not_specialize=["rows", "tokens", "first_token"])
def _to_chunks_kernel(
    p_x,
    p_silent,
    p_out,
    rows,
    tokens,
    first_token,
    streams,
    s_p,
    s_t,
    s_d,
    D,
    C: tl.constexpr,
    B: tl.constexpr,
    BD: tl.constexpr,
    SILENT: tl.constexpr,
):
    """[P, T, D] to [steps, P, C, D] in the dtype of `out`; zeros for padding, and with SILENT for silent tokens.

    B of `rows` rows.
    """
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    chunk = row // C
    p = chunk % streams
    t = first_token + (chunk // streams) * C + row % C
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    here = (row < rows) & (t < tokens)
    if SILENT:
        here &= tl.load(p_silent + row, mask=row < rows, other=1) == 0
    at = (p * s_p + t * s_t)[:, None] + _along(o_d[None, :], s_d)
    x = tl.load(p_x + at, mask=here[:, None] & (o_d < D)[None, :], other=0.0)
    m_out = (row < rows)[:, None] & (o_d < D)[None, :]
    tl.store(p_out + row[:, None] * D + o_d[None, :], x.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _from_chunks_kernel(
    p_staged, p_silent, p_out, tokens, streams, D, C: tl.constexpr, BD: tl.constexpr, SILENT: tl.constexpr
):
    """[steps, P, C, D] to [P, T, D] in the dtype of `out`; with SILENT zeros for silent tokens."""
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    columns = D
    if SILENT:
        columns = tl.where(tl.load(p_silent + token) != 0, 0, D)
    row = _staged_row(token, tokens, streams, C)
    x = tl.load(p_staged + row * D + o_d, mask=o_d < columns, other=0.0)
    tl.store(p_out + token * D + o_d, x.to(p_out.dtype.element_ty), mask=o_d < D)


def _token_blocks(writes: int, reads: int) -> dict[str, int]:
    """How many tokens a program takes, as blocks of how many writes and reads, compared with how many at a time."""
    block_w, block_r = triton.next_power_of_2(writes), triton.next_power_of_2(reads)
    tokens = max(1, 128 // max(block_w, block_r))
    compared = max(1, min(32, block_w) // tokens)
    return dict(BT=tokens, BW=block_w, BR=block_r, BX=compared, num_warps=1 if writes <= 64 else 4)


def launch_stage_inputs(
    inputs: Sequence[Tensor],
    staged: Staged,
    silent: Tensor,
    repeats: Tensor | None,
    num_slots: int,
    first_token: int = 0,
) -> None:
    """Fills `staged` [steps, P, C, *] with the tokens of `inputs` [P, T, *] from `first_token` on, any strides.

    Args:
        silent: [steps, P, C] int8, scratch. repeats: the device's count of repeated slots, or None not to count.
    """
    k_idx, k_val, v, beta, g, q_idx, q_val = inputs
    steps, streams, chunk, writes = staged.k_idx.shape
    reads, tokens = q_idx.shape[2], k_idx.shape[1]
    if not steps or not streams:
        return
    blocks = _token_blocks(writes, reads)
    args = (
        *(k_idx, k_val, beta, g, q_idx, q_val),
        *(staged.k_idx, staged.k_val, staged.beta, staged.g, staged.q_idx, staged.q_val, silent),
        silent if repeats is None else repeats,
        *(tokens, first_token, streams, num_slots),
        *(*k_idx.stride(), *k_val.stride(), *beta.stride()[:2], *g.stride(), *q_idx.stride(), *q_val.stride()),
    )
    options = dict(
        C=chunk,
        W=writes,
        R=reads,
        GATES=g.shape[2],
        **blocks,
        COUNT=repeats is not None,
        enable_fp_fusion=True,
    )
    KernelCall(_stage_token_kernel, (triton.cdiv(chunk, blocks["BT"]), steps * streams), args, options).launch()
    _to_chunks(v, staged.v, first_token, silent)


def launch_stage_inputs_bwd(
    grads: Sequence[Tensor], k_idx: Tensor, q_idx: Tensor, outs: Sequence[Tensor], silent: Tensor
) -> None:
    """Fills `outs` [P, T, *] from `grads` [steps, P, C, *], contiguous; both of k_val, v, beta, g and q_val.

    Args:
        k_idx, q_idx: [P, T, W] and [P, T, R], the inputs' own, any strides. silent: [P, T] int8, scratch.
    """
    dk_val, dv, *others = grads
    dk_val_out, dv_out, *others_out = outs
    launch_stage_tokens_bwd((dk_val, *others), k_idx, q_idx, (dk_val_out, *others_out), ANY_SLOT, silent=silent)
    _from_chunks(dv, dv_out, silent)


def launch_stage_tokens_bwd(
    grads: Sequence[Tensor],
    k_idx: Tensor,
    q_idx: Tensor,
    outs: Sequence[Tensor],
    num_slots: int,
    first_token: int = 0,
    silent: Tensor | None = None,
) -> None:
    """As `launch_stage_inputs_bwd`, of all inputs but v, for the tokens from the first on that `grads` are of.

    num_slots: of the bank; ids at or above it are no slots. silent: [P, T] int8, which tokens have no write.
    """
    dk_val, dbeta, dg, dq_val = grads
    streams, tokens, writes = k_idx.shape
    reads, chunk = q_idx.shape[2], dk_val.shape[2]
    count = min(tokens - first_token, dk_val.shape[0] * chunk)
    if not streams or not count:
        return
    blocks = _token_blocks(writes, reads)
    args = (
        *(dk_val, dbeta, dg, dq_val, k_idx, q_idx, *outs, silent),
        *(tokens, first_token, count, streams, num_slots, *k_idx.stride(), *q_idx.stride()),
    )
    options = dict(
        C=chunk,
        W=writes,
        R=reads,
        GATES=dg.shape[3],
        **blocks,
    )
    KernelCall(_stage_token_backward_kernel, (triton.cdiv(streams * count, blocks["BT"]),), args, options).launch()


def launch_unstage_readings(readings: Tensor, out: Tensor) -> None:
    """Contiguous [steps, P, C, D] to [P, T, D]."""
    _from_chunks(readings, out)


def launch_unstage_readings_bwd(dreadings: Tensor, out: Tensor, first_token: int = 0) -> None:
    """The tokens of [P, T, D], any strides, from the first on, to [steps, P, C, D]."""
    _to_chunks(dreadings, out, first_token)


def _to_chunks(x: Tensor, out: Tensor, first_token: int = 0, silent: Tensor | None = None) -> None:
    """The tokens of x [P, T, D] from the first on into `out` [steps, P, C, D]; zeros where silent [steps, P, C]."""
    steps, streams, chunk, width = out.shape
    if not out.numel():
        return
    columns = min(1024, triton.next_power_of_2(width))
    rows, block = steps * streams * chunk, 1024 // columns
    args = (x, out if silent is None else silent, out, rows, x.shape[1], first_token, streams, *x.stride(), width)
    options = dict(C=chunk, B=block, BD=columns, SILENT=silent is not None, num_warps=1)
    grid = (triton.cdiv(rows, block), triton.cdiv(width, columns))
    KernelCall(_to_chunks_kernel, grid, args, options).launch()


def _from_chunks(x: Tensor, out: Tensor, silent: Tensor | None = None) -> None:
    """x [steps, P, C, D], contiguous, into `out` [P, T, D]; zeros where silent [P, T]."""
    streams, tokens, width = out.shape
    if not out.numel():
        return
    columns = min(1024, triton.next_power_of_2(width))
    args = (x, out if silent is None else silent, out, tokens, streams, width)
    options = dict(C=x.shape[2], BD=columns, SILENT=silent is not None, num_warps=1)
    KernelCall(_from_chunks_kernel, (streams * tokens, triton.cdiv(width, columns)), args, options).launch()
