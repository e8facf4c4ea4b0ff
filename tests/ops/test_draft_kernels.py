"""The kernels of draft and commit in Triton's interpreter, against the decode step's kernel; and compiled for every
architecture.

The interpreter has to be chosen before Triton is imported, so that these tests run in a process of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.cases import CASES, FLOATS, RAGGED, TANGLED, Case, Inputs
from tests.compiled import compile_call
from tests.harness import assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter

triton = pytest.importorskip("triton")
from sdm_compile.ops.decode_kernels import DecodeConfig, decode_step_call  # noqa: E402
from sdm_compile.ops.draft_kernels import (  # noqa: E402
    CommitConfig,
    DraftConfig,
    commit_call,
    draft_call,
    launch_draft,
    sources_call,
)

F32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")
every_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def config_of(inputs: Inputs) -> DraftConfig:
    streams, _, writes = inputs.k_idx.shape
    return DraftConfig.from_shapes(
        streams, writes, inputs.q_idx.shape[2], inputs.memory.shape[1], inputs.memory.element_size()
    )


def drafted(inputs: Inputs, config: DraftConfig | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Readings, new rows (NaN where none was written), slots and the number of repeats; the bank must stay."""
    before = inputs.memory.clone()
    (*lead, writes), width = inputs.k_idx.shape, inputs.memory.shape[1]
    readings = torch.full((*lead, width), NAN, dtype=before.dtype)
    new_rows = torch.full((*lead, writes, width), NAN, dtype=before.dtype)
    slots = torch.full((*lead, writes), 7**9, dtype=torch.int32)
    repeats = torch.zeros((), dtype=torch.int64)
    others = [x.contiguous() for x in inputs[1:]]
    if config is None:
        launch_draft(inputs.memory, others, readings, new_rows, slots, repeats)
    else:
        sources = torch.full((*lead, writes + inputs.q_idx.shape[2]), 7**9, dtype=torch.int32)
        sources_call(config, others[0], others[5], len(before), sources, slots).launch()
        draft_call(config.step, inputs.memory, *others, sources, readings, new_rows, repeats).launch()
    assert_same_bits(inputs.memory, before)
    return readings, new_rows, slots, repeats


def committed(bank: Tensor, new_rows: Tensor, slots: Tensor, accepted: Tensor, config: CommitConfig | None = None):
    bank = bank.clone()
    config = config or CommitConfig.from_shapes(slots.shape[2], bank.shape[1])
    commit_call(config, bank, new_rows, slots, accepted).launch()
    return bank


def decoded(inputs: Inputs) -> tuple[Tensor, list[Tensor], Tensor]:
    """Readings, the bank before each token and after the last, and the number of repeats, of the decode kernel."""
    config, repeats = config_of(inputs).step, torch.zeros((), dtype=torch.int64)
    banks, readings = [inputs.memory.clone()], []
    for t in range(inputs.v.shape[1]):
        banks.append(banks[-1].clone())
        readings.append(torch.full_like(inputs.v[:, t], NAN, dtype=inputs.memory.dtype).contiguous())
        token = (x[:, t].contiguous() for x in inputs[1:])
        decode_step_call(config, banks[-1], *token, readings[-1], repeats).launch()
    return torch.stack(readings, 1), banks, repeats


def assert_draft(inputs: Inputs) -> None:
    """The bits of decode steps, also where each stream accepts another number of tokens."""
    readings, banks, repeats = decoded(inputs)
    got, new_rows, slots, counted = drafted(inputs)
    assert_same_bits((got, counted), (readings, repeats))
    streams, tokens = inputs.v.shape[:2]
    for first in (-1, 0, 1, tokens):
        accepted = torch.arange(first, first + streams)
        bank = committed(inputs.memory, new_rows, slots, accepted)
        expected = inputs.memory.clone()
        for p, count in enumerate(accepted.clamp(0, tokens).tolist()):
            own = slots[p][slots[p] >= 0].long()
            expected[own] = banks[count][own]
        assert_same_bits(bank, expected)


def few(case: Case) -> Case:
    return replace(case, tokens=min(case.tokens, 4))


@in_the_interpreter
@every_dtype
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "widest"], ids=lambda c: c.name)
def test_it_is_the_decode_kernel_token_by_token(case: Case, dtype: torch.dtype) -> None:
    assert_draft(few(case).make(dtype))


@in_the_interpreter
@pytest.mark.parametrize(
    "case",
    [
        Case("most rows", 1, tokens=2, writes=256, reads=256, head_dim=3, slots=300, repeated=0.1, write_gates=True),
        Case("groups of two widths", tokens=3, writes=130, reads=20, head_dim=17, slots=140, no_slot=0.1),
        Case("several pieces of a row", tokens=3, writes=9, reads=10, head_dim=70, slots=12),
        Case("many tokens", streams=1, tokens=64, writes=2, reads=3, head_dim=2, slots=3, id_dtype=torch.int32),
    ],
    ids=lambda c: c.name,
)
def test_larger_shapes(case: Case) -> None:
    assert_draft(case.make(F32))


@in_the_interpreter
@every_dtype
def test_bits_depend_on_no_launch_shape_and_on_no_other_stream(dtype: torch.dtype) -> None:
    inputs = replace(TANGLED, tokens=3, writes=10, slots=11, head_dim=9).make(dtype)
    expected = drafted(inputs)
    usual = config_of(inputs)
    for step, ids, written in (
        (replace(usual.step, early=not usual.step.early), 4, 8),
        (replace(usual.step, columns=4), 64, 128),
    ):
        assert_same_bits(drafted(inputs, replace(usual, step=step, ids=ids, written=written)), expected)
    accepted = torch.tensor([3, 2])
    bank = committed(inputs.memory, *expected[1:3], accepted)
    for config in (CommitConfig(2, 4, 2, 1), CommitConfig(64, 128, 64, 4)):
        assert_same_bits(committed(inputs.memory, *expected[1:3], accepted, config), bank)
    for p in range(2):
        alone = drafted(inputs.stream(p))[:3]
        assert_same_bits(alone, [x[p : p + 1] for x in expected[:3]])
        own = slice(p * 11, p * 11 + 11)
        assert_same_bits(committed(inputs.memory, *alone[1:], accepted[p : p + 1])[own], bank[own])


@in_the_interpreter
@pytest.mark.parametrize("place", ["k_idx", "q_idx"])
def test_ids_beyond_the_bank_are_no_slots(place: str) -> None:
    inputs = few(replace(RAGGED, spare_slots=0)).make(F32)
    ids = getattr(inputs, place).clone()
    ids[..., 1] = -1
    expected = drafted(inputs._replace(**{place: ids}))
    for beyond in (inputs.memory.shape[0], 2**31, 2**32, 2**62):
        ids[..., 1] = beyond
        assert_same_bits(drafted(inputs._replace(**{place: ids})), expected)
    _, new_rows, slots, _ = expected
    rows, accepted = len(inputs.memory), torch.tensor([4, 2])
    around = torch.full((rows + 2, inputs.memory.shape[1]), 7.0)
    bank = around[:rows].copy_(inputs.memory)
    beyond_slots = slots.masked_fill(slots < 0, rows)
    commit_call(CommitConfig.from_shapes(3, 5), bank, new_rows, beyond_slots, accepted).launch()
    assert_same_bits(bank, committed(inputs.memory, new_rows, slots, accepted))
    assert (around[rows:] == 7).all()


@in_the_interpreter
def test_one_writer_per_row() -> None:
    """Whichever programs have run, a row is what it was or what it will be."""
    inputs = replace(RAGGED, tokens=6, slots=4).make(F32)
    _, new_rows, slots, _ = drafted(inputs)
    accepted = torch.tensor([6, 4])
    final = committed(inputs.memory, new_rows, slots, accepted)
    for programs in range(1, 5):
        bank = inputs.memory.clone()
        call = commit_call(CommitConfig.from_shapes(3, 5), bank, new_rows, slots, accepted)
        call._replace(grid=(programs,)).launch()
        assert ((bank == final) | (bank == inputs.memory)).all()


@in_the_interpreter
@pytest.mark.parametrize("counts", [torch.tensor([-(2**62), 2**62]), torch.tensor([-7, 99], dtype=torch.int32)])
def test_any_count_is_taken_into_the_draft(counts: Tensor) -> None:
    inputs = few(RAGGED).make(F32)
    _, new_rows, slots, _ = drafted(inputs)
    got = committed(inputs.memory, new_rows, slots, counts)
    assert_same_bits(got, committed(inputs.memory, new_rows, slots, torch.tensor([0, 4])))
    assert_same_bits(got[: RAGGED.slots], inputs.memory[: RAGGED.slots])
    assert not torch.equal(got, inputs.memory)


@in_the_interpreter
@every_dtype
def test_nothing_outside_is_touched(dtype: torch.dtype) -> None:
    """NaN around the bank and the inputs; the bank starts at an odd element; entries without a slot stay unwritten."""
    inputs = few(TANGLED).make(dtype)
    expected = drafted(inputs)
    around = torch.full((inputs.memory.numel() + 14,), NAN, dtype=dtype)
    bank = around[7:-7].view(inputs.memory.shape)
    bank.copy_(inputs.memory)
    fenced = {}
    for name in FLOATS[1:]:
        x = getattr(inputs, name)
        fenced[name] = torch.full((x.shape[0] + 2, *x.shape[1:]), NAN, dtype=x.dtype)[1:-1].copy_(x)
    got = drafted(inputs._replace(memory=bank, **fenced))
    assert_same_bits(got, expected)
    assert got[1][got[2] < 0].isnan().all() and got[1][got[2] >= 0].isfinite().all()
    accepted = torch.tensor([4, 3])
    commit_call(CommitConfig.from_shapes(3, bank.shape[1]), bank, *got[1:3], accepted).launch()
    assert_same_bits(bank, committed(inputs.memory, *expected[1:3], accepted))
    assert around[:7].isnan().all() and around[-7:].isnan().all()


@in_the_interpreter
@pytest.mark.parametrize("case", [replace(RAGGED, streams=0), replace(RAGGED, tokens=0)], ids=["streams", "tokens"])
def test_without(case: Case) -> None:
    inputs = case.make(F32)
    readings, new_rows, slots, _ = drafted(inputs)
    assert readings.shape == inputs.v.shape
    accepted = torch.ones(case.streams, dtype=torch.int64)
    assert_same_bits(committed(inputs.memory, new_rows, slots, accepted), inputs.memory)


@without_the_interpreter
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype, ids, gates", [(BF16, torch.int64, False), (F32, torch.int32, True)], ids=str)
def test_they_compile_without_a_gpu(capability: int, dtype: torch.dtype, ids: torch.dtype, gates: bool) -> None:
    case = Case("", streams=2, tokens=4, writes=20, reads=9, head_dim=24, slots=30, write_gates=gates, id_dtype=ids)
    inputs = case.make(dtype)
    config = config_of(inputs)
    sources = torch.zeros(2, 4, 29, dtype=torch.int32)
    new_rows, slots = torch.zeros(2, 4, 20, 24, dtype=dtype), torch.zeros(2, 4, 20, dtype=torch.int32)
    repeats = torch.zeros((), dtype=torch.int64)
    accepted = torch.zeros(2, dtype=ids)
    assert isinstance(config.step, DecodeConfig)
    for call in (
        sources_call(config, inputs.k_idx, inputs.q_idx, 61, sources, slots),
        draft_call(config.step, *inputs, sources, inputs.v.clone(), new_rows, repeats),
        commit_call(CommitConfig.from_shapes(20, 24), inputs.memory, new_rows, slots, accepted),
    ):
        assert compile_call(call, capability).asm["cubin"]
