"""The sums of a backward step's kernels: their order, the signs of their zeros, and what must not reach them.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.snapshot import SNAPSHOT_MODES, StepRows, quantize_rows
from tests.harness import assert_close, assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted

triton = pytest.importorskip("triton")
from sdm_compile.ops.slot_entries_kernels import entry_dots_call  # noqa: E402
from sdm_compile.ops.step_bwd_kernels import SlotRowsConfig  # noqa: E402
from tests.backward_steps import (  # noqa: E402
    RAGGED,
    SMALL_ROWS,
    STEPS,
    UNTOUCHED,
    Sizes,
    Step,
    assert_absent_are_zero,
    expected_rows,
    gather,
    random_step,
    slot_rows,
    summed,
)
from tests.slot_groups import grouped  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
every_mode = pytest.mark.parametrize("mode", SNAPSHOT_MODES)
# The bank's dtype and its gradient's.
every_dtype = pytest.mark.parametrize(("dtype", "grad_dtype"), [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def added(
    start: float, writes: list[float], reads: list[float], device: str, decay: float = 1.0, dtype: torch.dtype = F32
) -> float:
    """A gradient after each token has added one number by a write to its slot, and one by a read of it."""
    ids = torch.zeros(1, len(writes), 1, dtype=torch.int32)
    one = torch.ones(ids.shape)
    step = Step(
        dM=torch.full((2, 1), start, dtype=dtype),
        bank=torch.ones(2, 1, dtype=dtype),
        where=torch.full((2,), -1, dtype=torch.int32),
        snapshot=StepRows(torch.ones(len(writes), 1, dtype=dtype), torch.empty(0), "none"),
        number=0,
        k_idx=ids,
        q_idx=ids,
        groups=grouped(ids, ids),
        k_eff=one,
        q_w=one,
        beta=-one,
        group_decay=torch.full((1, len(writes)), decay),
        du=torch.tensor(writes, dtype=F32).view(ids.shape),
        dy=torch.tensor(reads, dtype=F32).view(ids.shape),
        write_w=one,
        delta=one,
    )
    dM = slot_rows(step, device)[0]
    assert dM[1] == start
    return dM[0].item()


@every_device
def test_sums_are_taken_in_token_order_and_rounded_once(device: str) -> None:
    """1e8 swallows a one that is added to it; four halves onto 256 would each round away in bfloat16."""
    none, swallowed, kept = [0.0] * 4, [1, 1e8, 1, -1e8], [1e8, 1, -1e8, 1]
    assert added(0, none, swallowed, device) == added(0, swallowed, none, device) == 0
    assert added(0, none, kept, device) == added(0, kept, none, device) == 1
    assert added(0, [1e8, -1e8], [1, 1], device) == 1  # not all writes before the reads
    assert added(0, [1, -1e8], [1e8, 1], device) == 1  # but those of a token are
    halves, quarters = [0.5, 0.5], [0.25, 0.25]
    assert added(256, halves, halves, device, dtype=BF16) == 258
    assert added(256, none, halves * 2, device, dtype=BF16) == 258
    assert added(256, halves * 2, none, device, dtype=BF16) == 258
    assert added(256, quarters, quarters, device, decay=257 / 256, dtype=BF16) == 258  # 257 is no bfloat16
    parts = torch.tensor([[1e8, 1.0, -1e8], [1e8, -1e8, 1.0], [1.0, 1e8, -1e8]]).T[None].contiguous()
    assert summed(parts.to(device)).tolist() == [[0, 1, 0]]
    k_idx, q_idx = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 2, dtype=torch.int32)
    keys, one = grouped(k_idx, q_idx).keys.to(device), torch.ones(1, 1, 1, device=device)
    dk_eff, dq_w = (torch.full(x.shape, NAN, device=device) for x in (k_idx, q_idx))
    entry_dots_call(keys, parts.roll(1, -1).to(device), -3 * one, dk_eff, dq_w).launch()
    assert dk_eff.tolist() == [[[0]]] and dq_w.tolist() == [[[0, 1]]]
    entry_dots_call(keys, parts.roll(-1, -1).to(device), -3 * one, dk_eff, dq_w).launch()
    assert dk_eff.tolist() == [[[3]]] and dq_w.tolist() == [[[0, 0]]]


@every_device
@every_dtype
def test_zeros_keep_their_signs_beside_longer_groups(dtype: torch.dtype, grad_dtype: torch.dtype, device: str) -> None:
    """Every sum here is one of -0.0; a shorter group of a tile would lose its sign to the entries that it has not."""
    step = random_step(RAGGED, dtype, grad_dtype)
    lengths = step.groups.start.diff()[:, :4]
    assert (lengths.min(1).values < lengths.max(1).values).all()
    minus = {"k_eff": 0.0, "beta": 1.0, "du": 2.0, "q_w": 0.0, "dy": -2.0}  # -0.0 times 2, and 0.0 times -2
    zeros = step._replace(
        dM=torch.full_like(step.dM, -0.0),
        **{name: torch.full_like(getattr(step, name), value) for name, value in minus.items()},
    )
    # And some of them among other numbers: half of the weights are zeros, and what is sent back has either sign.
    mixed = step._replace(
        dM=zeros.dM,
        **{name: getattr(step, name) * (torch.rand(getattr(step, name).shape) < 0.5) for name in ("k_eff", "q_w")},
    )
    one_by_one = SlotRowsConfig(groups=1, tiles=1, columns=8, warps=1)
    expected = slot_rows(mixed, device, one_by_one)[0]
    for config in (one_by_one, replace(one_by_one, groups=4), SMALL_ROWS):
        dM = slot_rows(zeros, device, config)[0]
        assert (dM == 0).all() and dM.signbit().all()
        assert_same_bits(slot_rows(mixed, device, config)[0], expected)


@every_device
@pytest.mark.parametrize("mode", ["none", "fp8", "int4"])
def test_columns_beyond_the_row_reach_nothing(mode: str, device: str) -> None:
    """Int4's code for no column stands for more than float32 holds, beside the largest numbers."""
    step = random_step(replace(RAGGED, width=9), F32, F32)
    largest = torch.finfo(F32).max
    rows = quantize_rows(torch.full((STEPS * step.per_step(), 9), largest), mode)
    zeros = {name: torch.zeros_like(getattr(step, name)) for name in ("dM", "du", "dy")}
    step = step._replace(**zeros, bank=torch.full_like(step.bank, largest), snapshot=StepRows(*rows, mode))
    dM, _, *dots = slot_rows(step, device)
    assert not dM.any()
    for x in dots:
        assert (x == 0).any() and not x[x != UNTOUCHED].any()


@every_device
@every_mode
def test_ids_beyond_the_bank_touch_nothing(mode: str, device: str) -> None:
    step = random_step(Sizes("some beyond", slots=6), F32, F32, mode)
    few = len(step.bank) - 6
    step = step._replace(**{name: getattr(step, name)[:few].contiguous() for name in ("dM", "bank", "where")})
    ids = (step.k_idx, step.q_idx)
    beyond = [x >= few for x in ids]
    assert all(x.sum() > 1 for x in beyond)
    far = step.with_ids(*(x.masked_fill(y, 2**31 - 1) for x, y in zip(ids, beyond, strict=True)))
    without = step.with_ids(*(x.masked_fill(y, -1) for x, y in zip(ids, beyond, strict=True)))
    expected = [gather(without, device), slot_rows(without, device)]
    assert_close(expected[1], expected_rows(without))
    for other in (step, far):
        got = slot_rows(other, device)
        for dots, without_slot in zip(got[3:], beyond, strict=True):
            assert not dots[without_slot].isfinite().any()  # nothing came out of the step's kernel
            dots[without_slot] = UNTOUCHED
        assert_same_bits([gather(other, device), got], expected)


@every_device
@every_mode
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_stays_in_its_stream_and_without_a_slot_reaches_nothing(bad: float, mode: str, device: str) -> None:
    sizes = Sizes("streams", streams=3, chunk=4, writes=3, reads=2, width=5, slots=4, apart=1)
    step = random_step(sizes, F32, F32, mode)
    own = slice(sizes.slots + sizes.apart, 2 * (sizes.slots + sizes.apart))
    clean = [*gather(step, device), *slot_rows(step, device, SMALL_ROWS)]

    def poisoned(x: Tensor, at: int | slice) -> Tensor:
        x = x.clone()
        x[at] = bad
        return x

    snapshot = [x.clone() for x in step.snapshot[:2]]
    of_bad = quantize_rows(torch.full((step.per_step() // 3, sizes.width), bad), mode)
    for x, y in zip(snapshot, of_bad, strict=True):
        x.view(torch.uint8).view(STEPS, 3, -1)[:, 1] = y.view(torch.uint8).flatten()
    with_bad = step._replace(
        **{name: poisoned(getattr(step, name), own) for name in ("dM", "bank")},
        **{name: poisoned(getattr(step, name), 1) for name in ("k_eff", "q_w", "beta", "group_decay", "du", "dy")},
        **{name: poisoned(getattr(step, name), 1) for name in ("write_w", "delta")},
        snapshot=StepRows(*snapshot, mode),
    )
    got = [*gather(with_bad, device), *slot_rows(with_bad, device, SMALL_ROWS)]
    others = torch.ones(len(step.bank), dtype=torch.bool)
    others[own] = False
    for a, b in zip(got, clean, strict=True):
        keep = others if len(a) == len(others) else [0, 2]
        assert_same_bits(a[keep], b[keep])
    assert not got[0][1].isfinite().all() and not got[2][own].isfinite().all()
    assert_absent_are_zero(step, got[1])
    assert_same_bits(got[3], clean[3])
    for a, b in zip(got[4:], clean[4:], strict=True):
        assert (a[b == UNTOUCHED] == UNTOUCHED).all()
