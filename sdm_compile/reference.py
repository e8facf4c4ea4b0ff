"""The meaning of every op, as obvious loops over plain PyTorch: differentiable, any float dtype, never fast.

`write_read` and `decode_step` are SPEC section 1 read aloud; the other functions are one stage each of the chunked form
(section 2), in the shapes that the ops use. Nothing in the library computes with these: they are what tests compare
with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def write_read(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> tuple[Tensor, Tensor]:
    """The token loop: readings [P, T, D] and the final bank, from inputs [P, T, *] and a bank [num_slots, D]."""
    streams, tokens = k_idx.shape[:2]
    readings = []
    bank = memory.clone()
    for p in range(streams):
        for t in range(tokens):
            bank, reading = _token(
                bank, k_idx[p, t], k_val[p, t], v[p, t], beta[p, t], g[p, t], q_idx[p, t], q_val[p, t]
            )
            readings.append(reading)
    if not readings:
        return v.new_zeros(streams, tokens, memory.shape[1]), bank
    return torch.stack(readings).reshape(streams, tokens, -1), bank


def decode_step(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> tuple[Tensor, Tensor]:
    """One token per stream, any leading shape: readings [..., D] and the bank after it."""
    lead = k_idx.shape[:-1]
    one_token = [x.reshape(-1, 1, x.shape[-1]) for x in (k_idx, k_val, v, beta, g, q_idx, q_val)]
    readings, bank = write_read(memory, *one_token)
    return readings.reshape(*lead, memory.shape[1]), bank


def draft(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The token loop on a bank of its own: readings [P, T, D], and of every write entry the row [P, T, W, D] and the
    slot [P, T, W]: zeros and -1 where there is no slot, or an earlier entry of the token has it."""
    streams, tokens, writes = k_idx.shape
    readings, rows, slots = [], [], []
    bank = memory
    for p in range(streams):
        for t in range(tokens):
            bank, reading = _token(
                bank, k_idx[p, t], k_val[p, t], v[p, t], beta[p, t], g[p, t], q_idx[p, t], q_val[p, t]
            )
            readings.append(reading)
            ids = k_idx[p, t].tolist()
            for w, slot in enumerate(ids):
                written = slot >= 0 and slot not in ids[:w]
                slots.append(slot if written else -1)
                rows.append(bank[slot] if written else torch.zeros_like(memory[0]))
    width = memory.shape[1]
    return (
        (torch.stack(readings) if readings else memory.new_zeros(0)).reshape(streams, tokens, width),
        (torch.stack(rows) if rows else memory.new_zeros(0)).reshape(streams, tokens, writes, width),
        torch.tensor(slots, dtype=torch.int32).reshape(streams, tokens, writes),
    )


def commit(memory: Tensor, new_rows: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
    """The bank after the accepted tokens' rows were stored, one after the other."""
    bank = memory.clone()
    for p, count in enumerate(accepted.tolist()):
        for t in range(min(max(count, 0), slots.shape[1])):
            for w, slot in enumerate(slots[p, t].tolist()):
                if slot >= 0:
                    bank[slot] = new_rows[p, t, w]
    return bank


def _token(
    bank: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> tuple[Tensor, Tensor]:
    slots, weights, gates = merge_repeated(k_idx, k_val, g)
    if len(slots):
        rows = gates.exp()[:, None] * bank[slots]
        delta = beta * (v - weights @ rows)
        bank = bank.index_put((slots,), rows + weights[:, None] * delta)
    read = q_idx >= 0
    return bank, q_val[read] @ bank[q_idx[read].long()]


def merge_repeated(k_idx: Tensor, k_val: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token's distinct slots, in order of first appearance: weights add, the first one's gate counts."""
    places: dict[int, list[int]] = {}
    for w, slot in enumerate(k_idx.tolist()):
        if slot >= 0:
            places.setdefault(slot, []).append(w)
    gates = g.expand(k_idx.shape)
    slots = torch.tensor(list(places), dtype=torch.int64, device=k_idx.device)
    weights = [torch.stack([k_val[w] for w in ws]).sum() for ws in places.values()]
    firsts = [gates[ws[0]] for ws in places.values()]
    empty = k_val.new_zeros(0)
    return slots, torch.stack(weights) if weights else empty, torch.stack(firsts) if firsts else empty


def stage_inputs(
    k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor, chunk_size: int
) -> tuple[Tensor, ...]:
    """Inputs [P, T, *] to time-major chunks [steps, P, C, *], cleaned: see the stage op for what that means."""
    streams, tokens, writes = k_idx.shape
    steps = -(-tokens // chunk_size)

    def empty(width: int, like: Tensor, fill: int) -> list[Tensor]:
        return [like.new_full((width,), fill) for _ in range(steps * streams * chunk_size)]

    k_idx_out, q_idx_out = empty(writes, k_idx, -1), empty(q_idx.shape[2], q_idx, -1)
    k_val_out, q_val_out = empty(writes, k_val, 0), empty(q_val.shape[2], q_val, 0)
    v_out, beta_out, g_out = empty(v.shape[2], v, 0), empty(1, beta, 0), empty(g.shape[2], g, 0)
    for p in range(streams):
        for t in range(tokens):
            at = ((t // chunk_size) * streams + p) * chunk_size + t % chunk_size
            ids = k_idx[p, t].tolist()
            first = {slot: w for w, slot in reversed(list(enumerate(ids))) if slot >= 0}
            keep = [w for w in range(writes) if ids[w] >= 0 and first[ids[w]] == w]
            same = [[x for x in range(writes) if ids[x] == ids[w]] for w in keep]
            if keep:
                k_idx_out[at] = k_idx_out[at].index_put((torch.tensor(keep),), k_idx[p, t][keep])
                sums = torch.stack([k_val[p, t][s].sum() for s in same])
                k_val_out[at] = k_val_out[at].index_put((torch.tensor(keep),), sums)
                v_out[at], beta_out[at] = v[p, t], beta[p, t]
                wide = keep if g.shape[2] == writes and writes > 1 else [0]
                g_out[at] = g_out[at].index_put((torch.tensor(wide),), g[p, t][wide])
            read = (q_idx[p, t] >= 0).nonzero()[:, 0]
            q_idx_out[at] = q_idx_out[at].index_put((read,), q_idx[p, t][read])
            q_val_out[at] = q_val_out[at].index_put((read,), q_val[p, t][read])
    outs = (k_idx_out, k_val_out, v_out, beta_out, g_out, q_idx_out, q_val_out)
    widths = (writes, writes, v.shape[2], 1, g.shape[2], q_idx.shape[2], q_idx.shape[2])
    likes = (k_idx, k_val, v, beta, g, q_idx, q_val)
    return tuple(
        (torch.stack(o) if o else like.new_zeros(0)).reshape(steps, streams, chunk_size, width)
        for o, like, width in zip(outs, likes, widths, strict=True)
    )


def unstage_readings(readings: Tensor, tokens: int) -> Tensor:
    """Time-major readings [steps, P, C, D] back to [P, T, D]."""
    _, streams, chunk, _ = readings.shape
    rows = [[readings[t // chunk, p, t % chunk] for t in range(tokens)] for p in range(streams)]
    if not tokens or not streams:
        return readings.new_zeros(streams, tokens, readings.shape[3])
    return torch.stack([torch.stack(r) for r in rows])


def phase1(k_idx: Tensor, k_val: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor) -> tuple[Tensor, ...]:
    """Phase 1 of staged chunks [steps, P, C, *]: SPEC section 2's sums, each written as the sum that it is.

    Returns (k_eff, q_w, write_w, A, QK, group_decay, order, group_start, group_slot).
    """
    lead = k_idx.shape[:2]
    chunks = [
        _phase1_chunk(*(x[s, p] for x in (k_idx, k_val, g, q_idx, q_val)))
        for s in range(lead[0])
        for p in range(lead[1])
    ]
    if not chunks:  # only the shapes are left: those of a chunk without slots
        silent = _phase1_chunk(*(x.new_full(x.shape[2:], -1) for x in (k_idx, k_val, g, q_idx, q_val)))
        return tuple(field.new_empty(*lead, *field.shape) for field in silent)
    return tuple(torch.stack(field).reshape(*lead, *field[0].shape) for field in zip(*chunks, strict=True))


def _phase1_chunk(k_idx: Tensor, k_val: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor) -> tuple[Tensor, ...]:
    chunk, writes = k_idx.shape
    reads = q_idx.shape[1]
    gates = g.expand(chunk, writes)
    groups: dict[int, list[tuple[int, int]]] = {}
    for i in range(chunk):
        for w in range(writes):
            if k_idx[i, w] >= 0:
                groups.setdefault(int(k_idx[i, w]), []).append((i, w))
    zero = gates.new_zeros(())

    def gate_sum(slot: int, after: int, until: int) -> Tensor:
        """The slot's gates of tokens m with after < m <= until."""
        return sum((gates[m, w] for m, w in groups.get(slot, []) if after < m <= until), start=zero)

    k_eff = [[zero for _ in range(writes)] for _ in range(chunk)]
    write_w = [[zero for _ in range(writes)] for _ in range(chunk)]
    q_w = [[zero for _ in range(reads)] for _ in range(chunk)]
    a = [[zero for _ in range(chunk)] for _ in range(chunk)]
    qk = [[zero for _ in range(chunk)] for _ in range(chunk)]
    for slot, group in groups.items():
        for i, w in group:
            k_eff[i][w] = k_val[i, w] * gate_sum(slot, -1, i).exp()
            write_w[i][w] = k_val[i, w] * gate_sum(slot, i, chunk).exp()
            for j, x in group:
                if j < i:
                    a[i][j] = a[i][j] + k_val[i, w] * k_val[j, x] * gate_sum(slot, j, i).exp()
    for i in range(chunk):
        for r in range(reads):
            slot = int(q_idx[i, r])
            if slot < 0:
                continue
            q_w[i][r] = q_val[i, r] * gate_sum(slot, -1, i).exp()
            for j, x in groups.get(slot, []):
                if j <= i:
                    qk[i][j] = qk[i][j] + q_val[i, r] * k_val[j, x] * gate_sum(slot, j, i).exp()

    entries = chunk * writes
    order, start, slots, decay = [-1] * entries, [0] * (entries + 1), [-1] * entries, [zero + 1] * entries
    place = 0
    for ordinal, slot in enumerate(sorted(groups)):
        start[ordinal], slots[ordinal], decay[ordinal] = place, slot, gate_sum(slot, -1, chunk).exp()
        for i, w in groups[slot]:
            order[place] = i * writes + w
            place += 1
    start[len(groups) :] = [place] * (entries + 1 - len(groups))

    def grid(rows: list[list[Tensor]]) -> Tensor:
        return torch.stack([torch.stack(row) for row in rows])

    return (
        *(grid(rows) for rows in (k_eff, q_w, write_w, a, qk)),
        torch.stack(decay),
        *(torch.tensor(x, dtype=torch.int32, device=k_idx.device) for x in (order, start, slots)),
    )


def solve(a: Tensor, qk: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """X = (I + diag(beta) tril(A, -1))^-1 and QX = QK X, for [..., C, C] and beta [..., C, 1]."""
    x = torch.linalg.inv(torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) + beta * a.tril(-1))
    return x, qk.tril() @ x


def token_gather(bank: Tensor, k_idx: Tensor, k_eff: Tensor, q_idx: Tensor, q_w: Tensor) -> tuple[Tensor, Tensor]:
    """retrieved and inter [P, C, D] of one step: the weighted sums of the bank's rows at the write and read slots."""
    return _weighted_rows(bank, k_idx, k_eff), _weighted_rows(bank, q_idx, q_w)


def _weighted_rows(bank: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for ids, ws in zip(idx.reshape(-1, idx.shape[-1]), weights.reshape(-1, idx.shape[-1]), strict=True):
        keep = ids >= 0
        rows.append(ws[keep] @ bank[ids[keep].long()].to(weights.dtype))
    out = torch.stack(rows) if rows else weights.new_zeros(0)
    return out.reshape(*idx.shape[:-1], bank.shape[1])


def dual_matmul(
    x: Tensor, qx: Tensor, v: Tensor, beta: Tensor, retrieved: Tensor, inter: Tensor
) -> tuple[Tensor, Tensor]:
    """delta = X u and readings = QX u + inter with u = beta (v - retrieved), all [P, C, D]."""
    u = beta * (v - retrieved)
    return x @ u, qx @ u + inter


def decay_write(
    bank: Tensor,
    delta: Tensor,
    write_w: Tensor,
    group_decay: Tensor,
    order: Tensor,
    group_start: Tensor,
    group_slot: Tensor,
) -> Tensor:
    """The bank after one step: each written slot's row decayed, plus its group's weighted deltas, in token order."""
    out = bank
    for p in range(delta.shape[0]):
        for o in range(group_slot.shape[1]):
            slot = int(group_slot[p, o])
            if slot < 0:
                continue
            row = group_decay[p, o] * bank[slot]
            for place in range(int(group_start[p, o]), int(group_start[p, o + 1])):
                i, w = divmod(int(order[p, place]), write_w.shape[2])
                row = row + write_w[p, i, w] * delta[p, i]
            out = out.index_put((torch.tensor(slot),), row)
    return out


def snapshot_quantize(rows: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Rows [n, D] as `mode` stores them, and one float32 scale per row (none for "none" and "bf16")."""
    no_scale = torch.empty(0, dtype=torch.float32)
    if mode == "none":
        return rows.clone(), no_scale
    if mode == "bf16":
        return rows.to(torch.bfloat16), no_scale
    top = {"fp8": 448.0, "int4": 7.0}[mode]
    payload, scales = [], []
    for row in rows.float():
        scale = row.abs().max() / top
        scaled = row / (scale if scale != 0 else 1.0)
        scales.append(scale)
        if mode == "fp8":
            payload.append(scaled.clamp(-top, top).to(torch.float8_e4m3fn))
        else:
            codes = [int(c) + 8 for c in scaled.clamp(-top, top).round()] + [8] * (len(row) % 2)
            payload.append(torch.tensor([lo + 16 * hi for lo, hi in zip(codes[::2], codes[1::2], strict=True)]))
    dtype, width = {"fp8": (torch.float8_e4m3fn, rows.shape[1]), "int4": (torch.uint8, (rows.shape[1] + 1) // 2)}[mode]
    if not payload:
        return torch.empty(0, width, dtype=dtype), no_scale
    return torch.stack(payload).to(dtype), torch.stack(scales)


def snapshot_dequantize(payload: Tensor, scales: Tensor, mode: str, width: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, D] that a snapshot stands for, in `dtype`."""
    if mode in ("none", "bf16"):
        return payload.to(dtype)
    if mode == "fp8":
        return (payload.float() * scales[:, None]).to(dtype)
    codes = torch.stack([payload % 16, payload // 16], dim=-1).flatten(1)[:, :width]
    return ((codes.float() - 8) * scales[:, None]).to(dtype)


def product_key_topk(scores: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """SPEC section 6's rule, row by row: values and ascending indices [..., k] of scores [..., sum(factors)]."""
    lead, width = scores.shape[:-1], sum(factors)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    chosen = [_topk_row(row, factors, k) for row in wide.detach().reshape(-1, width)]
    indices = torch.tensor(chosen, dtype=torch.int64).reshape(*lead, k)
    columns = torch.unravel_index(indices, tuple(factors))
    picked = [part.gather(-1, c) for part, c in zip(wide.split(list(factors), -1), columns, strict=True)]
    return sum(picked[1:], start=picked[0]).to(scores.dtype), indices


def _topk_row(scores: Tensor, factors: Sequence[int], k: int) -> list[int]:
    first, *others = scores.split(list(factors))
    best = _best_first(list(enumerate(first.tolist())))[:k]
    for part in others:
        ranked = _best_first(list(enumerate(part.tolist())))
        candidates = []
        for i, (slot, score) in enumerate(best):
            sums = scores.new_tensor(score) + scores.new_tensor([s for _, s in ranked])
            for j, (column, _) in enumerate(ranked):
                if (i + 1) * (j + 1) <= k:
                    candidates.append((slot * len(ranked) + column, float(sums[j])))
        best = _best_first(candidates)[:k]
    return sorted(slot for slot, _ in best)


def product_key_topk_exhaustive(scores: Tensor, factors: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k best of all slots of one row [sum(factors)], every slot scored: what the rule must find.

    Of finite scores, the rule finds the same ones, and the same slots where the sums are exact; where rounding makes
    two sums equal, the rule may keep the slot with the larger id.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    first, *others = wide.split(list(factors))
    sums = first
    for part in others:
        sums = (sums[:, None] + part).flatten()
    indices = torch.tensor(sorted(slot for slot, _ in _best_first(list(enumerate(sums.tolist())))[:k]))
    return sums[indices].to(scores.dtype), indices


def _best_first(scored: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """(id, score) pairs by descending score, NaN last, equal scores by ascending id."""
    return sorted(scored, key=lambda pair: (1, 0.0, pair[0]) if math.isnan(pair[1]) else (0, -pair[1], pair[0]))
