"""The decode step's kernel in Triton's interpreter, against the CPU kernel; and compiled for every architecture.

The interpreter has to be chosen before Triton is imported, so that these tests run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile import repeated_write_slots, sdm_decode_step
from tests.cases import CASES, FLOATS, RAGGED, TANGLED, Case, Inputs
from tests.harness import assert_close, assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter

triton = pytest.importorskip("triton")
from sdm_compile.ops.decode_kernels import DecodeConfig, _decode_step_kernel, decode_step_call  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")
every_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def one_token(inputs: Inputs, t: int = 0) -> Inputs:
    return Inputs(inputs.memory.clone(), *(x[:, t] for x in inputs[1:]))


def configs(inputs: Inputs) -> Iterator[DecodeConfig]:
    """The launch shape of these inputs, and others that must not change a bit."""
    streams, width = inputs.v.shape
    config = DecodeConfig.from_shapes(
        streams, inputs.k_idx.shape[-1], inputs.q_idx.shape[-1], width, inputs.memory.element_size()
    )
    yield config
    yield replace(config, early=not config.early)
    yield replace(config, keep=not config.keep)
    for columns in (4, 64):
        yield replace(config, columns=columns)


def step(inputs: Inputs, config: DecodeConfig | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Readings, the bank and the number of repeats, of a copy of the bank."""
    bank = inputs.memory.clone()
    readings = torch.full(inputs.v.shape, NAN, dtype=bank.dtype)
    repeats = torch.zeros((), dtype=torch.int64)
    contiguous = (x.contiguous() for x in inputs[1:])
    decode_step_call(config or next(configs(inputs)), bank, *contiguous, readings, repeats).launch()
    return readings, bank, repeats


def cpu_step(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    bank = inputs.memory.clone()
    repeated_write_slots()
    readings = sdm_decode_step(bank, *inputs[1:])
    return readings, bank, torch.tensor(repeated_write_slots())


def assert_step(inputs: Inputs) -> None:
    """The interpreter cuts float32 off where a GPU rounds it to bfloat16: the tolerance of bfloat16 covers that."""
    assert_close(step(inputs), cpu_step(inputs))


@in_the_interpreter
@every_dtype
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_it_is_the_cpu_step(case: Case, dtype: torch.dtype) -> None:
    inputs = replace(case, tokens=2).make(dtype)
    for t in range(2):
        assert_step(one_token(inputs, t))


@in_the_interpreter
@every_dtype
@pytest.mark.parametrize(
    "case",
    [
        Case("most rows", streams=2, writes=256, reads=256, head_dim=3, slots=300, repeated=0.1, write_gates=True),
        Case("groups of two widths", writes=130, reads=20, head_dim=17, slots=140, no_slot=0.1),
        Case("several pieces of a row", writes=9, reads=10, head_dim=70, slots=12),
    ],
    ids=lambda c: c.name,
)
def test_larger_shapes(case: Case, dtype: torch.dtype) -> None:
    assert_step(one_token(replace(case, tokens=1).make(dtype)))


@in_the_interpreter
@every_dtype
@pytest.mark.parametrize(
    "case", [TANGLED, Case("wide", writes=17, reads=9, slots=23, head_dim=33)], ids=lambda c: c.name
)
def test_bits_depend_on_no_launch_shape_and_on_no_other_stream(case: Case, dtype: torch.dtype) -> None:
    inputs = one_token(case.make(dtype))
    readings, bank, repeats = step(inputs)
    for config in configs(inputs):
        assert_same_bits(step(inputs, config), (readings, bank, repeats))
    for p in range(2):
        alone = inputs._replace(**{name: x[p : p + 1] for name, x in inputs._asdict().items() if name != "memory"})
        own = slice(p * case.slots, (p + 1) * case.slots)
        got = step(alone)
        assert_same_bits((got[0][0], got[1][own]), (readings[p], bank[own]))


@in_the_interpreter
@pytest.mark.parametrize("place", ["k_idx", "q_idx"])
def test_ids_beyond_the_bank_are_no_slots(place: str) -> None:
    inputs = one_token(replace(RAGGED, spare_slots=0).make(F32))
    ids = getattr(inputs, place).clone()
    ids[:, 1] = -1
    expected = step(inputs._replace(**{place: ids}))
    for beyond in (inputs.memory.shape[0], 2**31, 2**62):
        ids[:, 1] = beyond
        assert_same_bits(step(inputs._replace(**{place: ids})), expected)


@in_the_interpreter
@every_dtype
def test_nothing_outside_is_touched(dtype: torch.dtype) -> None:
    """NaN around the bank and between the inputs; the bank starts at an odd element."""
    inputs = one_token(TANGLED.make(dtype))
    expected = step(inputs)
    around = torch.full((inputs.memory.numel() + 14,), NAN, dtype=dtype)
    bank = around[7:-7].view(inputs.memory.shape)
    bank.copy_(inputs.memory)
    fenced = {}
    for name in FLOATS[1:]:
        x = getattr(inputs, name)
        fenced[name] = torch.full((x.shape[0] + 2, x.shape[1]), NAN, dtype=x.dtype)[1:-1].copy_(x)
    readings = torch.full_like(expected[0], NAN)
    others = (x.contiguous() for x in inputs._replace(**fenced)[1:])
    decode_step_call(next(configs(inputs)), bank, *others, readings, torch.zeros((), dtype=torch.int64)).launch()
    assert_same_bits((readings, bank), expected[:2])
    assert around[:7].isnan().all() and around[-7:].isnan().all()


@in_the_interpreter
@every_dtype
@pytest.mark.parametrize("write_gates", [False, True], ids=["token gates", "write gates"])
def test_nan_without_a_slot_reaches_nothing(dtype: torch.dtype, write_gates: bool) -> None:
    every = replace(TANGLED, write_gates=write_gates).make(dtype)
    for t in range(6):
        inputs = one_token(every, t)
        no_write, no_read = inputs.k_idx < 0, inputs.q_idx < 0
        silent = no_write.all(-1, keepdim=True)
        gates = no_write if write_gates else silent
        masks = {"k_val": no_write, "v": silent, "beta": silent, "g": gates, "q_val": no_read}
        poisoned = inputs._replace(**{name: getattr(inputs, name).masked_fill(m, NAN) for name, m in masks.items()})
        assert_same_bits(step(poisoned), step(inputs))


@in_the_interpreter
@pytest.mark.parametrize("place", FLOATS)
def test_nan_stays_in_its_stream(place: str) -> None:
    inputs = one_token(RAGGED.make(F32))
    clean = step(inputs)
    own = slice(0, RAGGED.slots)
    getattr(inputs, place)[own if place == "memory" else 0] = NAN
    readings, bank, _ = step(inputs)
    assert readings[0].isnan().all()
    assert_same_bits((readings[1], bank[RAGGED.slots :]), (clean[0][1], clean[1][RAGGED.slots :]))


@in_the_interpreter
@pytest.mark.parametrize("lead", [(), (2, 1, 3), (0, 2)], ids=str)
def test_any_leading_dimensions_and_input_dtypes(lead: tuple[int, ...]) -> None:
    flat = one_token(replace(RAGGED, streams=torch.Size(lead).numel(), id_dtype=torch.int32).make(BF16))
    flat = flat._replace(memory=flat.memory.float(), beta=flat.beta.float(), g=flat.g.float())
    shaped = Inputs(flat.memory, *(x.reshape(*lead, x.shape[-1]) for x in flat[1:]))
    config = DecodeConfig.from_shapes(6, RAGGED.writes, RAGGED.reads, RAGGED.head_dim, 4)
    assert_close(step(shaped, config), cpu_step(shaped))


@in_the_interpreter
def test_many_repeats_are_merged_and_counted_once_per_stream() -> None:
    inputs = one_token(replace(RAGGED, writes=12, slots=9, head_dim=40).make(F32))
    inputs = inputs._replace(k_idx=inputs.k_idx.flip(-1).contiguous())
    inputs.k_idx[0] = 3  # one slot twelve times
    inputs.k_idx[1, :3] = -1
    config = replace(next(configs(inputs)), columns=8)
    expected = cpu_step(inputs)
    assert expected[2] > 11
    assert_close(step(inputs, config), expected)


@in_the_interpreter
def test_the_gate_of_a_repeat_reaches_nothing() -> None:
    inputs = one_token(replace(RAGGED, write_gates=True).make(F32))
    inputs.k_idx[:, 2] = inputs.k_idx[:, 0]
    expected = step(inputs)
    assert expected[2] == 2
    inputs.g[:, 2] = NAN
    assert_same_bits(step(inputs), expected)


@without_the_interpreter
def test_rows_stay_in_the_cache_where_not_all_of_them_fit() -> None:
    for streams, keep in ((64, False), (256, True)):
        assert DecodeConfig.from_shapes(streams, 64, 64, 1024, 2).keep == keep


@without_the_interpreter
@pytest.mark.parametrize("capability, overlap", [(80, False), (90, False), (90, True), (100, True)])
@pytest.mark.parametrize("bank, ids, gates", [("bf16", "i64", False), ("fp32", "i32", True)])
def test_it_compiles_without_a_gpu(capability: int, overlap: bool, bank: str, ids: str, gates: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    config = DecodeConfig.from_shapes(2, 20, 9, 24, 2)
    signature: dict[str, Any] = {"p_bank": bank, "p_k_idx": ids, "p_k_val": "fp32", "p_v": "fp32", "p_beta": "fp32"}
    signature |= {"p_g": "bf16", "p_q_idx": ids, "p_q_val": "bf16", "p_readings": bank, "p_repeats": "i64"}
    signature = {name: f"*{kind}" for name, kind in signature.items()} | {"num_slots": "i32"}
    constants = {"D": 24, "W": 20, "R": 9, "BW": 32, "GW": config.rows_w, "GR": config.rows_r, "GATES": gates}
    constants |= {"BD": config.columns, "EARLY": True, "KEEP": True, "OVERLAP": overlap}
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = triton.compile(
        ASTSource(_decode_step_kernel, signature, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": config.warps, "enable_fp_fusion": False, "launch_pdl": overlap},
    )
    assert kernel.asm["cubin"]
