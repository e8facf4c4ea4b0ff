"""Bank rows on the CPU: the sums, dots and scatters that the stages share, without a loop over tokens or slots.

Ids are [..., n] with a weight each and one x [..., D] for the n of them. A negative id is skipped, whatever its weight.
Sums are taken in the weights' dtype (the accumulate dtype), each by one thread in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


def segment_sums(x: Tensor, row: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
    """[S, D]: for each segment starts[s] to starts[s + 1] the sum of weights [n] times x[row [n]]."""
    if not len(row) or not x.shape[0]:
        return x.new_zeros(len(starts) - 1, x.shape[1])
    return embedding_bag(row, x, starts, mode="sum", per_sample_weights=weights, include_last_offset=True)


def load_rows(bank: Tensor, idx: Tensor, dtype: torch.dtype) -> Tensor:
    """bank[idx] as [..., n, D] in `dtype`; zeros where the id is negative."""
    if not bank.shape[0]:
        return torch.zeros((*idx.shape, bank.shape[1]), dtype=dtype)
    rows = bank.index_select(0, idx.clamp_min(0).flatten()).view(*idx.shape, bank.shape[1])
    return rows.to(dtype).masked_fill_((idx < 0).unsqueeze(-1), 0)


def store_rows_(bank: Tensor, slots: Tensor, rows: Tensor) -> None:
    """bank[slots] = rows, rounded to the bank's dtype; slots are distinct and not negative."""
    bank.index_copy_(0, slots.long(), rows.to(bank.dtype))


def weighted_rows(bank: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """[..., D]: sum over n of weights times bank[idx]."""
    if bank.dtype != weights.dtype:
        rows = load_rows(bank, idx, weights.dtype)
        return torch.matmul(weights.masked_fill(idx < 0, 0).unsqueeze(-2), rows).squeeze(-2)
    keep = idx >= 0
    starts = torch.zeros(idx[..., 0].numel() + 1, dtype=idx.dtype)
    starts[1:] = keep.sum(-1).flatten().cumsum(0)
    return segment_sums(bank, idx[keep], weights[keep], starts).view(*idx.shape[:-1], bank.shape[1])


def row_dots(bank: Tensor, idx: Tensor, x: Tensor) -> Tensor:
    """[..., n]: the dot of each bank[idx] with its x, in x's dtype."""
    dots = torch.matmul(load_rows(bank, idx, x.dtype), x.unsqueeze(-1)).squeeze(-1)
    return dots.masked_fill_(idx < 0, 0)


def add_rows_(bank: Tensor, idx: Tensor, weights: Tensor, x: Tensor) -> None:
    """bank[idx] += weights * x, each bank row read and rounded once."""
    flat = idx.flatten()
    keep = (flat >= 0).nonzero()[:, 0]
    slots, place = flat[keep].sort(stable=True)
    entry = keep[place]
    touched, counts = slots.unique_consecutive(return_counts=True)
    starts = torch.zeros(len(touched) + 1, dtype=torch.int64)
    starts[1:] = counts.cumsum(0)
    sums = segment_sums(x.flatten(0, -2), entry // idx.shape[-1], weights.flatten()[entry], starts)
    store_rows_(bank, touched, bank.index_select(0, touched).to(x.dtype) + sums)


def sorted_entries(order: Tensor, group_start: Tensor) -> tuple[Tensor, Tensor]:
    """From one step's order [P, E] and starts: the n valid entries as ids into [P * E], and the group sizes [P * E]."""
    streams, entries = order.shape
    base = torch.arange(streams).unsqueeze(-1) * entries
    return (order + base)[order >= 0], (group_start[:, 1:] - group_start[:, :-1]).flatten()


def group_sums(x: Tensor, weights: Tensor, order: Tensor, group_start: Tensor, used: Tensor) -> Tensor:
    """[G, D]: each used group's sum of weights [P, C, W] times x [P, C, D]; `used` are ids into [P * E], rising."""
    entry, sizes = sorted_entries(order, group_start)
    starts = torch.zeros(len(used) + 1, dtype=torch.int64)
    starts[1:] = sizes[used].cumsum(0)
    return segment_sums(x.flatten(0, 1), entry // weights.shape[2], weights.flatten()[entry], starts)
