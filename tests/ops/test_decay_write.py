"""The decay-and-write in exact arithmetic, its roundings, its snapshots, and what it leaves alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.checks import accumulate_dtype
from sdm_compile.ops.decay_write import decay_write, decay_write_
from sdm_compile.ops.phase1 import phase1
from sdm_compile.ops.row_quant import snapshot_dequantize, snapshot_quantize
from tests.harness import DTYPES, assert_same_bits
from tests.samples.row_quant import empty_rows

P, C, W, D, SLOTS = 2, 9, 3, 7, 12  # slots per stream


def integers(*shape: int, low: int = -8, high: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def step(dtype: torch.dtype, gates: Tensor | None = None) -> dict[str, Tensor]:
    """A step of integers with weights and decays that are powers of two, its groups as Phase 1 makes them."""
    generator = torch.Generator().manual_seed(1)
    k_idx = torch.rand(1, P, C, SLOTS, generator=generator).argsort(-1)[..., :W]
    k_idx += SLOTS * torch.arange(P)[:, None, None]
    k_idx[torch.rand(k_idx.shape, generator=generator) < 0.2] = -1
    gates = torch.zeros(1, P, C, 1) if gates is None else gates.view(1, P, C, 1)
    fields = phase1(k_idx.int(), torch.ones(k_idx.shape), gates, k_idx.int(), torch.ones(k_idx.shape))
    accumulate = accumulate_dtype(dtype)
    return {
        "bank": integers(P * SLOTS + 1, D, seed=2).to(dtype),
        "delta": integers(P, C, D, low=-4, high=5, seed=3).to(accumulate),
        "write_w": 2.0 ** integers(P, C, W, low=-1, high=3, seed=4).to(accumulate),
        "group_decay": (2.0 ** integers(P, C * W, low=-1, high=2, seed=5)).to(accumulate),
        "order": fields.order[0],
        "group_start": fields.group_start[0],
        "group_slot": fields.group_slot[0],
    }


def expected_bank(s: dict[str, Tensor]) -> Tensor:
    """Entry by entry, from the definition of the groups."""
    out = s["bank"].to(s["delta"].dtype, copy=True)
    for p in range(P):
        for o, slot in enumerate(s["group_slot"][p].tolist()):
            if slot >= 0:
                entries = s["order"][p, s["group_start"][p, o] : s["group_start"][p, o + 1]].tolist()
                writes = [s["write_w"][p, e // W, e % W] * s["delta"][p, e // W] for e in entries]
                out[slot] = s["group_decay"][p, o] * out[slot] + torch.stack(writes).sum(0)
    return out.to(s["bank"].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_sums(dtype: torch.dtype) -> None:
    s = step(dtype)
    expected = expected_bank(s)
    before = s["bank"].clone()
    assert_same_bits(decay_write(**s), expected)
    assert_same_bits(s["bank"], before)
    decay_write_(**s)
    assert_same_bits(s["bank"], expected)


def test_a_bfloat16_row_is_rounded_once() -> None:
    """Four halves onto 256: each alone would round away."""
    ids = torch.zeros(1, 1, 4, 1, dtype=torch.int32)
    fields = phase1(ids, torch.ones(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), ids, torch.ones(1, 1, 4, 1))
    groups = (fields.order[0], fields.group_start[0], fields.group_slot[0])
    bank = torch.full((2, 1), 256.0, dtype=torch.bfloat16)
    out = decay_write(bank, torch.full((1, 4, 1), 0.5), torch.ones(1, 4, 1), fields.group_decay[0], *groups)
    assert out.tolist() == [[258.0], [256.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_erased_row_is_zero_and_others_stay(dtype: torch.dtype) -> None:
    """exp(-inf) times a finite row is zero; rows that no group names keep their bits, NaN among them."""
    s = step(dtype, torch.full((P * C,), -math.inf))
    s["group_decay"].zero_()
    s["delta"].zero_()
    untouched = torch.ones(len(s["bank"]), dtype=torch.bool)
    untouched[s["group_slot"][s["group_slot"] >= 0].long()] = False
    assert untouched.sum() > 1
    s["bank"][untouched] = math.nan
    out = decay_write(**s)
    assert not out[~untouched].any()
    assert out[untouched].isnan().all()


@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_snapshot_holds_the_kept_rows(mode: str, dtype: torch.dtype) -> None:
    """Row p * E + o is group o's row of chunk p before the step, in the mode's form; rows of no group stay."""
    s = step(dtype)
    s["bank"] = s["bank"] + 0.3  # not exact in any mode but none
    slots = s["group_slot"].flatten()
    before, without = s["bank"].clone(), s["bank"].clone()
    snapshot, scales = empty_rows(len(slots), s["bank"], mode)
    snapshot.view(torch.uint8).fill_(85)
    scales.fill_(-3)
    decay_write_(**{**s, "bank": without})
    decay_write_(**s, snapshot=snapshot, scales=scales, snapshot_quant=mode)
    assert_same_bits(s["bank"], without)  # what is saved changes nothing
    used = slots >= 0
    rows, row_scales = snapshot_quantize(before[slots[used].long()], mode)
    assert torch.equal(snapshot.view(torch.uint8)[used], rows.view(torch.uint8))
    assert (snapshot.view(torch.uint8)[~used] == 85).all()
    if mode in ("fp8", "int4"):
        assert torch.equal(scales[used], row_scales)
        assert (scales[~used] == -3).all()
    if mode == "none" or (mode, dtype) == ("bf16", torch.bfloat16):
        saved = snapshot_dequantize(snapshot, scales, mode, D, dtype)[used]
        assert_same_bits(saved, before[slots[used].long()])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a bank with gaps", {"bank": torch.zeros(25, 2 * D)[:, ::2]}, r"bank has strides \(14, 2\)"),
    ("a snapshot with gaps", {"snapshot": torch.zeros(P * C * W, 2 * D)[:, ::2]}, r"snapshot has strides \(14, 2\)"),
    ("a snapshot alone", {"scales": None}, "snapshot and scales come together"),
    ("scales alone", {"snapshot": None}, "snapshot and scales come together"),
    ("a row too few", {"snapshot": torch.zeros(P * C * W - 1, D)}, r"snapshot has shape \(53, 7\); .* \(54, 7\)"),
    ("another dtype", {"snapshot": torch.zeros(P * C * W, D).double()}, "snapshot has dtype torch.float64"),
    ("scales of no use", {"scales": torch.zeros(P * C * W)}, r"scales has shape \(54,\); expected .* \(0,\)"),
    ("scales in float64", {"scales": torch.zeros(0).double()}, "scales has dtype torch.float64"),
    ("an unknown mode", {"snapshot_quant": "int3"}, "snapshot_quant is 'int3'; choose one of"),
    ("a mode of another form", {"snapshot_quant": "fp8"}, "scales has shape|snapshot has dtype"),
]


@pytest.mark.parametrize(("change", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_before_anything_is_written(change: dict[str, Any], message: str) -> None:
    s: dict[str, Any] = step(torch.float32)
    snapshot, scales = empty_rows(P * C * W, s["bank"], "none")
    arguments = {**s, "snapshot": snapshot, "scales": scales, "snapshot_quant": "none", **change}
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    with pytest.raises(ValueError, match=message):
        decay_write_(**arguments)
    assert_same_bits({name: arguments[name] for name in before}, before)
