"""Triton kernel of the decode step: one program writes and then reads one token, BD columns of its rows.

Rows are taken G at a time. Row n of a sum goes to partial sum n % G, in the order of n, and at the end neighbouring
partial sums are added pairwise: an order that depends on the number of rows alone, not on BD, the number of warps or
the number of streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall


@triton.jit
def load_ids(p_idx, o_n, num_slots, N: tl.constexpr):
    """Bank rows as int64, and which of them are in the bank."""
    idx = tl.load(p_idx + o_n, mask=o_n < N, other=-1).to(tl.int64)
    return idx, idx.to(tl.uint64, bitcast=True) < num_slots.to(tl.uint64)


@triton.jit
def _load_rounded(p_x, o_n, m_n, dtype: tl.constexpr):
    """In float32, rounded to the bank's dtype."""
    return tl.load(p_x + o_n, mask=m_n, other=0.0).to(dtype).to(tl.float32)


@triton.jit
def _pairwise_sum(x):
    """[N, A] to [1, A], neighbours first; N is a power of two up to 256."""
    for _ in tl.static_range(8):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), axis=1)
    return x


@triton.jit
def _ascend(p_idx, N: tl.constexpr, BN: tl.constexpr):
    """Whether every id is above the one before it, unless that is no slot: then no slot repeats."""
    o_n = tl.arange(0, BN)
    m_n = (o_n > 0) & (o_n < N)
    idx = tl.load(p_idx + o_n, mask=m_n, other=0)
    before = tl.load(p_idx + o_n - 1, mask=m_n, other=-1)
    return tl.max(((before >= 0) & (before >= idx)).to(tl.int32), axis=0) == 0


@triton.jit
def _any_repeat(p_idx, N: tl.constexpr, BN: tl.constexpr, G: tl.constexpr):
    """Whether two of the ids are one slot: compares every pair."""
    o_n = tl.arange(0, BN)
    idx = tl.load(p_idx + o_n, mask=o_n < N, other=-1)
    found = tl.zeros([G, BN], tl.int1)
    for n in range(0, N * tl.num_programs(1), G):  # the grid has one row; not unrolled, as the compiler cannot know it
        o_g = n + tl.arange(0, G)
        later = tl.load(p_idx + o_g, mask=o_g < N, other=-1)
        found |= (later[:, None] == idx[None, :]) & (o_g[:, None] > o_n[None, :]) & (idx[None, :] >= 0)
    return tl.max(tl.max(found.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def _merge(p_idx, p_weight, num_slots, N: tl.constexpr, G: tl.constexpr, dtype: tl.constexpr):
    """Tuples of [G]: the slot's summed weights at its first write, else zero; which are first; and how many are not."""
    ids, valid, totals, firsts = (), (), (), ()
    for n in tl.static_range(0, N, G):
        idx, m_n = load_ids(p_idx, n + tl.arange(0, G), num_slots, N)
        ids += (idx,)
        valid += (m_n,)
        totals += (tl.zeros([G], tl.float32),)
        firsts += (tl.full([G], N, tl.int32),)
    for n in range(N * tl.num_programs(1)):
        slot = tl.load(p_idx + n)
        weight = tl.load(p_weight + n).to(dtype).to(tl.float32)
        new_totals, new_firsts = (), ()
        for i in tl.static_range(len(ids)):
            same = valid[i] & (ids[i] == slot)
            new_totals += (tl.where(same, totals[i] + weight, totals[i]),)
            new_firsts += (tl.where(same, tl.minimum(firsts[i], n), firsts[i]),)
        totals, firsts = new_totals, new_firsts
    merged, keep = (), ()
    repeats = 0
    for i in tl.static_range(len(ids)):
        keep += (valid[i] & (firsts[i] == i * G + tl.arange(0, G)),)
        merged += (tl.where(keep[i], totals[i], 0.0).to(dtype).to(tl.float32),)
        repeats += tl.sum((valid[i] & ~keep[i]).to(tl.int32), axis=0)
    return merged, keep, repeats


@triton.jit
def _write(p_rows, rows, weight, keep, gates, token_gate, v, beta, m_d, GATES: tl.constexpr):
    """The recurrence on tuples of [G, BD] rows and their [G] weights; gates is empty where the token has one gate."""
    dtype: tl.constexpr = rows[0].dtype
    total = tl.zeros(rows[0].shape, tl.float32)
    decayed = ()
    for n in tl.static_range(len(rows)):
        if GATES:
            decayed += (rows[n].to(tl.float32) * tl.exp(tl.where(keep[n], gates[n], 0.0))[:, None],)
        else:
            decayed += (rows[n].to(tl.float32) * tl.exp(token_gate),)
        total = tl.fma(tl.broadcast_to(weight[n][:, None], total.shape), decayed[n], total)
    delta = tl.broadcast_to(beta * (v - _pairwise_sum(total)), total.shape)
    for n in tl.static_range(len(rows)):
        row = tl.fma(tl.broadcast_to(weight[n][:, None], total.shape), delta, decayed[n])
        tl.store(p_rows[n], row.to(dtype), mask=keep[n][:, None] & m_d)


@triton.jit
def decode_token(
    p_k_rows,
    p_new_rows,
    m_k,
    p_q_rows,
    m_q,
    p_k_idx,
    p_k_val,
    p_v,
    p_beta,
    p_g,
    p_q_val,
    p_readings,
    p_repeats,
    num_slots,
    token,
    tile,
    o_d,
    m_d,
    D: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    GW: tl.constexpr,
    GR: tl.constexpr,
    GATES: tl.constexpr,
    BD: tl.constexpr,
    EARLY: tl.constexpr,
    KEEP: tl.constexpr,
):
    """One token's write and then its read: columns o_d [1, BD] of rows at tuples of addresses [G, BD].

    The write rows come from p_k_rows and go to p_new_rows; m_k and m_q are tuples of [G]: which entries have a slot.
    Ids, weights and gates are at the token's; the other inputs are the call's, of which it is number `token`.

    EARLY: the read rows are requested together with the write rows, so that their latencies overlap; after the write
    they come from the nearest cache, whether or not it has written them. KEEP: written rows are to stay in the cache
    rather than rows that are only read.
    """
    STAY: tl.constexpr = "evict_last" if KEEP else ""
    GO: tl.constexpr = "evict_first" if KEEP else ""
    dtype: tl.constexpr = p_readings.dtype.element_ty
    # Everything is requested before anything is waited for.
    k_rows, q_rows, k_weight, q_weight, gates = (), (), (), (), ()
    for n in tl.static_range(len(m_k)):
        k_rows += (tl.load(p_k_rows[n], mask=m_k[n][:, None] & m_d, other=0.0, eviction_policy=STAY),)
    for n in tl.static_range(len(m_q)):
        if EARLY:
            q_rows += (tl.load(p_q_rows[n], mask=m_q[n][:, None] & m_d, other=0.0),)
        else:
            q_rows += (tl.zeros([GR, BD], dtype),)
    token_gate = tl.load(p_g).to(tl.float32)
    for n in tl.static_range(len(m_k)):
        k_weight += (_load_rounded(p_k_val, n * GW + tl.arange(0, GW), m_k[n], dtype),)
        if GATES:
            gates += (tl.load(p_g + n * GW + tl.arange(0, GW), mask=m_k[n], other=0.0).to(tl.float32),)
    beta = tl.load(p_beta + token).to(tl.float32)
    v = _load_rounded(p_v, token * D + o_d, m_d, dtype)
    for n in tl.static_range(len(m_q)):
        q_weight += (_load_rounded(p_q_val, n * GR + tl.arange(0, GR), m_q[n], dtype),)

    repeated = False
    if not _ascend(p_k_idx, W, BW):
        repeated = _any_repeat(p_k_idx, W, BW, GW)
    if repeated:
        merged, keep, repeats = _merge(p_k_idx, p_k_val, num_slots, W, GW, dtype)
        if tile == 0:
            tl.atomic_add(p_repeats, repeats.to(tl.int64), sem="relaxed")
        _write(p_new_rows, k_rows, merged, keep, gates, token_gate, v, beta, m_d, GATES)
    else:
        _write(p_new_rows, k_rows, k_weight, m_k, gates, token_gate, v, beta, m_d, GATES)

    tl.debug_barrier()  # other threads of the program wrote rows that this one reads
    total = tl.zeros([GR, BD], tl.float32)
    m_d = o_d < D * tl.num_programs(1)  # the same; but a compiler that knew it would drop the early request
    for n in tl.static_range(len(m_q)):
        m_row = m_q[n][:, None] & m_d
        row = tl.load(p_q_rows[n], mask=m_row, other=q_rows[n], eviction_policy=GO).to(tl.float32)
        total = tl.fma(tl.broadcast_to(q_weight[n][:, None], total.shape), row, total)
    reading = tl.broadcast_to(_pairwise_sum(total), total.shape)
    o_g = tl.arange(0, GR)[:, None]
    tl.store(p_readings + token * D + o_d + 0 * o_g, reading.to(dtype), mask=(o_g == 0) & m_d)


@triton.jit(do_not_specialize=["num_slots"])
def _decode_step_kernel(
    p_bank,
    p_k_idx,
    p_k_val,
    p_v,
    p_beta,
    p_g,
    p_q_idx,
    p_q_val,
    p_readings,
    p_repeats,
    num_slots,
    D: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
    GW: tl.constexpr,
    GR: tl.constexpr,
    GATES: tl.constexpr,
    BD: tl.constexpr,
    EARLY: tl.constexpr,
    KEEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BW: W as a power of two. GATES: g is [streams, W], not [streams, 1]. EARLY, KEEP: see `decode_token`.

    OVERLAP: the kernel is launched before the one in front of it has ended, and waits for it; the one behind it too.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (D + BD - 1) // BD
    tile = tl.program_id(0) % TILES
    stream = (tl.program_id(0) // TILES).to(tl.int64)
    p_k_idx += stream * W
    p_k_val += stream * W
    p_q_idx += stream * R
    p_q_val += stream * R
    p_g += stream * (W if GATES else 1)
    o_d = tile * BD + tl.arange(0, BD)[None, :]
    m_d = o_d < D

    m_k, p_k_rows, m_q, p_q_rows = (), (), (), ()
    for n in tl.static_range(0, W, GW):
        idx, valid = load_ids(p_k_idx, n + tl.arange(0, GW), num_slots, W)
        m_k += (valid,)
        p_k_rows += (p_bank + idx[:, None] * D + o_d,)
    for n in tl.static_range(0, R, GR):
        idx, valid = load_ids(p_q_idx, n + tl.arange(0, GR), num_slots, R)
        m_q += (valid,)
        p_q_rows += (p_bank + idx[:, None] * D + o_d,)
    decode_token(
        p_k_rows, p_k_rows, m_k, p_q_rows, m_q, p_k_idx, p_k_val, p_v, p_beta, p_g, p_q_val, p_readings, p_repeats,
        num_slots, stream, tile, o_d, m_d, D, W, BW, GW, GR, GATES, BD, EARLY, KEEP,
    )  # fmt: skip


@dataclass(frozen=True)
class DecodeConfig:
    rows_w: int  # decides the order of the sum over the writes; rows_r likewise
    rows_r: int
    columns: int  # these four change no bit
    early: bool
    keep: bool
    warps: int

    @staticmethod
    def from_shapes(streams: int, writes: int, reads: int, head_dim: int, itemsize: int) -> DecodeConfig:
        """itemsize: bytes per element of the bank."""
        rows_w, rows_r = (
            min(triton.next_power_of_2(n), max(8, triton.next_power_of_2(n) // 8)) for n in (writes, reads)
        )
        # Measured on an H200, us per step as graph replay (W = R = 64, 1024 columns of bfloat16): 2 streams 2.08 with
        # pieces of 32 bytes, 2.22 and more with 64; 16 streams 3.33 with 128 bytes, two warps and the early read, 5.64
        # with 32 bytes; 64 streams 5.9 with 128 bytes, one warp and no early read, 7.2 with two and the early read; 256
        # streams 32.4, and 36.2 likewise. Then 256 streams one step behind the other 34.2, 28.4 with written rows kept
        # rather than read ones, but 64 streams, all of whose rows a cache of 60 MB holds, 5.6 and 6.7.
        row_bytes = streams * head_dim * itemsize
        if row_bytes <= 2**13:
            piece, early, warps = 32, True, 1
        elif row_bytes <= 2**16:
            piece, early, warps = 128, True, 2
        else:
            piece, early, warps = 128, False, 1
        return DecodeConfig(
            rows_w=rows_w,
            rows_r=rows_r,
            columns=min(piece // itemsize, triton.next_power_of_2(head_dim)),
            early=early,
            keep=row_bytes * (writes + reads) > 2**25,
            warps=warps * max(1, max(rows_w, rows_r) // 8),
        )


def decode_step_call(
    config: DecodeConfig,
    bank: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    readings: Tensor,
    repeats: Tensor,
) -> KernelCall:
    """Advances `bank` [num_slots, D] and fills `readings` [..., D]; repeats: int64, added to. All are contiguous."""
    num_slots, head_dim = bank.shape
    writes, reads = k_idx.shape[-1], q_idx.shape[-1]
    programs = readings.numel() // head_dim * triton.cdiv(head_dim, config.columns)
    # From Hopper on. Measured on an H200, us per launch of many one behind the other, on rows not in the cache, without
    # and with it: 12.5 and 10.4 with 64 streams, 34.4 and 32.9 with 256.
    overlap = bank.is_cuda and torch.cuda.get_device_capability(bank.device)[0] >= 9
    options = dict(
        D=head_dim,
        W=writes,
        R=reads,
        BW=triton.next_power_of_2(writes),
        GW=config.rows_w,
        GR=config.rows_r,
        GATES=g.shape[-1] != 1,
        BD=config.columns,
        EARLY=config.early,
        KEEP=config.keep,
        OVERLAP=overlap,
        num_warps=config.warps,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )
    tensors = (bank, k_idx, k_val, v, beta, g, q_idx, q_val, readings, repeats)
    return KernelCall(_decode_step_kernel, (programs,), (*tensors, num_slots), options)
