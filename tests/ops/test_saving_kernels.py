"""The kernels that store a step's raw rows in a snapshot: the same bits in the same places, whichever stage does it.

In Triton's interpreter, on a GPU, and compiled without one. The interpreter has to be chosen before Triton is imported,
so that its tests run in a process of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile.ops import decay_write
from sdm_compile.ops.layout import StepGroups
from sdm_compile.ops.phase1 import phase1
from sdm_compile.ops.snapshot import SNAPSHOT_MODES, SnapshotMismatchError, StepRows, empty_snapshot
from tests.cases import Case
from tests.compiled import compile_call
from tests.harness import Sample, assert_close, assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter
from tests.samples import CASES

triton = pytest.importorskip("triton")
from sdm_compile.ops.decay_write_kernels import DecayWriteConfig, decay_write_call  # noqa: E402
from tests import loops  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
SMALL_BLOCKS = DecayWriteConfig(groups=4, columns=4, warps=1)
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
every_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
every_mode = pytest.mark.parametrize("mode", SNAPSHOT_MODES)
SAMPLES = [sample for case in CASES if case.op == "decay_write_" for sample in case.samples]


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def random_step(dtype: torch.dtype, width: int, chunk: int = 6, writes: int = 3, slots: int = 5) -> tuple[Any, ...]:
    """bank, k_idx [P, C, W], delta and groups of one step of two streams; some ids are negative."""
    g = torch.Generator().manual_seed(width)
    k_idx = torch.rand(1, 2, chunk, slots, generator=g).argsort(-1)[..., :writes]
    k_idx += slots * torch.arange(2)[:, None, None]
    k_idx[torch.rand(k_idx.shape, generator=g) < 0.2] = -1
    gates, weights = -torch.rand(1, 2, chunk, 1, generator=g), torch.rand(k_idx.shape, generator=g)
    fields = phase1(k_idx.int(), weights, gates, k_idx.int(), weights)
    bank = torch.randn(2 * slots + 1, width, generator=g)
    bank *= 10.0 ** torch.randint(-4, 5, (len(bank), 1), generator=g)
    delta = torch.randn(2, chunk, width, generator=g)
    groups = StepGroups(*(getattr(fields, name)[0].contiguous() for name in StepGroups._fields))
    return bank.to(dtype), k_idx[0].int().contiguous(), delta, groups


def fenced(bank: Tensor, groups: StepGroups, mode: str, device: str) -> tuple[Tensor, Tensor]:
    """Room for a snapshot with bytes of 85 in it, in the middle of as much more."""
    rows = groups.group_slot.numel()
    payload, scales = (x.to(device) for x in empty_snapshot(3 * rows, bank, mode))
    payload.view(torch.uint8).fill_(85)
    scales.fill_(-3)
    return payload, scales


def middle(x: Tensor) -> Tensor:
    return x[len(x) // 3 : 2 * len(x) // 3]


def codes(payload: Tensor) -> Tensor:
    """Its elements as integers; every NaN as 1."""
    integers = payload.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[payload.element_size()])
    return integers.masked_fill(payload.float().isnan(), 1)


def saved(
    bank: Tensor, delta: Tensor, groups: StepGroups, mode: str, device: str, config: DecayWriteConfig | None
) -> list[Tensor]:
    """The bank, the payload's codes and the scales that the kernel leaves, with what lies around the latter two."""
    bank, room = bank.to(device, copy=True), fenced(bank, groups, mode, device)
    saving = StepRows(*(middle(x) for x in room), mode)
    on_device = StepGroups(*(x.to(device) for x in groups))
    decay_write_call(bank, None, delta.to(device), on_device, None, saving, config).launch()
    return [bank.cpu(), codes(room[0].cpu()), room[1].cpu()]


def saved_on_the_cpu(bank: Tensor, delta: Tensor, groups: StepGroups, mode: str) -> list[Tensor]:
    bank, room = bank.clone(), fenced(bank, groups, mode, "cpu")
    decay_write.decay_write_(bank, delta, *groups, *(middle(x) for x in room), mode)
    return [bank, codes(room[0]), room[1]]


def assert_saved(bank: Tensor, delta: Tensor, groups: StepGroups, mode: str, device: str) -> None:
    expected = saved_on_the_cpu(bank, delta, groups, mode)
    for config in (None, SMALL_BLOCKS) if bank.shape[1] < 50 else (None,):
        got = saved(bank, delta, groups, mode, device, config)
        assert_close(got[0], expected[0])
        assert_same_bits(got[1:], expected[1:])


@in_the_interpreter
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_every_sample_of_the_op(sample: Sample) -> None:
    expected, got = sample.args(F32), sample.args(F32)
    decay_write._decay_write_in_place_cpu(*expected)
    decay_write._decay_write_in_place_cuda(*got)
    assert_close(got[0], expected[0])
    if expected[7] is not None:
        assert torch.equal(got[7].view(torch.uint8), expected[7].view(torch.uint8))
        assert_same_bits(got[8], expected[8])


@every_device
@every_mode
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 23, 1025])
def test_the_write_saves_what_the_cpu_saves(width: int, dtype: torch.dtype, mode: str, device: str) -> None:
    """Rows of one block and of several, the largest value in each block in turn."""
    bank, _, delta, groups = random_step(dtype, width)
    for r in range(len(bank)):
        bank[r, -1 - r * width // len(bank)] *= 100
    bank[3] = 0
    assert_saved(bank, delta, groups, mode, device)


@every_device
@every_mode
@every_dtype
def test_nan_and_infinity_in_any_block(dtype: torch.dtype, mode: str, device: str) -> None:
    bank, _, delta, groups = random_step(dtype, 11)
    slots = groups.group_slot[groups.group_slot >= 0].tolist()[:5]
    for slot, column, value in zip(slots, (0, 5, 10, 2, 9), (NAN, NAN, NAN, INF, -INF), strict=True):
        bank[slot, column] = value
    assert_saved(bank, delta, groups, mode, device)


@every_device
@every_mode
def test_groups_beyond_the_bank_save_nothing(mode: str, device: str) -> None:
    bank, _, delta, groups = random_step(F32, 7)
    few = bank[:7].contiguous()
    without = groups._replace(group_slot=torch.where(groups.group_slot >= 7, -1, groups.group_slot))
    for config in (None, SMALL_BLOCKS):
        got, expected = (saved(few, delta, x, mode, device, config) for x in (groups, without))
        assert_same_bits(got, expected)


@every_device
@every_dtype
@pytest.mark.parametrize(("width", "chunk", "writes", "slots"), [(1, 1, 1, 1), (7, 6, 3, 5), (70, 5, 35, 40)])
def test_every_stage_that_can_saves_the_same(
    width: int, chunk: int, writes: int, slots: int, dtype: torch.dtype, device: str
) -> None:
    assert_saves_the_same(width, chunk, writes, slots, dtype, device)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize(("width", "streams"), [(96, 22), (192, 22), (1000, 5)])
def test_every_stage_saves_the_same_in_units_wider_than_a_row_is_left(
    width: int, streams: int, dtype: torch.dtype
) -> None:
    assert_saves_the_same(width, 17, 20, 70, dtype, "cuda", streams)


def assert_saves_the_same(
    width: int, chunk: int, writes: int, slots: int, dtype: torch.dtype, device: str, streams: int = 2
) -> None:
    sizes = dict(streams=streams, tokens=2 * chunk + 1, writes=writes, reads=2, slots=slots, chunk_size=chunk)
    case = Case("saving", head_dim=width, **sizes)
    memory, *inputs = (x.to(device) for x in case.make(dtype))
    memory[1] = torch.tensor(-1, dtype=torch.int32 if dtype == F32 else torch.int16).view(dtype)  # a NaN with a payload
    found = []
    for writer, by_step in (("write", True), ("write", False), ("gather", False)):
        bank, readings = memory.clone(), torch.empty_like(inputs[2])
        saving = loops.saving_of(case, memory, inputs, "none", writer)
        saved = saving.saved
        saved.snapshot.view(torch.uint8).fill_(85)
        loops.forward(bank, inputs, chunk, readings, saving, slab=1, by_step=by_step)
        kept = (saved.snapshot, saved.retrieved, bank, readings)
        found.append([x.contiguous().view(torch.uint8).cpu() for x in kept])
    assert (found[0][0] != 85).any()
    for other in found[1:]:
        assert_same_bits(other, found[0])


@in_the_interpreter
def test_launches_for_each_step_have_no_gather_that_saves_and_no_versions() -> None:
    case = Case("saving", streams=1, tokens=2, writes=2, reads=1, head_dim=4, slots=5, chunk_size=2)
    memory, *inputs = case.make(F32)
    saving = loops.saving_of(case, memory, inputs, "none", "gather")
    with pytest.raises(SnapshotMismatchError, match="not the gather"):
        loops.forward(memory.clone(), inputs, 2, torch.empty_like(inputs[2]), saving, slab=1, by_step=True)
    saving = loops.saving_of(case, memory, inputs, "none", "versions")
    with pytest.raises(SnapshotMismatchError, match=r"layout=6.*announced.*layout=2"):
        loops.forward(memory.clone(), inputs, 2, torch.empty_like(inputs[2]), saving, slab=1, by_step=True)


@without_the_interpreter
@every_dtype
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles(capability: int, dtype: torch.dtype) -> None:
    bank, _, delta, groups = random_step(dtype, 1024 if dtype == BF16 else 33)
    for mode in SNAPSHOT_MODES:
        saving = StepRows(*(middle(x) for x in fenced(bank, groups, mode, "cpu")), mode)
        call = decay_write_call(bank, None, delta, groups, None, saving)
        assert compile_call(call, capability).asm["cubin"]
