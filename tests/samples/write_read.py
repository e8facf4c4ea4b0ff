"""Samples of the composite write/read: calls as users make them, and what a saving forward leaves to its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from sdm_compile.ops.checks import accumulate_dtype
from sdm_compile.ops.saved import Saved, no_versions
from sdm_compile.ops.write_read_recompute import segments
from tests.cases import Case, Inputs, group_slots
from tests.harness import OpCase, Sample, masked, normal_like, vjp

from .row_quant import LOSSY_DTYPES, empty_rows
from .shapes import EDGES, EVERY, NO_TOKENS, OTHER_SIZES, RAGGED, Chunked, chunked, run_chunked

# Rows of small integers, the largest 7, are stored without rounding in every mode; one step sees no others.
_EXACT = replace(RAGGED, name="one step", tokens=5, chunk_size=6)
_LOSSY = ("bf16", "fp8", "int4")


def _exact_inputs(dtype: torch.dtype) -> Inputs:
    inputs = _EXACT.make(dtype)
    memory = torch.randint(-7, 8, inputs.memory.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    memory[:, 2] = 7
    return inputs._replace(memory=memory)


def _snapshot(call: Chunked, mode: str) -> tuple[Tensor, Tensor]:
    """The row of every slot group of every chunk before its step, in a mode's form; zeros for unused groups."""
    groups = call.fields.group_slot
    payload, scales = empty_rows(groups.numel(), call.banks[0], mode)
    for step, slots in enumerate(groups.flatten(1)):
        place = (slots >= 0).nonzero()[:, 0] + step * len(slots)
        rows, row_scales = reference.snapshot_quantize(call.banks[step][slots[slots >= 0].long()], mode)
        payload[place] = rows
        if len(scales):
            scales[place] = row_scales
    return payload, scales


def _saved(call: Chunked, mode: str) -> Saved:
    snapshot, scales = _snapshot(call, mode)
    kept = {name: field for name, field in call.fields._asdict().items() if name in Saved._fields}
    return Saved(call.retrieved, snapshot, scales, call.X, call.QX, **kept, **no_versions(snapshot)).flattened()


def _write_read_saving(memory: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *inputs, chunk_size, mode, _ = args
    return (
        *reference.write_read(memory, *inputs),
        *_saved(run_chunked(Inputs(memory, *inputs), chunk_size), mode),
    )


def _specified(args: Sequence[Any], outputs: list[Tensor]) -> list[Tensor]:
    """What `write_read_saving` returns, with zeros in the snapshot's rows that stand for no group."""
    saved = Saved(*outputs[2:])
    unused = group_slots(args[1], args[8]) < 0
    snapshot, scales = saved.snapshot.clone(), saved.scales.clone()
    snapshot.view(torch.uint8)[unused] = 0
    if len(scales):
        scales[unused] = 0
    return [*outputs[:2], *saved._replace(snapshot=snapshot, scales=scales)]


def _segment_banks(inputs: Inputs, chunk_size: int, count: int) -> Tensor:
    """The bank before each of `count` segments."""
    banks = run_chunked(inputs.to(torch.float64), chunk_size).banks
    steps = len(banks) - 1
    return torch.stack([banks[min(i * -(-steps // count), steps)] for i in range(count)])


def _write_read_recompute(memory: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *inputs, chunk_size, _ = args
    count = segments(memory.shape[0], inputs[0], chunk_size)
    return (*reference.write_read(memory, *inputs), _segment_banks(Inputs(memory, *inputs), chunk_size, count))


def _recompute_bwd_args(
    case: Case,
    dtype: torch.dtype,
    *,
    grad_bank_fp32: bool = False,
    given: tuple[bool, bool] = (True, True),
    mask: Sequence[bool] = (True,) * 6,
) -> list[Any]:
    inputs = case.make(dtype)
    count = segments(inputs.memory.shape[0], inputs.k_idx, case.chunk_size)
    banks = _segment_banks(inputs, case.chunk_size, count)
    grads = [normal_like(x) if g else None for x, g in zip((inputs.v, inputs.memory), given, strict=True)]
    return [*grads, banks.to(dtype), *inputs[1:], case.chunk_size, grad_bank_fp32, list(mask)]


def _write_read_recompute_bwd(
    dreadings: Tensor | None, dfinal: Tensor | None, banks: Tensor, *args: Any
) -> list[Tensor]:
    *inputs, _, _, mask = args
    return masked(vjp(reference.write_read, (banks[0], *inputs), (dreadings, dfinal)), mask)


def _write_read_(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return reference.write_read(memory, *args[:-1])


def _bwd_args(
    case: Case,
    dtype: torch.dtype,
    *,
    inputs: Inputs | None = None,
    mode: str = "none",
    grad_bank_fp32: bool = False,
    given: tuple[bool, bool] = (True, True),
    mask: Sequence[bool] = (True,) * 6,
) -> list[Any]:
    call = chunked(case, dtype) if inputs is None else run_chunked(inputs.to(torch.float64), case.chunk_size)
    inputs = inputs or case.make(dtype)
    saved = _saved(call, mode)._asdict()
    for name, x in saved.items():
        if x.dtype == torch.float64:
            saved[name] = x.to(dtype if name == "snapshot" else accumulate_dtype(dtype))
    grads = [normal_like(x) if g else None for x, g in zip((inputs.v, inputs.memory), given, strict=True)]
    final = call.banks[-1].to(dtype)
    return [*grads, final, *inputs[1:], *saved.values(), case.chunk_size, mode, grad_bank_fp32, list(mask)]


def _write_read_bwd(dreadings: Tensor | None, dfinal: Tensor | None, bank: Tensor, *args: Any) -> list[Tensor]:
    """The token loop differentiated, from the bank before the call: the final one with every snapshot row put back."""
    inputs, saved = args[:7], Saved(*args[7:-4])
    chunk_size, mode, _, mask = args[-4:]
    memory = bank.clone()
    rows = reference.snapshot_dequantize(saved.snapshot, saved.scales, mode, memory.shape[1], memory.dtype)
    groups = inputs[0].shape[0] * chunk_size * inputs[0].shape[2]  # of a step
    slots = group_slots(inputs[0], chunk_size)
    for start in reversed(range(0, len(slots), max(groups, 1))):
        at = slots[start : start + groups]
        memory[at[at >= 0]] = rows[start : start + groups][at >= 0]
    return masked(vjp(reference.write_read, (memory, *inputs), (dreadings, dfinal)), mask)


def _call_samples(make: Any, cases: Sequence[Case] = EVERY) -> list[Sample]:
    return [Sample(c.name, lambda dtype, c=c: [*c.make(dtype), c.chunk_size, *make]) for c in cases]


# The second one has other sizes but as many segments, so that it needs no other graph.
_RECOMPUTED = [RAGGED, replace(OTHER_SIZES, name="other sizes and as many segments", tokens=49), *EVERY[1:]]


CASES = [
    OpCase("write_read", _call_samples([]), lambda *args: reference.write_read(*args[:-1]), through_bank=True),
    OpCase(
        "write_read_saving",
        [
            *_call_samples(["none", False]),
            *(
                Sample(m, lambda dtype, m=m: [*_exact_inputs(dtype), _EXACT.chunk_size, m, False], LOSSY_DTYPES)
                for m in _LOSSY
            ),
            Sample("gradient in float32", lambda dtype: [*RAGGED.make(dtype), RAGGED.chunk_size, "none", True]),
        ],
        _write_read_saving,
        differentiable=(0, 1),
        through_bank=True,
        specified=_specified,
    ),
    OpCase(
        "write_read_bwd",
        [
            *(Sample(c.name, lambda dtype, c=c: _bwd_args(c, dtype)) for c in EVERY),
            Sample("no gradient of the bank", lambda dtype: _bwd_args(EDGES, dtype, given=(True, False))),
            Sample("no gradient of the readings", lambda dtype: _bwd_args(EDGES, dtype, given=(False, True))),
            Sample("no tokens, bank alone", lambda dtype: _bwd_args(NO_TOKENS, dtype, given=(False, True))),
            Sample("every other gradient", lambda dtype: _bwd_args(RAGGED, dtype, mask=(True, False) * 3)),
            Sample("the others", lambda dtype: _bwd_args(RAGGED, dtype, mask=(False, True) * 3)),
            Sample("gradient in float32", lambda dtype: _bwd_args(RAGGED, dtype, grad_bank_fp32=True)),
            *(
                Sample(m, lambda dt, m=m: _bwd_args(_EXACT, dt, inputs=_exact_inputs(dt), mode=m), LOSSY_DTYPES)
                for m in _LOSSY
            ),
        ],
        _write_read_bwd,
        through_bank=True,
    ),
    OpCase("write_read_", _call_samples([]), _write_read_, through_bank=True),
    OpCase(
        "write_read_recompute",
        [
            *_call_samples([False], _RECOMPUTED),
            Sample("gradient in float32", lambda dtype: [*RAGGED.make(dtype), RAGGED.chunk_size, True]),
        ],
        _write_read_recompute,
        differentiable=(0, 1),
        through_bank=True,
    ),
    OpCase(
        "write_read_recompute_bwd",
        [
            *(Sample(c.name, lambda dtype, c=c: _recompute_bwd_args(c, dtype)) for c in _RECOMPUTED),
            Sample("no gradient of the bank", lambda dtype: _recompute_bwd_args(EDGES, dtype, given=(True, False))),
            Sample("no gradient of the readings", lambda dt: _recompute_bwd_args(EDGES, dt, given=(False, True))),
            Sample("every other gradient", lambda dtype: _recompute_bwd_args(RAGGED, dtype, mask=(True, False) * 3)),
            Sample("the others", lambda dtype: _recompute_bwd_args(RAGGED, dtype, mask=(False, True) * 3)),
            Sample("gradient in float32", lambda dtype: _recompute_bwd_args(RAGGED, dtype, grad_bank_fp32=True)),
        ],
        _write_read_recompute_bwd,
        through_bank=True,
    ),
]
