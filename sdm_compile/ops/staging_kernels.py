"""Triton kernels of the staging: one program cleans one token of one stream; see `staging` for what cleaning means.

Backwards likewise: one program per token fetches the gradients of what that token became.
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
    BW: tl.constexpr,
    BR: tl.constexpr,
    BX: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One token. s_k: strides of k_idx, s_kv of k_val, s_b of beta, s_g of g, s_q of q_idx, s_qv of q_val."""
    i = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)  # step * streams + stream, within the slab
    p = chunk % streams
    t = first_token + (chunk // streams) * C + i
    w_here = tl.where(t < tokens, W, 0)  # padding tokens have no writes and no reads
    r_here = tl.where(t < tokens, R, 0)
    row = chunk * C + i
    dtype = p_k_val_out.dtype.element_ty
    o_w = tl.arange(0, BW)
    m_w = o_w < W
    ids = _load_ids(p_k_idx + p * s_kp + t * s_kt + o_w * s_kw, o_w < w_here, num_slots)
    held = ids >= 0
    val = tl.load(p_k_val + p * s_kvp + t * s_kvt + o_w * s_kvw, mask=(o_w < w_here) & held, other=0.0)
    weight = val.to(dtype).to(tl.float32)
    first = o_w
    after = _load_ids(p_k_idx + p * s_kp + t * s_kt + (o_w + 1) * s_kw, o_w + 1 < w_here, num_slots)
    if tl.min(tl.where((ids < after) | (o_w + 1 >= w_here), 1, 0), axis=0) == 0:
        # Not in ascending order, as a top-k gives them, so slots may repeat: the first write of the same slot, and the
        # sum of its weights, over blocks of BX writes.
        first = tl.full([BW], W, tl.int32)
        weight = tl.zeros([BW], tl.float32)
        for x in tl.static_range(0, W, BX):
            o_x = x + tl.arange(0, BX)
            m_x = o_x < w_here
            ids_x = _load_ids(p_k_idx + p * s_kp + t * s_kt + o_x * s_kw, m_x, num_slots)
            val_x = tl.load(p_k_val + p * s_kvp + t * s_kvt + o_x * s_kvw, mask=m_x, other=0.0).to(dtype).to(tl.float32)
            same = held[:, None] & (ids_x[None, :] == ids[:, None])
            first = tl.minimum(first, tl.min(tl.where(same, o_x[None, :], W), axis=1))
            weight += tl.sum(tl.where(same, val_x[None, :], 0.0), axis=1)
    kept = held & (first == o_w)
    tl.store(p_k_idx_out + row * W + o_w, tl.where(kept, ids, -1), mask=m_w)
    tl.store(p_k_val_out + row * W + o_w, tl.where(kept, weight, 0.0).to(dtype), mask=m_w)
    any_held = tl.max(held.to(tl.int32), axis=0) > 0
    beta = tl.load(p_beta + p * s_bp + t * s_bt, mask=t < tokens, other=0.0).to(tl.float32)
    tl.store(p_beta_out + row, tl.where(any_held, beta, 0.0))
    tl.store(p_silent + row, (~any_held).to(tl.int8))
    if GATES == W:
        gate = tl.load(p_g + p * s_gp + t * s_gt + o_w * s_gw, mask=o_w < w_here, other=0.0).to(tl.float32)
        tl.store(p_g_out + row * W + o_w, tl.where(kept, gate, 0.0), mask=m_w)
    else:
        gate = tl.load(p_g + p * s_gp + t * s_gt, mask=t < tokens, other=0.0).to(tl.float32)
        tl.store(p_g_out + row, tl.where(any_held, gate, 0.0))
    if COUNT:
        repeats = tl.sum((held & (first < o_w)).to(tl.int64), axis=0)
        if repeats > 0:
            tl.atomic_add(p_repeats, repeats)
    o_r = tl.arange(0, BR)
    m_r = o_r < R
    ids = _load_ids(p_q_idx + p * s_qp + t * s_qt + o_r * s_qr, o_r < r_here, num_slots)
    read = ids >= 0
    val = tl.load(p_q_val + p * s_qvp + t * s_qvt + o_r * s_qvr, mask=m_r & read, other=0.0)
    tl.store(p_q_idx_out + row * R + o_r, ids, mask=m_r)
    tl.store(p_q_val_out + row * R + o_r, val.to(dtype), mask=m_r)


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
    BW: tl.constexpr,
    BR: tl.constexpr,
    BX: tl.constexpr,
):
    """One token: each write gets the gradient of the first write to its slot. s_k: strides of k_idx, s_q of q_idx.

    The gradients are those of `count` tokens of each stream from the first on. p_silent: None if nobody asks.
    """
    program = tl.program_id(0).to(tl.int64)
    row = _staged_row(program, count, streams, C)
    p, t = program // count, first_token + program % count
    token = p * tokens + t
    o_w = tl.arange(0, BW)
    m_w = o_w < W
    ids = _load_wide_ids(p_k_idx + p * s_kp + t * s_kt + o_w * s_kw, m_w, num_slots)
    held = ids >= 0
    first = tl.full([BW], W, tl.int32)
    for x in tl.static_range(0, W, BX):
        o_x = x + tl.arange(0, BX)
        ids_x = _load_wide_ids(p_k_idx + p * s_kp + t * s_kt + o_x * s_kw, o_x < W, num_slots)
        same = held[:, None] & (ids_x[None, :] == ids[:, None])
        first = tl.minimum(first, tl.min(tl.where(same, o_x[None, :], W), axis=1))
    any_held = tl.max(held.to(tl.int32), axis=0) > 0
    if p_silent is not None:
        tl.store(p_silent + token, (~any_held).to(tl.int8))
    dk_val = tl.load(p_dk_val + row * W + first, mask=held, other=0.0)
    tl.store(p_dk_val_out + token * W + o_w, dk_val.to(p_dk_val_out.dtype.element_ty), mask=m_w)
    dbeta = tl.load(p_dbeta + row, mask=any_held, other=0.0)
    tl.store(p_dbeta_out + token, dbeta.to(p_dbeta_out.dtype.element_ty))
    if GATES == W:
        dg = tl.load(p_dg + row * W + o_w, mask=held & (first == o_w), other=0.0)
        tl.store(p_dg_out + token * W + o_w, dg.to(p_dg_out.dtype.element_ty), mask=m_w)
    else:
        dg = tl.load(p_dg + row, mask=any_held, other=0.0)
        tl.store(p_dg_out + token, dg.to(p_dg_out.dtype.element_ty))
    o_r = tl.arange(0, BR)
    m_r = o_r < R
    read = _load_wide_ids(p_q_idx + p * s_qp + t * s_qt + o_r * s_qr, m_r, num_slots) >= 0
    dq_val = tl.load(p_dq_val + row * R + o_r, mask=read, other=0.0)
    tl.store(p_dq_val_out + token * R + o_r, dq_val.to(p_dq_val_out.dtype.element_ty), mask=m_r)


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
    o_d = tl.program_id(1).to(tl.int64) * BD + tl.arange(0, BD)  # a column's stride may be any
    here = (row < rows) & (t < tokens)
    if SILENT:
        here &= tl.load(p_silent + row, mask=row < rows, other=1) == 0
    at = (p * s_p + t * s_t)[:, None] + o_d[None, :] * s_d
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
    block_w = triton.next_power_of_2(writes)
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
        BW=block_w,
        BR=triton.next_power_of_2(reads),
        BX=min(32, block_w),
        COUNT=repeats is not None,
        num_warps=1 if writes <= 64 else 4,
        enable_fp_fusion=True,
    )
    KernelCall(_stage_token_kernel, (chunk, steps * streams), args, options).launch_again()
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
    block_w = triton.next_power_of_2(writes)
    args = (
        *(dk_val, dbeta, dg, dq_val, k_idx, q_idx, *outs, silent),
        *(tokens, first_token, count, streams, num_slots, *k_idx.stride(), *q_idx.stride()),
    )
    options = dict(
        C=chunk,
        W=writes,
        R=reads,
        GATES=dg.shape[3],
        BW=block_w,
        BR=triton.next_power_of_2(reads),
        BX=min(32, block_w),
        num_warps=1 if writes <= 64 else 4,
    )
    KernelCall(_stage_token_backward_kernel, (streams * count,), args, options).launch_again()


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
    KernelCall(_to_chunks_kernel, grid, args, options).launch_again()


def _from_chunks(x: Tensor, out: Tensor, silent: Tensor | None = None) -> None:
    """x [steps, P, C, D], contiguous, into `out` [P, T, D]; zeros where silent [P, T]."""
    streams, tokens, width = out.shape
    if not out.numel():
        return
    columns = min(1024, triton.next_power_of_2(width))
    _from_chunks_kernel[(streams * tokens, triton.cdiv(width, columns))](
        *(x, out if silent is None else silent, out, tokens, streams, width),
        C=x.shape[2],
        BD=columns,
        SILENT=silent is not None,
        num_warps=1,
    )
