"""The stages' kernels without a GPU: their values in Triton's interpreter, and a cubin for every architecture.

The interpreter has to be chosen before Triton is imported, so that these tests run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sdm_compile import repeated_write_slots, sdm_write_read
from sdm_compile.ops import decay_write, dual_matmul, phase1, row_quant, solve, staging, token_gather
from sdm_compile.ops.layout import StepGroups
from tests.cases import RAGGED, REUSE, SIGNED, TANGLED, Case
from tests.compiled import compile_call
from tests.harness import OpCase, Sample, assert_close, assert_same_bits, tensors
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter
from tests.samples import CASES

triton = pytest.importorskip("triton")
from sdm_compile.ops import (  # noqa: E402
    decay_write_kernels,
    dual_matmul_kernels,
    phase1_bwd_kernels,
    phase1_kernels,
    row_quant_kernels,
    row_versions_kernels,
    row_writes_kernels,
    slot_groups_kernels,
    slot_sort_kernels,
    solve_kernels,
    staging_kernels,
    step_flow_kernels,
    token_gather_kernels,
)
from sdm_compile.ops.bound import KernelCall  # noqa: E402
from sdm_compile.ops.snapshot import SNAPSHOT_MODES  # noqa: E402
from sdm_compile.ops.step_table import ADDRESSES  # noqa: E402
from sdm_compile.ops.write_read_cuda import call_loops  # noqa: E402
from tests import loops  # noqa: E402

ON_CUDA: dict[str, Callable[..., Any]] = {
    "stage_inputs": staging._stage_inputs_cuda,
    "stage_inputs_bwd": staging._stage_inputs_bwd_cuda,
    "unstage_readings": staging._unstage_readings_cuda,
    "unstage_readings_bwd": staging._unstage_readings_bwd_cuda,
    "phase1": phase1._phase1_cuda,
    "phase1_bwd": phase1._phase1_bwd_cuda,
    "solve": solve._solve_cuda,
    "solve_bwd": solve._solve_bwd_cuda,
    "token_gather": token_gather._token_gather_cuda,
    "token_gather_bwd": token_gather._token_gather_bwd_cuda,
    "dual_matmul": dual_matmul._dual_matmul_cuda,
    "dual_matmul_bwd": dual_matmul._dual_matmul_bwd_cuda,
    "decay_write": decay_write._decay_write_cuda,
    "decay_write_bwd": decay_write._decay_write_bwd_cuda,
    "snapshot_quantize": row_quant._snapshot_quantize_cuda,
    "snapshot_dequantize": row_quant._snapshot_dequantize_cuda,
}


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


@in_the_interpreter
@pytest.mark.parametrize(
    ("case", "sample"),
    [
        pytest.param(case, sample, id=f"{case.op}-{sample.name}")
        for case in CASES
        if case.op in ON_CUDA
        for sample in case.samples
        if torch.float32 in sample.dtypes and "dtypes" not in sample.name
    ],
)
def test_stage(case: OpCase, sample: Sample) -> None:
    args = sample.args(torch.float32)
    assert_close(tensors(ON_CUDA[case.op](*args)), case.expected(args))


def write_read(case: Case, inputs: list[Tensor], steps: int, by_step: bool | None = None) -> tuple[Tensor, Tensor]:
    """What a call does on CUDA, in slabs of so many steps, one launch after the other."""
    memory, *inputs = inputs
    bank = memory.clone()
    readings = torch.full((case.streams, case.tokens, case.head_dim), float("nan"), dtype=bank.dtype)
    loops.forward(bank, inputs, case.chunk_size, readings, slab=steps, by_step=by_step)
    return readings, bank


@in_the_interpreter
def test_zeros_keep_their_signs_either_way() -> None:
    """Slot 0 stays at -0.0, whether or not a slot beside it, which two tokens write, is updated together with it."""
    case = replace(RAGGED, streams=1, tokens=2, writes=2, reads=1, head_dim=1024, slots=3, chunk_size=2)
    inputs = case.make(torch.float32)
    memory = torch.full_like(inputs.memory, -0.0)
    k_idx, k_val = torch.tensor([[[0, 1], [1, 2]]]), torch.tensor([[[0.0, 1.0], [1.0, 1.0]]])
    inputs = list(inputs._replace(memory=memory, k_idx=k_idx, k_val=k_val, v=-inputs.v.abs(), beta=inputs.beta.abs()))
    by_step = write_read(case, inputs, steps=1, by_step=True)
    assert by_step[1][0].signbit().all() and (by_step[1][0] == 0).all()
    assert_same_bits(write_read(case, inputs, steps=1), by_step)


@in_the_interpreter
@pytest.mark.parametrize("case", [RAGGED, TANGLED, SIGNED, replace(REUSE, tokens=21)], ids=lambda case: case.name)
def test_call(case: Case) -> None:
    inputs = list(case.make(torch.float32))
    repeated_write_slots()
    expected = sdm_write_read(*inputs, chunk_size=case.chunk_size)
    repeats = repeated_write_slots()
    got = write_read(case, inputs, steps=4)
    assert repeated_write_slots() == repeats
    assert_close(got, expected)
    assert_same_bits(write_read(case, inputs, steps=1), got)
    assert_same_bits(write_read(case, inputs, steps=4, by_step=True), got)


@in_the_interpreter
@pytest.mark.parametrize(
    ("ids", "kept", "repeats"),
    [
        ([7, 2**32 + 5, 5, 3], [7, -1, 5, 3], 0),
        ([5, 11, 5, 9], [5, -1, -1, 9], 1),
        ([2, 3, 5, 10], [2, 3, 5, -1], 0),
        ([-4, 3, -1, 3], [-1, 3, -1, -1], 1),
    ],
)
def test_ids_that_are_no_rows(ids: list[int], kept: list[int], repeats: int) -> None:
    repeated_write_slots()
    k_idx, weights = torch.tensor(ids).view(1, 1, 4), torch.ones(1, 1, 4)
    one = torch.ones(1, 1, 1)
    staged = staging._stage_inputs_cuda(k_idx, weights, one, one, one, k_idx, weights, 10, torch.float32, 1, True)
    assert staged[0].flatten().tolist() == kept
    assert repeated_write_slots() == repeats


@in_the_interpreter
@pytest.mark.parametrize("op", ["token_gather_bwd", "decay_write_bwd"])
def test_gradients_of_rows_beyond_the_bank(op: str) -> None:
    """They are as those of no slot."""
    case = next(case for case in CASES if case.op == op)
    args = case.samples[0].args(torch.float32)
    ids = (3, 5) if op == "token_gather_bwd" else (7,)
    beyond, without = list(args), list(args)
    for i in ids:
        far = args[i] == args[i].max()
        assert far.any()
        beyond[i], without[i] = args[i].masked_fill(far, 2**30), args[i].masked_fill(far, -1)
    assert_same_bits(ON_CUDA[op](*beyond), ON_CUDA[op](*without))


class Recorder:
    """Stands for a kernel, and keeps what it would be launched with."""

    pre_run_hooks = ("sees every launch",)

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def launch_saving_forwards(case: Case, inputs: list[Tensor]) -> None:
    """The steps of calls that save, with every writer and form of rows, and with the addresses from a table."""
    memory, *inputs = inputs
    readings = torch.empty(case.streams, case.tokens, case.head_dim, dtype=memory.dtype)
    for mode, writer in (("none", "gather"), ("none", "versions"), *((mode, "write") for mode in SNAPSHOT_MODES)):
        saving = loops.saving_of(case, memory, inputs, mode, writer)
        for loop in chain(*call_loops(memory, inputs, case.chunk_size, readings, saving)):
            slab = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="cpu"), loop.memory_form())
            for table in (None, torch.empty(loop.length, ADDRESSES, dtype=torch.int64)):
                loop.couple(slab, table)
                loop.steps(slab, table)


@without_the_interpreter
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_every_kernel_compiles(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    kernels = set()
    modules = (
        *(staging_kernels, phase1_kernels, phase1_bwd_kernels, solve_kernels),
        *(token_gather_kernels, dual_matmul_kernels, decay_write_kernels, row_quant_kernels, row_writes_kernels),
        *(slot_groups_kernels, slot_sort_kernels, step_flow_kernels, row_versions_kernels),
    )
    for module in modules:
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction):
                kernels.add(kernel)
                monkeypatch.setattr(module, name, Recorder(kernel, launches))
    case = replace(RAGGED, chunk_size=32, tokens=40, writes=20, write_gates=dtype == torch.float32)
    inputs = list(case.make(dtype))
    for by_step in (False, True):
        write_read(case, inputs, steps=1, by_step=by_step)
    launch_saving_forwards(case, inputs)
    staging_kernels.launch_unstage_readings(torch.empty(2, 3, 4, 5), torch.empty(3, 7, 5))
    k_val, q_val, square = (torch.empty(1, 2, 32, width) for width in (20, 4, 32))
    for g in (k_val, k_val[..., :1]):
        phase1._phase1_bwd_cuda(
            *(k_val, q_val, k_val, square, square, torch.empty(1, 2, 640)),
            *(k_val.int(), k_val.to(dtype), g, q_val.int(), q_val.to(dtype)),
        )
    ids = (k_val.int(), q_val.int())
    slot_groups_kernels.launch_slot_groups(*ids, *slot_groups_kernels.empty_slot_groups(2, 32, 20, 4, k_val))
    matrices, rows, strengths = square[0], torch.empty(2, 32, case.head_dim), torch.empty(2, 32, 1)
    values = rows.to(dtype)
    dual_matmul._dual_matmul_bwd_cuda(rows, values, matrices, matrices, values, strengths, rows, [True] * 6)
    dual_matmul_kernels.outer_product_call(rows, values, matrices, dtype, tril=-1, negative=True).launch()
    outs = {"dv": torch.empty(2, 40, case.head_dim, dtype=dtype), "dbeta": strengths, "plus": strengths}
    dual_matmul_kernels.values_backward_call(rows, values, strengths, rows, **outs, unstage=(8, 2)).launch()
    places = torch.empty(2, 641, dtype=torch.int32)
    groups = StepGroups(k_val[0], torch.empty(2, 640), places[:, 1:], places, places[:, 1:])
    decay_write_kernels.entry_slots_call(groups, ids[0]).launch()
    for some in ((inputs[0], rows), (None, rows), (inputs[0], None)):
        decay_write_kernels.row_gradients_call(inputs[0], inputs[0], groups, *some).launch()
    solve._solve_bwd_cuda(square, square, square, square, strengths[None], square)
    grads = [torch.empty(2, 2, 32, inputs[i].shape[2]) for i in (2, 3, 4, 5, 7)]
    staging._stage_inputs_bwd_cuda(*grads, *inputs[1:])
    staging._unstage_readings_bwd_cuda(inputs[3], case.chunk_size)
    latest = torch.empty(len(inputs[0]), dtype=torch.int32)
    row_versions_kernels.latest_rows_call(inputs[0], inputs[0], inputs[0], latest).launch()
    for mode in SNAPSHOT_MODES:
        payload, scales = row_quant._snapshot_quantize_cuda(inputs[0], mode)
        row_quant._snapshot_dequantize_cuda(payload, scales, mode, case.head_dim, dtype)
    X, u = torch.empty(2, 32, 32), torch.empty(2, 32, case.head_dim)
    dual_matmul_kernels.lower_matmul_call(X, u, u, dtype, plus=u, upper=True, many=False).launch()
    assert {kernel for kernel, _, _ in launches} == kernels
    for kernel, args, kwargs in launches:
        assert compile_call(KernelCall(kernel, (1,), args, kwargs), capability).asm["cubin"]
