"""The kernels of a backward step that touch bank rows: in Triton's interpreter, on a GPU, and compiled without one.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.layout import Staged, WriteGroups
from sdm_compile.ops.phase1 import phase1
from sdm_compile.ops.saved import Saved, no_versions
from sdm_compile.ops.snapshot import SNAPSHOT_MODES, StepRows, quantize_rows
from sdm_compile.ops.write_read_bwd import _step_backward
from tests.compiled import compile_call
from tests.harness import assert_close, assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter

triton = pytest.importorskip("triton")
from sdm_compile.ops import slot_parts  # noqa: E402
from sdm_compile.ops.slot_entries_kernels import entry_dots_call, entry_weights_call, row_numbers_call  # noqa: E402
from sdm_compile.ops.step_bwd_kernels import (  # noqa: E402
    Banks,
    GradientGatherConfig,
    SlotEntries,
    SlotRowsConfig,
    gradient_gather_call,
    slot_rows_call,
    sum_parts_call,
)
from tests.backward_steps import (  # noqa: E402
    RAGGED,
    SIZES,
    SMALL_GATHER,
    SMALL_ROWS,
    STEPS,
    UNTOUCHED,
    Fence,
    Sizes,
    Step,
    all_rows,
    assert_absent_are_zero,
    expected_rows,
    gather,
    random_step,
    slot_rows,
)
from tests.slot_groups import grouped  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
every_mode = pytest.mark.parametrize("mode", SNAPSHOT_MODES)
# The bank's dtype and its gradient's.
every_dtype = pytest.mark.parametrize(("dtype", "grad_dtype"), [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)
every_size = pytest.mark.parametrize("sizes", SIZES, ids=lambda s: s.name)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


@every_device
@every_dtype
@every_size
def test_gather(sizes: Sizes, dtype: torch.dtype, grad_dtype: torch.dtype, device: str) -> None:
    step = random_step(sizes, dtype, grad_dtype)
    dM, idx = step.dM.double(), step.k_idx
    rows = torch.where((idx >= 0)[..., None], dM[idx.clamp_min(0).long()], 0)
    sums = torch.einsum("pcw,pcwd->pcd", step.write_w.double(), rows)
    expected = [sums, torch.einsum("pcwd,pcd->pcw", rows, step.delta.double())]
    for config in (None, SMALL_GATHER) if sizes.width < 50 else (None,):
        got = gather(step, device, config)
        assert_close(got, expected)
        assert_absent_are_zero(step, got[1])


@every_device
@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        pytest.param(sizes, mode, id=f"{sizes.name}, {mode}")
        for i, sizes in enumerate(SIZES)
        for mode in (SNAPSHOT_MODES if i < 2 else (SNAPSHOT_MODES[i % 4],))
    ],
)
@every_dtype
def test_slot_rows(dtype: torch.dtype, grad_dtype: torch.dtype, sizes: Sizes, mode: str, device: str) -> None:
    step = random_step(sizes, dtype, grad_dtype, mode)
    expected = expected_rows(step)
    got = slot_rows(step, device)
    assert_close(got, expected)
    if sizes.width < 50:
        blocks = slot_rows(step, device, SMALL_ROWS, odd=1)
        assert_same_bits(blocks[:2], got[:2])
        assert_close(blocks, expected)


def test_the_random_steps_have_every_kind_of_row() -> None:
    step = random_step(RAGGED, F32, F32)
    only_read = torch.cat([q[(q >= 0) & ~torch.isin(q, k)] for k, q in zip(step.k_idx, step.q_idx, strict=True)])
    later = step.where[only_read.long()] >= 0
    assert later.any() and not later.all()
    assert (step.where[step.k_idx[step.k_idx >= 0].long()] >= 0).any()
    written, read = ([x[x >= 0].tolist() for x in ids.flatten(0, 1)] for ids in (step.k_idx, step.q_idx))
    assert any(len(set(ids)) < len(ids) for ids in read)
    assert any(set(a) & set(b) for a, b in zip(written, read, strict=True))


@every_device
@every_mode
def test_where_a_row_comes_from(mode: str, device: str) -> None:
    """Slot 0 is never written, 1 by this step, 2 by a later one, 3 by both. Every mode has these rows exactly."""
    unit, nan = 3136.0, [NAN, NAN]
    k_idx = torch.tensor([[[3, 1], [3, -1]]], dtype=torch.int32)
    q_idx = torch.tensor([[[0, 1, 1, 2], [2, 3, -1, 0]]], dtype=torch.int32)
    rows = torch.tensor([*[nan] * 4, [2, 2], [4, 4], *[nan] * 3, [3, 3], nan, nan])
    first_column = torch.tensor([1.0, 0.0])
    step = Step(
        dM=first_column.repeat(5, 1),
        bank=unit * torch.tensor([[1, 1], nan, nan, nan, nan]),
        where=torch.tensor([-1, -1, 9, 8, 7], dtype=torch.int32),
        snapshot=StepRows(*quantize_rows(unit * rows, mode), mode),
        number=1,
        k_idx=k_idx,
        q_idx=q_idx,
        groups=grouped(k_idx, q_idx),
        k_eff=torch.ones(1, 2, 2),
        q_w=torch.ones(1, 2, 4),
        beta=torch.ones(1, 2, 1),
        group_decay=torch.full((1, 4), 0.5),
        du=first_column.repeat(1, 2, 1),
        dy=first_column.repeat(1, 2, 1),
        write_w=torch.ones(1, 2, 2),
        delta=first_column.repeat(1, 2, 1),
    )
    dM, where, ddecay, dk_eff, dq_w = slot_rows(step, device)
    assert dM[:, 0].tolist() == [3, 1.5, 3, -0.5, 1] and not dM[:, 1].any()
    assert where.tolist() == [-1, 4, 9, 5, 7]
    assert (ddecay / unit).tolist() == [[2, 4, UNTOUCHED, UNTOUCHED]]
    assert (dk_eff / unit).tolist() == [[[-4, -2], [-4, UNTOUCHED]]]
    assert (dq_w / unit).tolist() == [[[1, 2, 2, 3], [3, 4, UNTOUCHED, 1]]]


@every_device
@every_mode
@every_dtype
def test_the_kernels_are_the_cpu_step(dtype: torch.dtype, grad_dtype: torch.dtype, mode: str, device: str) -> None:
    """Every step on the gradient that the CPU has there, which it rounds once more than the kernels do."""
    sizes = Sizes("whole steps", chunk=6, writes=4, reads=5, width=11, slots=7)
    steps = [random_step(sizes, dtype, grad_dtype, mode, seed) for seed in range(STEPS)]
    g = torch.Generator().manual_seed(9)

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(step, name) for step in steps])

    def normal_like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=g)

    k_idx, q_idx, delta, dy = (stacked(name) for name in ("k_idx", "q_idx", "delta", "dy"))
    dy = dy.float()
    k_val, q_val, beta, gates = (normal_like(x) for x in (k_idx, q_idx, *[dy[..., :1]] * 2))
    gates = -gates.abs()
    fields = phase1(k_idx, k_val, gates, q_idx, q_val)
    X, QX = (normal_like(fields.A).tril() for _ in range(2))
    rows = normal_like(all_rows(steps[0])).to(dtype)
    snapshot = StepRows(*quantize_rows(rows, mode), mode)
    same = {name: getattr(fields, name) for name in Saved._fields if name in fields._fields}
    saved = Saved(delta, *snapshot[:2], X, QX, **same, **no_versions(delta))
    groups = WriteGroups(fields.order, fields.group_start, fields.group_slot)
    staged = Staged(k_idx, k_val, delta, beta, gates, q_idx, q_val)

    dM, final = steps[0].dM, normal_like(steps[0].bank).to(dtype)
    bank, where = final.clone(), torch.full((len(final),), -1, dtype=torch.int32)
    for s in reversed(range(STEPS)):
        before = dM.clone()
        expected = _step_backward(s, dM, bank, dy[s], delta[s], staged, groups, saved, mode)
        step = steps[s]._replace(
            dM=before,
            bank=final,
            where=where,
            snapshot=snapshot,
            number=s,
            beta=beta[s],
            **{name: getattr(fields, name)[s] for name in ("k_eff", "q_w", "group_decay", "write_w")},
        )
        sums, dwrite_w = gather(step, device, SMALL_GATHER)
        du = QX[s].mT @ dy[s] + X[s].mT @ sums
        got, where, *grads = slot_rows(step._replace(du=du), device, SMALL_ROWS)
        ddecay, dk_eff, dq_w = (x.masked_fill(x == UNTOUCHED, 0) for x in grads)
        assert_close([got, du], [dM, expected.du])
        assert_close([dk_eff, dq_w, dwrite_w, ddecay], expected[1:])
    walked = torch.where((where < 0)[:, None], final, all_rows(step)[where.clamp_min(0).long()])
    assert_same_bits(walked, bank)


@every_device
def test_where_an_entry_finds_what_it_brings(device: str) -> None:
    k_idx = torch.tensor([[[4, -1], [2, 4]], [[-1, -1], [-1, 9]]], dtype=torch.int32)
    q_idx = torch.tensor([[[2, 4, 4], [-1, 0, 2]], [[-1] * 3, [9, -1, -1]]], dtype=torch.int32)
    k_eff, q_w = 10.0 + torch.arange(8).view(2, 2, 2), 100.0 + torch.arange(12).view(2, 2, 3)
    beta = torch.tensor([2.0, -1.0, 3.0, 5.0]).view(2, 2, 1)
    fence = Fence(device)
    keys, k_eff, q_w, beta = (fence.around(x) for x in (grouped(k_idx, q_idx).keys, k_eff, q_w, beta))
    sources, weights = fence.around(torch.full((2, 10), 77, dtype=torch.int32)), fence.untouched(2, 10)
    entry_weights_call(keys, k_eff, q_w, beta, sources, weights).launch()
    fence.check()
    # Slots 0, 2 and 4 of the first chunk, and slot 9 of the second; a token's writes before its reads.
    assert sources.tolist() == [[3, 1, 2, 3, 0, 1, 1, 2, 77, 77], [2, 3, *[77] * 8]]
    of_first = [104, 100, 12, 105, -20, 101, 102, 13, UNTOUCHED, UNTOUCHED]
    assert weights.tolist() == [of_first, [-5 * 17, 109, *[UNTOUCHED] * 8]]


@every_device
@every_mode
@every_dtype
def test_addresses_from_a_table(dtype: torch.dtype, grad_dtype: torch.dtype, mode: str, device: str) -> None:
    step = random_step(RAGGED, dtype, grad_dtype, mode)
    assert_same_bits(gather(step, device, table=True), gather(step, device))
    assert_same_bits(slot_rows(step, device, table=True), slot_rows(step, device))


@every_device
@every_mode
@pytest.mark.parametrize("table", [False, True])
def test_a_step_of_some_of_the_streams(table: bool, mode: str, device: str) -> None:
    """Its rows begin within the step's, and what it does to its own streams has the same bits."""
    step = random_step(replace(RAGGED, streams=3), F32, F32, mode)
    own = step.dM.shape[0] // 3
    got, together = slot_rows(step, device, table=table, first_stream=1), slot_rows(step, device)
    for a, b, before in zip(got[:2], together[:2], (step.dM, step.where), strict=True):
        assert_same_bits([a[:own], a[own:]], [before[:own], b[own:]])
    assert_same_bits(got[2:], [x[1:] for x in together[2:]])


@every_device
@pytest.mark.parametrize("sizes", [RAGGED, SIZES[1], SIZES[-1]], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("versions", [False, True], ids=["compact", "versions"])
@pytest.mark.parametrize("groups", [slot_parts.MOST_GROUPS, 8])
def test_the_rows_of_many_steps(
    groups: int, versions: bool, first: int, sizes: Sizes, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that one step after the other finds, the last one first; `first`: the steps that are not among them.

    versions: a written slot's row is the one that its version was made from. groups: that a program takes at a time."""
    monkeypatch.setattr(slot_parts, "MOST_GROUPS", groups)
    steps = [random_step(sizes, F32, F32, seed=seed) for seed in range(3)]
    per_step, E = steps[0].per_step(), steps[0].k_idx[0].numel()
    before = torch.where(torch.arange(len(steps[0].where)) % 2 == 0, -1, 5 * per_step).int()
    expected, where = [], before.clone()
    previous = torch.randint(-1, first * per_step + 9, ((first + 4) * per_step,), dtype=torch.int32)
    for number, step in reversed(list(enumerate(steps, start=first))):
        slot, ordinal = step.groups.slot, step.groups.ordinal
        rows = number * per_step + torch.arange(sizes.streams)[:, None] * E + ordinal
        own = previous[rows] if versions else rows
        found = torch.where(ordinal >= 0, own, where[slot.clamp_min(0).long()]).int()
        expected.insert(0, found.masked_fill(slot < 0, -1))
        where[slot[ordinal >= 0].long()] = found[ordinal >= 0]
    fence = Fence(device)
    slot, ordinal = (
        fence.around(torch.stack([getattr(step.groups, x) for step in steps])) for x in ("slot", "ordinal")
    )
    got, numbers = fence.around(before), fence.around(torch.full(slot.shape, 77, dtype=torch.int32))
    payload = torch.empty((first + 4) * per_step, 3, device=device)
    row_numbers_call(
        *(got, payload, payload[first * per_step :], fence.around(previous) if versions else None, None),
        *(slot, ordinal, numbers),
        rows_per_step=per_step,
        rows_per_stream=E,
    ).launch()
    fence.check()
    assert_same_bits([got.cpu(), numbers.cpu()], [where, torch.stack(expected)])


@pytest.mark.parametrize("width", [1, 2, 63, 64, 768, 1000, 1024, 5000, 16384, 20000])
def test_parts_cover_the_columns(width: int) -> None:
    for chunk in (64, 256):
        for config in (GradientGatherConfig.from_shapes(chunk, 64, width), SlotRowsConfig.from_shapes(chunk, width)):
            assert (config.parts(width) - 1) * config.columns < width <= config.parts(width) * config.columns


def calls(dtype: torch.dtype, sizes: Sizes) -> Iterator[Any]:
    out, table, numbers = torch.empty(1), torch.empty(8, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    for mode in SNAPSHOT_MODES:
        step = random_step(sizes, dtype, dtype, mode)
        banks = Banks(*step[:2], step.snapshot, table if mode in ("none", "fp8") else None)
        entries = SlotEntries(*step.groups[1:], numbers, numbers, out, step.group_decay)
        yield slot_rows_call(banks, entries, step.du, step.dy, out, out)
        of_groups = (*(torch.stack([x, x]) for x in (step.groups.slot, step.groups.ordinal)), numbers)
        for previous in (None, numbers):
            yield row_numbers_call(
                *(step.where, *[step.snapshot.payload] * 2, previous, banks.table, *of_groups),
                rows_per_step=step.per_step(),
                rows_per_stream=step.k_idx[0].numel(),
            )
    for given in (banks, banks._replace(table=table)):
        yield gradient_gather_call(given, step.k_idx, step.write_w, step.delta, out, out)
    yield entry_weights_call(step.groups.keys, step.k_eff, step.q_w, step.beta, numbers, out)
    yield entry_dots_call(step.groups.keys, torch.empty(1, 3, 1), step.beta, step.k_eff, step.q_w)
    yield sum_parts_call(torch.empty(2, 3, 5), torch.empty(2, 5))


@without_the_interpreter
@pytest.mark.parametrize(("dtype", "width"), [(F32, 33), (BF16, 1024)], ids=str)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles(capability: int, dtype: torch.dtype, width: int) -> None:
    sizes = Sizes("compiled", streams=1, chunk=2, writes=20, reads=12, width=width, slots=30)
    for call in calls(dtype, sizes):
        assert compile_call(call, capability).asm["cubin"]
