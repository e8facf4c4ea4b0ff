"""All steps of a slab in one launch: the order of its programs, and what the compiler makes of its products.

What it computes is compared with a launch per step in `test_forward_kernels.py` and `test_train_kernels.py`. The
interpreter, which runs one program after the other, would never return from one that waits for a later one. It has to
be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.cases import Case
from tests.compiled import compile_call
from tests.harness import assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter

pytest.importorskip("triton")
from triton.runtime import interpreter

from sdm_compile.ops import slabs, step_flow_kernels, step_flow_programs, write_read_cuda
from sdm_compile.ops.bound import KernelCall
from sdm_compile.ops.launch import own_memory
from sdm_compile.ops.step_flow_kernels import StepFlowConfig
from tests import loops

WIDE = Case("six units", streams=2, tokens=11, writes=3, reads=4, head_dim=70, slots=9, chunk_size=4)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def outputs(case: Case, dtype: torch.dtype, slab: int, writer: str | None = None) -> list[Tensor]:
    """With a writer, what a call that saves keeps of its rows, too, in memory that held something before."""
    memory, *inputs = case.make(dtype)
    bank, readings = memory.clone(), torch.full_like(inputs[2], float("nan"))
    saving = None
    if writer is not None:
        saving = loops.saving_of(case, memory, inputs, "none", writer)
        saving.saved.snapshot.fill_(7.0)
    loops.forward(bank, inputs, case.chunk_size, readings, saving, slab=slab)
    return [readings, bank, *([] if saving is None else [saving.saved.snapshot, saving.saved.retrieved])]


@in_the_interpreter
@pytest.mark.parametrize("writer", [None, "gather", "write", "versions"])
def test_a_row_may_end_between_the_pieces_of_a_unit(writer: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(WIDE, head_dim=96)
    expected = outputs(case, torch.float32, 4, writer)
    monkeypatch.setattr(step_flow_kernels, "unit_columns", lambda *args: 64)
    monkeypatch.setattr(StepFlowConfig, "lags", lambda *args: (2, 2))
    assert_same_bits(outputs(case, torch.float32, 4, writer), expected)


@without_the_interpreter
@pytest.mark.parametrize(
    ("streams", "head_dim", "itemsize", "columns"),
    [(8, 1024, 2, 128), (4, 1024, 2, 128), (3, 1024, 2, 64), (2, 1024, 4, 64), (99, 48, 2, 64), (99, 7, 4, 8)],
)
def test_columns_of_a_unit(streams: int, head_dim: int, itemsize: int, columns: int) -> None:
    """256 bytes of each row, but 128 where less than 32 units would be left, and no more than a row has."""
    assert step_flow_kernels.unit_columns(streams, head_dim, itemsize) == columns


@in_the_interpreter
@pytest.mark.parametrize("later", [(1, 1), (1, 6), (3, 4), (6, 6)])
def test_how_much_later_a_unit_goes_on_changes_no_bit(later: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outputs(WIDE, torch.float32, slab=4)
    monkeypatch.setattr(StepFlowConfig, "lags", lambda *args: later)
    assert_same_bits(outputs(WIDE, torch.float32, slab=4), expected)


class WouldWait(Exception):
    """A program has to wait; it has stored nothing yet."""


@in_the_interpreter
@pytest.mark.parametrize(
    ("seed", "columns", "head_dim", "writer"),
    [(0, 32, 70, None), (1, 64, 96, "write"), (2, 64, 70, "gather"), (3, 32, 96, "versions")],
)
def test_programs_may_run_in_any_order_that_their_waits_allow(
    seed: int, columns: int, head_dim: int, writer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that did not wait for what it takes, or for what it overwrites, would change bits. Widths do not."""
    case = replace(WIDE, head_dim=head_dim)
    expected = outputs(case, torch.float32, 2, writer)
    monkeypatch.setattr(step_flow_kernels, "unit_columns", lambda *args: columns)
    monkeypatch.setattr(write_read_cuda, "_slab_form", write_read_cuda._slab_form.__wrapped__)  # nor what was made
    monkeypatch.setattr(write_read_cuda, "_slab_bytes", write_read_cuda._slab_bytes.__wrapped__)
    random, counted, launch = Random(seed), step_flow_programs.counted, KernelCall.launch
    builder = type(interpreter.interpreter_builder)
    chosen: list[int] = []
    waited: list[int] = []

    def run(call: KernelCall) -> None:
        if call.kernel is not step_flow_kernels._step_flow_kernel:
            launch(call)
            return
        left = list(range(call.grid[0]))
        while left:
            chosen[:] = [left.pop(random.choice([-1, random.randrange(len(left))]) % len(left))]
            try:
                launch(call._replace(grid=(1,)))
            except interpreter.InterpreterError as error:
                if WouldWait.__name__ not in str(error):
                    raise
                waited.append(chosen[0])
                left.insert(0, chosen[0])
        chosen.clear()

    def place(self: Any, x: int, y: int, z: int) -> None:
        self.grid_idx = (chosen[0] if chosen else x, y, z)

    def wait(p_counter: Any, count: Any) -> None:
        if counted(p_counter) < count:
            raise WouldWait

    for module in (step_flow_kernels, step_flow_programs):
        monkeypatch.setattr(module, "wait_for", wait)
    monkeypatch.setattr(KernelCall, "launch", run)
    monkeypatch.setattr(builder, "set_grid_idx", place)
    assert_same_bits(outputs(case, torch.float32, 2, writer), expected)
    assert len(waited) > 100


@in_the_interpreter
@pytest.mark.parametrize("writer", ["gather", "write"])
def test_ids_beyond_the_bank_are_no_slots(writer: str) -> None:
    """Staged ids never are; the launch looks all the same before it touches a row."""
    memory, *inputs = WIDE.make(torch.float32)
    far, found = len(memory) + 3, []
    for instead in (far, -1):
        bank, readings = memory.clone(), torch.zeros_like(inputs[2])
        saving = loops.saving_of(WIDE, memory, inputs, "none", writer)
        saving.saved.snapshot.fill_(7.0)
        with patch.object(slabs, "slab_steps", lambda steps, fits: 1):
            [[loop, *_]] = write_read_cuda.call_loops(bank, inputs, WIDE.chunk_size, readings, saving)
        slab = own_memory(loop, bank.device)
        loop.stage(slab)
        loop.couple(slab, None)
        for ids in (slab.staged.k_idx, slab.staged.q_idx, slab.stepping.rows.slot):
            assert (ids == 2).any()
            ids[ids == 2] = instead
        loop.steps(slab, None)
        found.append([bank, readings, saving.saved.snapshot, saving.saved.retrieved[:1]])
    assert_same_bits(*found)


@without_the_interpreter
def test_a_write_never_comes_behind_the_gather_of_the_next_step() -> None:
    sizes = itertools.product((1, 3, 64), (1, 17, 256), (1, 64), (1, 64, 1000, 16384), (2, 4), (1, 132))
    for streams, chunk, writes, head_dim, itemsize, processors in sizes:
        config = StepFlowConfig.from_shapes(streams, chunk, writes, 5, head_dim, itemsize, saves=False)
        multiply_later, write_later = config.lags(streams, chunk, head_dim, processors)
        assert 1 <= multiply_later <= write_later <= streams * config.parts(head_dim)
        assert config.parts(head_dim) * config.columns >= head_dim
        assert config.columns % config.gather.columns == 0


@without_the_interpreter
@pytest.mark.parametrize(("chunk", "head_dim"), [(4, 5), (16, 40), (64, 1024)])
def test_sums_of_products_begin_at_zero(chunk: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that moved what is added to them to the front would change the bits of small chunks alone."""
    case = Case("compiled", streams=1, tokens=chunk, writes=3, reads=4, head_dim=head_dim, slots=9, chunk_size=chunk)
    memory, *inputs = case.make(torch.float32)
    found: list[KernelCall] = []
    call = step_flow_kernels.step_flow_call
    monkeypatch.setattr(
        write_read_cuda, "step_flow_call", lambda *args: SimpleNamespace(launch=lambda: found.append(call(*args)))
    )
    [[loop]] = write_read_cuda.call_loops(memory, inputs, chunk, torch.empty_like(inputs[2]))
    loop.steps(tree_map_only(Tensor, lambda x: torch.empty_like(x, device="cpu"), loop.memory_form()), None)
    code = compile_call(found[0], 90).asm["ttir"]
    of_loops = " ".join(re.findall(r"iter_args\((.*?)\)", code))
    before = dict(re.findall(r"(%\w+) = (%\w+)", of_loops))
    sums = re.findall(r"= tt\.dot %\w+, %\w+, (%\w+)", code)
    assert len(sums) == 2
    for name in sums:
        assert f"{before.get(name, name)} = arith.constant dense<0.000000e+00> : tensor<16x16xf32>" in code
