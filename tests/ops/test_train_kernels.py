"""Training's launches in Triton's interpreter: what a saving forward keeps, and the gradients, against the CPU's ops.

The interpreter has to be chosen before Triton is imported, so that these tests run in a process of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_compile import repeated_write_slots
from sdm_compile.ops.saved import Saved
from sdm_compile.ops.snapshot import COMPACT, KEEPS_NOTHING, VERSIONS, SnapshotPlan
from sdm_compile.ops.write_read_ops import CPU, input_gradients, plan_call
from tests.cases import RAGGED, REUSE, SIGNED, TANGLED, Case, group_slots
from tests.harness import assert_close, assert_same_bits, normal_like
from tests.interpreted import in_the_interpreter, run_interpreted

pytest.importorskip("triton")
from sdm_compile.ops import slabs, write_read_cuda
from sdm_compile.ops.write_read_bwd_cuda import call_of
from tests import loops

CASES = [RAGGED, replace(TANGLED, tokens=23), SIGNED, replace(REUSE, tokens=21)]


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def unflattened(saved: Saved, case: Case) -> Saved:
    steps = -(-case.tokens // case.chunk_size)
    return saved.unflattened(steps, case.streams, case.chunk_size, case.writes)


def save(case: Case, mode: str, writer: str, slab: int, by_step: bool | None = None) -> tuple[Tensor, Tensor, Saved]:
    memory, *inputs = case.make(torch.float32)
    bank, readings = memory.clone(), torch.full_like(inputs[2], float("nan"))
    saving = loops.saving_of(case, memory, inputs, mode, writer)
    for name, x in saving.saved._asdict().items():
        x.fill_(-1 if name == "latest" else 7)
    loops.forward(bank, inputs, case.chunk_size, readings, saving, slab=slab, by_step=by_step)
    return readings, bank, saving.saved


def rows_of_groups(saved: Saved, case: Case, steps: int | None = None) -> list[Tensor]:
    """The snapshot's rows and scales, of so many steps, that stand for a group: what others hold is nobody's."""
    used = group_slots(case.make(torch.float32).k_idx, case.chunk_size) >= 0
    if steps is not None:
        used[steps * case.streams * case.chunk_size * case.writes :] = False
    scales = saved.scales[used] if len(saved.scales) else saved.scales
    return [saved.snapshot.view(torch.uint8)[used], scales]


@in_the_interpreter
@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_saving_forward(case: Case, mode: str) -> None:
    memory, *inputs = case.make(torch.float32)
    repeated_write_slots()
    readings, bank, kept, _ = CPU.save(memory, inputs, case.chunk_size, mode, plan_call(memory, True, mode))
    repeats = repeated_write_slots()
    got_readings, got_bank, got = save(case, mode, "write", slab=2)
    assert repeated_write_slots() == repeats
    assert_close((got_readings, got_bank), (readings, bank))
    kept = unflattened(kept, case)
    for name in Saved._fields:
        a, b = getattr(got, name), getattr(kept, name)
        if name not in ("snapshot", "scales"):
            assert_close([a], [b])
    # The first step's bank has no rounding yet.
    assert_same_bits(*(rows_of_groups(x, case, steps=1) for x in (got, kept)))
    if mode == "none":
        rows = [rows_of_groups(x, case)[0].view(x.snapshot.dtype) for x in (got, kept)]
        assert_close(*rows)


@in_the_interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_writers_and_slabs_store_the_same_bits(case: Case) -> None:
    by_write, by_gather = save(case, "none", "write", slab=1), save(case, "none", "gather", slab=4)
    by_step = save(case, "none", "write", slab=2, by_step=True)
    for other in (by_gather, by_step):
        assert_same_bits(*(x[2]._replace(snapshot=rows_of_groups(x[2], case)[0]) for x in (by_write, other)))
        assert_same_bits(by_write[:2], other[:2])


@in_the_interpreter
def test_groups_of_streams_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one group keeps of a step is no contiguous part of all."""
    case = replace(REUSE, tokens=21)
    memory, *inputs = case.make(torch.float32)
    readings, final, kept, _ = CPU.save(memory, inputs, case.chunk_size, "none", plan_call(memory, True))

    def everything() -> list[Tensor]:
        got_readings, bank, saved = save(case, "none", "gather", slab=2)
        grads = [loops.filled_gradient(normal_like(final), final), *input_gradients(inputs)]
        call = call_of(normal_like(readings), grads[0], final, inputs, unflattened(kept, case), "none", grads[1:])
        loops.backward(call, case.chunk_size, slab=2)
        return [got_readings, bank, *saved._replace(snapshot=rows_of_groups(saved, case)[0]), *grads]

    whole = everything()
    monkeypatch.setattr(slabs, "working_bytes", lambda *args: 1)  # a stream at a time
    assert_same_bits(everything(), whole)


@pytest.mark.parametrize(
    ("bank", "streams", "training", "expected"),
    [
        *((2**20, 1, True, 32), (2**20, 1, False, 64), (2**20, 64, True, 384), (2**20, 4096, False, 1024)),
        *((2**28, 1, True, 160), (2**30, 8, True, 225), (2**34, 8, True, 480), (2**34, 8, False, 480)),
    ],
)
def test_working_memory_of_a_call(bank: int, streams: int, training: bool, expected: int) -> None:
    """In MiB; the bank in bytes."""
    rows = torch.empty(bank // 2, 1, dtype=torch.bfloat16, device="meta")
    assert slabs.working_bytes(rows, streams, training) // 2**20 == expected


@pytest.mark.parametrize(
    ("steps", "most", "expected"), [(64, 0, 1), (64, 3, 2), (64, 99, 16), (3, 9, 1), (999, 99, 64)]
)
def test_steps_of_a_slab(steps: int, most: int, expected: int) -> None:
    """As many as fit, but a call has four slabs or more, of 64 steps at most."""
    assert slabs.slab_steps(steps, lambda size: size <= most) == expected


@pytest.mark.parametrize("streams", [1, 8, 97])
@pytest.mark.parametrize(
    ("mode", "plan"),
    [
        (None, KEEPS_NOTHING),
        ("none", SnapshotPlan(COMPACT, "gather")),
        ("none", SnapshotPlan(COMPACT, "write")),
        ("none", SnapshotPlan(VERSIONS, "write")),
        ("int4", SnapshotPlan(COMPACT, "write")),
    ],
    ids=str,
)
@pytest.mark.parametrize(("slots", "chunk", "writes"), [(2**16, 64, 16), (2**12, 256, 128), (2**20, 128, 128)])
def test_slabs_take_no_more_than_they_may(
    streams: int, mode: str | None, plan: SnapshotPlan, slots: int, chunk: int, writes: int
) -> None:
    """And a larger one would: of the memory of a call, whose half each of two slabs has."""
    bank = torch.empty(slots, 96, dtype=torch.bfloat16, device="meta")
    inputs = [torch.empty(streams, 40 * chunk + 1, width, device="meta") for width in (writes, writes, 96, 1, 1, 5, 5)]
    one = slabs.Shape.of(bank, inputs, chunk)
    shape = write_read_cuda.ForwardShape(**vars(one), by_step=write_read_cuda.runs_by_step(mode), mode=mode, plan=plan)
    slab_bytes, training = write_read_cuda._slab_bytes, mode is not None
    limit, seen = slabs.working_bytes(bank, streams, training) // 2, 0
    for part, steps in slabs.cut(shape, bank, inputs, slab_bytes, training):
        count, largest = part.stop - part.start, max(size for _, size in steps)
        assert sum(size for _, size in steps) == 41
        assert slab_bytes(replace(shape, streams=count, steps=largest)) <= limit or largest == count == 1
        if largest < 8 and seen == 0:  # 8 steps: a quarter of 41; other groups may have fewer streams
            assert slab_bytes(replace(shape, streams=count, steps=2 * largest)) > limit
        seen += count
    assert seen == streams


@pytest.mark.parametrize(
    ("tokens", "gently", "expected"),
    [
        (170, True, [2, 2, 4, 8, 8, 8, 2]),
        (170, False, [8, 8, 8, 8, 2]),
        (30, True, [2, 2, 2]),
        (26, False, [4, 2]),
    ],
)
def test_slabs_of_a_call(tokens: int, gently: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 5 tokens, and slabs of 8 steps: in order, and no step is left out."""
    monkeypatch.setattr(slabs, "slab_steps", lambda steps, fits: 8)
    memory, *inputs = replace(RAGGED, tokens=tokens).make(torch.float32)
    shape = slabs.Shape.of(memory, inputs, 5)
    [(streams, steps)] = slabs.cut(shape, memory, inputs, lambda shape: 1, training=False, gently=gently)
    assert streams == slice(0, RAGGED.streams)
    assert [size for _, size in steps] == expected
    assert [first for first, _ in steps] == [sum(expected[:n]) for n in range(len(expected))]


# Which of the readings and the final bank have a gradient, in which mode, and the steps of the slabs. The interpreter
# takes seconds for each of them: what has no bearing on one another is not crossed.
BOTH = (True, True)
GRADIENTS = [
    *((case, "none", BOTH, (1, 4)) for case in CASES),
    *((case, "none", given, (2,)) for case in CASES[:2] for given in ((True, False), (False, True))),
    *((case, mode, BOTH, (2,)) for case in CASES[1::2] for mode in ("bf16", "fp8", "int4")),
]


@in_the_interpreter
@pytest.mark.parametrize(
    ("case", "mode", "given", "slabs"),
    [pytest.param(*args, id=f"{args[0].name}-{args[1]}-{args[2]}") for args in GRADIENTS],
)
def test_gradients(case: Case, mode: str, given: tuple[bool, bool], slabs: tuple[int, ...]) -> None:
    memory, *inputs = case.make(torch.float32)
    readings, bank, kept, _ = CPU.save(memory, inputs, case.chunk_size, mode, plan_call(memory, True, mode))
    dreadings, dfinal = (normal_like(x) if wanted else None for x, wanted in zip((readings, bank), given, strict=True))
    expected = [loops.filled_gradient(dfinal, bank), *input_gradients(inputs)]
    before = bank.clone()
    CPU.backward(dreadings, expected[0], bank, inputs, kept, case.chunk_size, mode, expected[1:])
    for slab in slabs:
        got = [loops.filled_gradient(dfinal, bank), *input_gradients(inputs)]
        call = call_of(dreadings, got[0], bank, inputs, unflattened(kept, case), mode, got[1:])
        loops.backward(call, case.chunk_size, slab=slab)
        assert_close(got, expected)
    assert_same_bits(bank, before)
