"""Writes and reads grouped by slot, in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor

from sdm_compile.ops.slot_groups_kernels import SlotGroups
from sdm_compile.ops.slot_sort_kernels import NO_ENTRY


def grouped(k_idx: Tensor, q_idx: Tensor) -> SlotGroups:
    """What the kernels should find, of [N, C, W] and [N, C, R]."""
    joined = torch.cat([k_idx, q_idx], -1).flatten(1).tolist()
    each, writes = k_idx.shape[2] + q_idx.shape[2], k_idx.shape[2]
    found: list[tuple[list[int], ...]] = []
    for ids in joined:
        slots = sorted({slot for slot in ids if slot >= 0})
        entries = [[e for e, other in enumerate(ids) if other == slot] for slot in slots]
        keys = [slot * 2**32 + e for slot, of_slot in zip(slots, entries, strict=True) for e in of_slot]
        start, ordinal, written = [0], [], 0
        for of_slot in entries:
            start.append(start[-1] + len(of_slot))
            has_write = any(e % each < writes for e in of_slot)
            ordinal.append(written if has_write else -1)
            written += has_write
        unused = [-1] * (len(ids) - len(slots))
        keys += [NO_ENTRY.value] * (len(ids) - len(keys))
        lead = [of_slot[0] // each * 2 + (of_slot[0] % each >= writes) for of_slot in entries]
        found.append((keys, start + start[-1:] * len(unused), slots + unused, lead + unused, ordinal + unused))
    keys, *others = zip(*found, strict=True)
    return SlotGroups(torch.tensor(keys, dtype=torch.int64), *(torch.tensor(x, dtype=torch.int32) for x in others))
