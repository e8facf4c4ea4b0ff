"""Samples of the decay-and-write: one step's deltas and groups, the bank before it, and room for a snapshot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from sdm_compile.ops.checks import accumulate_dtype
from sdm_compile.ops.layout import ChunkFields
from tests.cases import Case
from tests.harness import OpCase, Sample, masked, normal_like, vjp

from .row_quant import LOSSY_DTYPES, empty_rows
from .shapes import EDGES, EVERY_STEP, EVERY_STEP_BWD, OTHER_CHUNK, RAGGED, REUSE, chunked, middle_step


def _args(case: Case, dtype: torch.dtype) -> list[Tensor]:
    call, step, accumulate = chunked(case), middle_step(case), accumulate_dtype(dtype)
    fields = ChunkFields(*(x[step] for x in call.fields))
    floats = (x.to(accumulate) for x in (call.delta[step], fields.write_w, fields.group_decay))
    return [call.banks[step].to(dtype), *floats, fields.order, fields.group_start, fields.group_slot]


def _bwd_args(case: Case, dtype: torch.dtype, mask: tuple[bool, ...] = (True,) * 4) -> list[Any]:
    bank, *step = _args(case, dtype)
    return [normal_like(bank), bank, *step, list(mask)]


def _decay_write_bwd(dout: Tensor, *args: Any) -> list[Tensor]:
    *inputs, mask = args
    return masked(vjp(reference.decay_write, inputs, (dout,)), mask)


def _in_place_args(case: Case, dtype: torch.dtype, mode: str | None) -> list[Any]:
    """Without a snapshot, where `mode` is None."""
    bank, *step = _args(case, dtype)
    room = (None, None) if mode is None else empty_rows(step[-1].numel(), bank, mode)
    return [bank, *step, *room, mode or "none"]


def _decay_write_(bank: Tensor, *args: Any) -> list[Tensor]:
    """The bank, and the snapshot with the raw row of every group; rows of unused groups stay as they were."""
    *step, snapshot, scales, mode = args
    after = reference.decay_write(bank, *step)
    if snapshot is None:
        return [after]
    groups = step[-1].flatten()
    rows, row_scales = reference.snapshot_quantize(bank[groups[groups >= 0].long()], mode)
    snapshot, scales = snapshot.clone(), scales.clone()
    snapshot[groups >= 0] = rows.to(snapshot.dtype)
    if len(scales):
        scales[groups >= 0] = row_scales.to(scales.dtype)
    return [after, snapshot, scales]


CASES = [
    OpCase(
        "decay_write",
        [Sample(c.name, lambda dtype, c=c: _args(c, dtype)) for c in EVERY_STEP],
        reference.decay_write,
        differentiable=(0,),
    ),
    OpCase(
        "decay_write_bwd",
        [
            *(Sample(c.name, lambda dtype, c=c: _bwd_args(c, dtype)) for c in EVERY_STEP_BWD),
            Sample("every other gradient", lambda dtype: _bwd_args(EDGES, dtype, (True, False, True, False))),
            Sample("the others", lambda dtype: _bwd_args(REUSE, dtype, (False, True, False, True))),
            Sample("no gradient", lambda dtype: _bwd_args(RAGGED, dtype, (False,) * 4)),
        ],
        _decay_write_bwd,
    ),
    OpCase(
        "decay_write_",
        [
            *(Sample(f"{c.name}, saving", lambda dtype, c=c: _in_place_args(c, dtype, "none")) for c in EVERY_STEP),
            *(
                Sample(f"{c.name}, {mode}", lambda dtype, c=c, mode=mode: _in_place_args(c, dtype, mode), LOSSY_DTYPES)
                for c in (RAGGED, OTHER_CHUNK, EDGES)
                for mode in ("bf16", "fp8", "int4")
            ),
            *(
                Sample(f"{c.name}, no snapshot", lambda dtype, c=c: _in_place_args(c, dtype, None))
                for c in (RAGGED, EDGES)
            ),
        ],
        _decay_write_,
    ),
]
