"""Training's launches in Triton's interpreter: what a saving forward keeps, and the gradients, against the CPU's ops.

The interpreter has to be chosen before Triton is imported, so that these tests run in a process of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_compile import repeated_write_slots
from sdm_compile.ops.write_read_bwd import Saved
from sdm_compile.ops.write_read_ops import backward_cpu, bank_gradient, empty_saved, save_cpu
from tests.cases import RAGGED, REUSE, SIGNED, TANGLED, Case
from tests.harness import assert_close, assert_same_bits, normal_like
from tests.interpreted import in_the_interpreter, run_interpreted

pytest.importorskip("triton")
from sdm_compile.ops.write_read_grad_cuda import backward_cuda, save_cuda

CASES = [RAGGED, replace(TANGLED, tokens=23), SIGNED, replace(REUSE, tokens=21)]


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def unflattened(saved: Saved, case: Case) -> Saved:
    steps = -(-case.tokens // case.chunk_size)
    return saved.unflattened(steps, case.streams, case.chunk_size, case.writes)


def save(case: Case, mode: str, writer: str) -> tuple[Tensor, Tensor, Saved]:
    memory, *inputs = case.make(torch.float32)
    bank, readings = memory.clone(), torch.full_like(inputs[2], float("nan"))
    saved = unflattened(empty_saved(memory, inputs[0], inputs[5], case.chunk_size, mode), case)
    for x in saved:
        x.copy_(torch.full(x.shape, 7.0))
    save_cuda(bank, inputs, readings, saved, mode, writer, count_repeats=True)
    return readings, bank, saved


@in_the_interpreter
@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_saving_forward(case: Case, mode: str) -> None:
    memory, *inputs = case.make(torch.float32)
    bank = memory.clone()
    repeated_write_slots()
    readings, kept = save_cpu(bank, inputs, case.chunk_size, mode)
    repeats = repeated_write_slots()
    got_readings, got_bank, got = save(case, mode, "write")
    assert repeated_write_slots() == repeats
    assert_close((got_readings, got_bank), (readings, bank))
    kept = unflattened(kept, case)
    for name in Saved._fields:
        a, b = getattr(got, name), getattr(kept, name)
        if name not in ("snapshot", "scales"):
            assert_close([a], [b])
    first = slice(0, case.streams * case.chunk_size * case.writes)  # of the first step, whose bank has no rounding yet
    rows = [x.view(torch.uint8)[first] for x in (got.snapshot, kept.snapshot)]
    assert_same_bits(*rows)
    if mode == "none":
        assert_close([got.snapshot], [kept.snapshot])


@in_the_interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_writers_store_the_same_bits(case: Case) -> None:
    assert_same_bits(save(case, "none", "gather"), save(case, "none", "write"))


@in_the_interpreter
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("mode", ["none", "int4"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case: Case, mode: str, given: tuple[bool, bool]) -> None:
    memory, *inputs = case.make(torch.float32)
    bank = memory.clone()
    readings, kept = save_cpu(bank, inputs, case.chunk_size, mode)
    dreadings, dfinal = (normal_like(x) if wanted else None for x, wanted in zip((readings, bank), given, strict=True))
    expected, got = (bank_gradient(dfinal, bank, True) for _ in range(2))
    before = bank.clone()
    grads = backward_cpu(dreadings, expected, bank, inputs, kept, case.chunk_size, mode)
    found = backward_cuda(dreadings, got, bank, inputs, unflattened(kept, case), mode)
    assert_close((got, *found), (expected, *grads))
    assert_same_bits(bank, before)
