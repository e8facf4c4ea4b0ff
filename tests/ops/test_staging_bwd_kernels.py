"""The kernels of the staging's backward against the CPU kernels, bit for bit: interpreted, and on a GPU.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile.ops import staging
from sdm_compile.ops.layout import num_steps
from tests.cases import TANGLED, Case
from tests.harness import LAYOUTS, assert_same_bits, laid_out
from tests.interpreted import in_the_interpreter, run_interpreted

triton = pytest.importorskip("triton")

F32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
WIDE = replace(TANGLED, name="wide", tokens=9, writes=70, reads=65, slots=90, head_dim=33, repeated=0.6)
EVERY = [TANGLED, replace(TANGLED, name="one gate", write_gates=False), WIDE, Case("one write", writes=1, no_slot=0.5)]


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def numbers(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Short ones, which every dtype holds."""
    return torch.randint(-99, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def args_of(case: Case, dtypes: tuple[torch.dtype, torch.dtype] = (F32, F32)) -> list[Tensor]:
    """Gradients of the first dtype, inputs of the second."""
    given, own = dtypes
    _, k_idx, k_val, v, beta, g, q_idx, q_val = case.make(own)
    lead = (num_steps(case.tokens, case.chunk_size), case.streams, case.chunk_size)
    grads = [numbers(*lead, x.shape[2], dtype=given, seed=i) for i, x in enumerate((k_val, v, beta, g, q_val))]
    return [*grads, k_idx, k_val, v, beta, g, q_idx, q_val]


def assert_as_on_the_cpu(args: list[Tensor], device: str) -> list[Tensor]:
    got = [x.cpu() for x in staging._stage_inputs_bwd_cuda(*(x.to(device) for x in args))]
    assert_same_bits(got, staging._stage_inputs_bwd_cpu(*args))
    return got


@every_device
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16)], ids=str)
def test_stage_inputs_bwd(case: Case, dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    assert_as_on_the_cpu(args_of(case, dtypes), device)


@every_device
@pytest.mark.parametrize("write_gates", [False, True])
def test_nan_at_what_has_no_slot_comes_from_nowhere(write_gates: bool, device: str) -> None:
    case = replace(TANGLED, write_gates=write_gates)
    args = args_of(case)
    inputs = args[5:]
    staged = staging._stage_inputs_cpu(*inputs, 99, F32, case.chunk_size, False)
    no_write, no_read = staged[0] < 0, staged[5] < 0
    silent = no_write.all(-1, keepdim=True)
    nowhere = no_write, silent, silent, no_write if write_gates else silent, no_read
    poisoned = [x.masked_fill(where, NAN) for x, where in zip(args, nowhere, strict=False)]
    assert all(x.isnan().any() for x in poisoned)
    for x in assert_as_on_the_cpu([*poisoned, *inputs], device):
        assert x.isfinite().all()


@every_device
@every_layout
def test_stage_inputs_bwd_of_any_strides(layout: str, device: str) -> None:
    assert_as_on_the_cpu([laid_out(x, layout) for x in args_of(TANGLED)], device)


@every_device
def test_ids_beyond_int32_are_their_own(device: str) -> None:
    args = args_of(Case("ids", streams=1, tokens=1, writes=4, chunk_size=1, write_gates=True))
    args[5] = torch.tensor([5, 2**32 + 5, 5, 2**32 + 5]).view(1, 1, 4)
    dk_val, _, _, dg, _ = assert_as_on_the_cpu(args, device)
    assert_same_bits(dk_val.flatten(), args[0].flatten()[[0, 1, 0, 1]])
    assert_same_bits(dg.flatten(), args[3].flatten().where(torch.tensor([True, True, False, False]), 0))


def assert_unstaged(dreadings: Tensor, chunk_size: int, device: str) -> None:
    got: Any = staging._unstage_readings_bwd_cuda(dreadings.to(device), chunk_size)
    assert_same_bits(got.cpu(), staging._unstage_readings_bwd_cpu(dreadings, chunk_size))


@every_device
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(0, 3), (1, 1), (7, 5), (8, 1024), (9, 1025)])
def test_unstage_readings_bwd(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    assert_unstaged(numbers(2, tokens, width, dtype=dtype), 4, device)


@every_device
@every_layout
def test_unstage_readings_bwd_of_any_strides(layout: str, device: str) -> None:
    assert_unstaged(laid_out(numbers(2, 7, 5), layout), 3, device)
