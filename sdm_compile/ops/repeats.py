"""Repeated write slots within one token: a caller's error that acts as one write, and is counted on the device."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from .situation import Situation, current_situation
from .working_memory import in_a_thread

_counts: dict[torch.device, Tensor] = {}
_lock = threading.Lock()


def first_places(k_idx: Tensor) -> Tensor:
    """For each write of [..., W] the first place in its token with the same slot: its own, where nothing repeats.

    Writes without a slot stand for themselves.
    """
    own = torch.arange(k_idx.shape[-1], device=k_idx.device).expand(k_idx.shape)
    slots, place = k_idx.sort(dim=-1, stable=True)
    starts = torch.ones_like(slots, dtype=torch.bool)
    starts[..., 1:] = (slots[..., 1:] != slots[..., :-1]) | (slots[..., 1:] < 0)
    run_start = torch.where(starts, own, 0).cummax(-1).values
    return torch.empty_like(place).scatter_(-1, place, place.gather(-1, run_start))


class _Writes(NamedTuple):
    """Of each write [..., W]."""

    first: Tensor  # the first place in its token with the same slot
    valid: Tensor  # whether it has a slot
    kept: Tensor  # whether it has one, and is the first with it


def _sort_out(k_idx: Tensor) -> _Writes:
    first, valid = first_places(k_idx), k_idx >= 0
    return _Writes(first, valid, valid & (first == torch.arange(k_idx.shape[-1], device=k_idx.device)))


def _kept_gates(writes: _Writes, width: int) -> Tensor:
    """Which of a token's gates, `width` of them, act: those of kept writes, or its one gate where it has a slot."""
    return writes.kept if width == writes.kept.shape[-1] else writes.valid.any(-1, keepdim=True)


def merge_repeated(k_idx: Tensor, k_val: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The writes [..., W] of each token with repeats merged into the first and no-slot entries cleared.

    Args:
        k_idx: [..., W] ids. k_val: [..., W] weights. g: [..., 1 or W] gates.
    Returns:
        ids with -1 for no slot, summed weights, gates of g's width with 0 where there is no slot, and the number of
        repeats as an int64 scalar.
    """
    writes = _sort_out(k_idx)
    weights = torch.zeros_like(k_val).scatter_add_(-1, writes.first, k_val.masked_fill(~writes.valid, 0))
    return (
        k_idx.masked_fill(~writes.kept, -1),
        weights.masked_fill(~writes.kept, 0),
        g.masked_fill(~_kept_gates(writes, g.shape[-1]), 0),
        (writes.valid & ~writes.kept).sum(),
    )


def merge_repeated_backward(k_idx: Tensor, dk_val: Tensor, dg: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `merge_repeated`'s inputs: every repeat gets its sum's gradient, the first alone its gate's."""
    writes = _sort_out(k_idx)
    return (
        dk_val.gather(-1, writes.first).masked_fill(~writes.valid, 0),
        dg.masked_fill(~_kept_gates(writes, dg.shape[-1]), 0),
    )


def repeat_count(device: torch.device) -> Tensor:
    """The device's count of repeated write slots, an int64 scalar that lives for good. Takes `_lock`.

    Raises:
        RuntimeError: it would have to be made while a CUDA graph is being captured.
    """
    count = _counts.get(device)
    if count is not None:
        return count
    with _lock:
        if device not in _counts:
            if current_situation(device) is Situation.CAPTURING:
                raise RuntimeError("a device's first call cannot be captured: run the same call once before capturing")
            _counts[device] = _new_count(device)
        return _counts[device]


def _new_count(device: torch.device) -> Tensor:
    """Zero, in memory that is kept beyond the call: see `in_a_thread`."""

    def new() -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros((), dtype=torch.int64, device=device)

    if device.type != "cuda":
        return new()
    stream = torch.cuda.current_stream(device)
    count = in_a_thread(stream, new)
    stream.synchronize()  # other streams may add to it at once
    return count


def add_repeats(repeats: Tensor) -> None:
    """Adds a call's number of repeats, as `merge_repeated` returned it, to its device's count."""
    count = repeat_count(repeats.device)
    with _lock:
        count.add_(repeats)


def repeated_write_slots(reset: bool = True) -> int:
    """How many write entries repeated an earlier slot of their token since the last reset, over all devices.

    Args:
        reset: start again from zero.
    Returns:
        The count. Zero for well-formed inputs; SPEC section 1 says how repeats act.
    Note: waits for all work on the devices that have counted.
    """
    total = 0
    with _lock:
        for device, count in _counts.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # calls of other streams may be adding to it
            total += int(count)
            if reset:
                count.zero_()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    return total
