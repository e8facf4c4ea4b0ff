"""Snapshot rows: what a saving forward keeps of the bank, so that the backward has each row as it was before a step.

Compact rows: each bank row is saved before a step overwrites it. Versions: the bank is never overwritten, and each new
row is stored in the snapshot alone. Either way there is one row per slot group, row `chunk * E + ordinal`, in one of
these forms; versions are in the first one (SPEC section 4):

| mode | payload | scale per row |
| --- | --- | --- |
| none | the bank's dtype | - |
| bf16 | bfloat16 (on a bfloat16 bank this is `none`) | - |
| fp8 | float8_e4m3fn | float32, largest absolute value / 448 |
| int4 | uint8, two columns per byte, low nibble first, code 8 is zero | float32, largest absolute value / 7 |

`keeps_versions` decides whether a call keeps versions, from the bank and the mode alone, so that tracing knows it;
`plan_snapshot` then decides which layout a call keeps and which stage stores the rows. A route obeys it or refuses the
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import UnsupportedConfigurationError, check_choice, check_shape
from .layout import empty
from .situation import Situation

COMPACT, NO_ROWS, VERSIONS = 2, 4, 6
SNAPSHOT_MODES = ("none", "bf16", "fp8", "int4")  # the forms of a row
RECOMPUTE = "recompute"  # keeps no rows, but the bank before every so many steps
CALL_MODES = (*SNAPSHOT_MODES, RECOMPUTE)
MIN_VERSION_BYTES = 512  # of a row: shorter ones are slower as versions, see `keeps_versions`
SCALED_MODES = {"fp8": 448.0, "int4": 7.0}  # the largest code of each mode that has a scale per row


class StepRows(NamedTuple):
    """One step's rows of a snapshot, row p * E + o for group o of chunk p, and the form that they are in."""

    payload: Tensor  # [P * E, *]
    scales: Tensor  # [P * E] or [0]
    mode: str


@dataclass(frozen=True)
class SnapshotPlan:
    """What a call declares: which layout it keeps, and which stage should store its rows; None for no rows."""

    layout: int
    writer: str | None  # "write" or "gather"

    @property
    def versions(self) -> bool:
        """Whether the rows are versions."""
        return self.layout == VERSIONS


KEEPS_NOTHING = SnapshotPlan(NO_ROWS, None)


@dataclass(frozen=True)
class Announcement:
    """What a write stage, built for a call, says of itself."""

    layout: int  # that it reads
    stores_rows: bool  # whether it stores the snapshot's rows itself


class SnapshotMismatchError(RuntimeError):
    """The stages of one call do not agree on what is kept: a defect of the library, found before any launch."""


def agreed_writer(declared: SnapshotPlan, announced: Announcement) -> str | None:
    """The stage that stores a call's rows: the write stage if it announced so, else the gather; None for no rows.

    Raises:
        SnapshotMismatchError: the write stage announced another layout than was declared, or another writer.
    """
    keeps_rows = declared.layout != NO_ROWS
    writer = ("write" if announced.stores_rows else "gather") if keeps_rows else None
    if announced.layout != declared.layout or writer != declared.writer or announced.stores_rows > keeps_rows:
        raise SnapshotMismatchError(f"the call declared {declared}, but the write stage announced {announced}")
    return writer


def check_rows(rows: int, device: torch.device) -> None:
    """A backward on this device can number so many rows of a snapshot."""
    if device.type == "cuda" and rows >= 2**31:
        raise UnsupportedConfigurationError(
            f"the snapshot would have {rows} rows; a backward on CUDA takes fewer than {2**31}: use shorter sequences, "
            "fewer streams, or snapshot_quant='recompute'"
        )


def keeps_versions(bank: Tensor, mode: str) -> bool:
    """Whether a saving call on a bank like this one keeps versions of rows: exact ones, on CUDA, that are not short.

    Each row is then stored once instead of twice, and no bank is copied; but each entry's row has an address. Rows are
    loaded 16 bytes at a time. Measured on an H200, ms of a saving forward and of a train step as graph replay, with
    versions and without: 10.5 and 32.1, 12.8 and 34.5 with rows of 2 KB; 2.47 and 6.72, 2.61 and 6.97 with rows of
    1.5 KB; 3.48 and 3.45 for a train step with rows of 1 KB, in 0.93 of the memory; 2.59 and 6.02, 2.29 and 5.73 with
    rows of 128 bytes.
    """
    width = bank.shape[-1] * bank.element_size()
    exact = mode == "none" or (mode == "bf16" and bank.dtype == torch.bfloat16)
    return exact and bank.device.type == "cuda" and width >= MIN_VERSION_BYTES and width % 16 == 0


def plan_snapshot(saving: bool, mode: str, situation: Situation, versions: bool = False) -> SnapshotPlan:
    """What a forward in this situation keeps: SPEC section 4's table, with versions, and without its row on layout 0.

    No shape needs that layout: the kernels that read compact rows take every shape that `check_rows` admits.
    versions: what `keeps_versions` says.
    """
    if not saving or mode == RECOMPUTE:
        return KEEPS_NOTHING
    if versions:
        return SnapshotPlan(VERSIONS, "write")
    if mode == "none" and situation is Situation.CAPTURING:
        return SnapshotPlan(COMPACT, "gather")
    return SnapshotPlan(COMPACT, "write")


def check_mode(name: str, mode: str, dtype: torch.dtype, modes: Sequence[str] = SNAPSHOT_MODES) -> None:
    """`mode`, the argument called `name`, is one of `modes` that banks of this dtype can be stored in.

    Float64 banks, which exist to check gradients, store exact rows.
    """
    check_choice(name, mode, modes)
    if dtype == torch.float64 and mode not in ("none", RECOMPUTE):
        raise UnsupportedConfigurationError(
            f"{name} is {mode!r} with a float64 bank; use 'none' or 'recompute', or a float32 or bfloat16 bank"
        )


def empty_snapshot(rows: int, like: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Fresh payload and scales for so many rows of a bank like `like` [*, D]."""
    width = like.shape[-1]
    payload = {
        "none": (width, like.dtype),
        "bf16": (width, torch.bfloat16),
        "fp8": (width, torch.float8_e4m3fn),
        "int4": ((width + 1) // 2, torch.uint8),
    }[mode]
    scales = rows if mode in SCALED_MODES else 0
    return empty((rows, payload[0]), like, payload[1]), empty((scales,), like, torch.float32)


def check_snapshot(name: str, payload: Tensor, scales: Tensor, rows: int, like: Tensor, mode: str) -> None:
    """`payload`, called `name`, and `scales` have the form of so many rows of a bank like `like` [*, D]."""
    forms = empty_snapshot(rows, like.new_empty(0, like.shape[-1], device="meta"), mode)
    layouts = ("[rows, D], or [rows, ceil(D / 2)] for int4", "[rows], or [0] for a mode without scales")
    for part, tensor, form, layout in zip((name, "scales"), (payload, scales), forms, layouts, strict=True):
        check_shape(part, tensor, form.shape, layout)
        if tensor.dtype != form.dtype:
            raise ValueError(f"{part} has dtype {tensor.dtype}; mode {mode!r} on a {like.dtype} bank has {form.dtype}")


def quantize_rows(rows: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Rows [n, D] as `mode` stores them, on the CPU."""
    payload, scales = empty_snapshot(rows.shape[0], rows, mode)
    if mode not in SCALED_MODES:
        return payload.copy_(rows), scales
    top = SCALED_MODES[mode]
    rows = rows.float()
    torch.div(rows.abs().amax(-1), top, out=scales)
    scaled = (rows / scales.where(scales != 0, 1.0)[:, None]).clamp_(-top, top)
    if mode == "fp8":
        return payload.copy_(scaled), scales
    codes = torch.nn.functional.pad(scaled.round_() + 8, (0, rows.shape[1] % 2), value=8).to(torch.uint8)
    return payload.copy_(codes[:, ::2] + 16 * codes[:, 1::2]), scales


def empty_rows(payload: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Fresh memory for the rows [n, width] that a snapshot's payload stands for."""
    return empty((payload.shape[0], width), payload, dtype)


def dequantize_rows(payload: Tensor, scales: Tensor, mode: str, width: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, width] that a snapshot stands for, on the CPU."""
    rows = empty_rows(payload, width, dtype)
    if mode == "int4":
        codes = torch.stack([payload & 15, payload >> 4], -1).flatten(1)[:, :width]
        return rows.copy_((codes.float() - 8) * scales[:, None])
    return rows.copy_(payload.float() * scales[:, None] if mode == "fp8" else payload)
