"""Training on a GPU: gradients, bits, snapshot modes, capture, and who stores the snapshot's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile import last_dispatch, sdm_write_read
from sdm_compile.ops import slabs, snapshot, write_read_cuda, write_read_ops
from sdm_compile.ops.launch import free_captured_loops
from sdm_compile.ops.situation import Situation
from sdm_compile.ops.snapshot import (
    COMPACT,
    NO_ROWS,
    VERSIONS,
    Announcement,
    SnapshotMismatchError,
    SnapshotPlan,
)
from tests.cases import RAGGED, SEVERAL, Case
from tests.harness import assert_same_bits, normal_like

pytestmark = pytest.mark.gpu

F32, BF16 = torch.float32, torch.bfloat16
GRADIENTS = ("memory", "k_val", "v", "beta", "g", "q_val")
TOLERANCES = {F32: 1e-4, BF16: 3e-2}
every_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
every_case = pytest.mark.parametrize("case", SEVERAL, ids=lambda case: case.name)
# Aligned, so that launches are bound, in slabs of several steps and several slabs.
MANY_STEPS = Case("many steps", streams=4, tokens=1273, writes=40, reads=33, head_dim=16, slots=200, chunk_size=32)


def leaves(inputs: Sequence[Tensor], device: str = "cuda", exact: bool = False) -> list[Tensor]:
    """Fresh inputs that require gradients, in float64 where they are to be exact."""
    moved = [x.detach().to(device) for x in inputs]
    moved = [x.double() if exact and x.is_floating_point() else x for x in moved]
    return [x.clone().requires_grad_() if x.is_floating_point() else x for x in moved]


def train(
    inputs: Sequence[Tensor],
    chunk_size: int,
    given: tuple[bool, bool] = (True, True),
    upstream: Sequence[Tensor] | None = None,
    **settings: Any,
) -> list[Tensor]:
    """Readings, final bank, and the gradients of every float input. `upstream`: see below; a capture needs it."""
    upstream = upstream or upstream_of(inputs)
    outputs = sdm_write_read(*inputs, chunk_size=chunk_size, **settings)
    pairs = [pair for pair, wanted in zip(zip(outputs, upstream, strict=True), given, strict=True) if wanted]
    wanted = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad([x for x, _ in pairs], wanted, [grad for _, grad in pairs], materialize_grads=True)
    return [*(x.detach() for x in outputs), *found]


def upstream_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the readings and of the final bank."""
    return [normal_like(x.detach().cpu()).to(x.device) for x in (inputs[3], inputs[0])]


def replayed(inputs: Sequence[Tensor], chunk_size: int) -> list[Tensor]:
    """What `train` returns, from the replay of a captured step."""
    static = leaves(inputs)
    upstream, graph = upstream_of(static), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(static, chunk_size, upstream=upstream)
    graph.replay()
    return [x.clone() for x in got]  # out of the graph's memory, which goes with it


def assert_near(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("readings", "bank", *GRADIENTS), got, expected, strict=True):
        error, norm = (a.cpu().double() - b.cpu().double()).norm(), b.double().norm()
        assert error <= tolerance * norm, f"{name}: {error / norm:.2e}"


@pytest.fixture(params=["compact", "versions"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How calls keep rows: the cases' are short, so that by themselves none keeps versions."""
    keep_versions_of_short_rows(request.param == "versions", monkeypatch)
    return str(request.param)


def keep_versions_of_short_rows(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MIN_VERSION_BYTES", 16 if keep else 2**20)


@every_dtype
@pytest.mark.parametrize("case", [replace(case, head_dim=24) for case in SEVERAL], ids=lambda case: case.name)
def test_versions_have_compact_rows_bits(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built, recorded and replayed, in slabs of one step, and in a capture."""
    inputs = case.make(dtype)
    keep_versions_of_short_rows(False, monkeypatch)
    expected = train(leaves(inputs), case.chunk_size)
    keep_versions_of_short_rows(True, monkeypatch)
    for _ in range(4):
        assert_same_bits(train(leaves(inputs), case.chunk_size), expected)
    assert last_dispatch().forward.layout == VERSIONS
    assert_same_bits(replayed(inputs, case.chunk_size), expected)
    monkeypatch.setattr(slabs, "SLABS", 10**6)
    monkeypatch.setattr(slabs, "working_bytes", lambda *args: 1)
    free_captured_loops()
    assert_same_bits(train(leaves(inputs), case.chunk_size), expected)


@pytest.mark.parametrize("how", ["odd offset", "columns first"])
def test_versions_of_a_bank_that_is_no_rows_of_16_bytes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = MANY_STEPS.make(F32)
    expected = train(leaves(inputs), 32)
    keep_versions_of_short_rows(True, monkeypatch)
    memory, *others = leaves(inputs)
    if how == "odd offset":
        other = torch.empty(memory.numel() + 1, device="cuda")[1:].view_as(memory).copy_(memory.detach())
    else:
        other = memory.detach().t().contiguous().t()
    for _ in range(3):
        assert_same_bits(train([other.detach().requires_grad_(), *others], 32), expected)


def test_a_bank_that_versions_are_made_from_must_stay_until_the_backward(rows: str) -> None:
    inputs = leaves(MANY_STEPS.make(F32))
    readings, final = sdm_write_read(*inputs, chunk_size=32)
    changed = inputs[0] if rows == "versions" else final
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        readings.sum().backward()


@every_dtype
@every_case
def test_gradients(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype)
    got = train(leaves(inputs), case.chunk_size)
    assert [x.dtype for x in got[2:]] == [x.dtype for x in inputs if x.is_floating_point()]
    assert_near(got, train(leaves(inputs, "cpu", exact=True), case.chunk_size), TOLERANCES[dtype])


@pytest.mark.parametrize("given", [(True, False), (False, True)], ids=["of readings", "of the bank"])
@pytest.mark.parametrize("case", SEVERAL[:2], ids=lambda case: case.name)
def test_gradients_of_one_output(case: Case, given: tuple[bool, bool]) -> None:
    inputs = case.make(F32)
    got = train(leaves(inputs), case.chunk_size, given)
    assert_near(got, train(leaves(inputs, "cpu", exact=True), case.chunk_size, given), TOLERANCES[F32])


@pytest.mark.parametrize("wanted", range(6), ids=GRADIENTS)
def test_each_gradient_alone(wanted: int) -> None:
    together = leaves(RAGGED.make(F32))
    expected = train(together, RAGGED.chunk_size)[2:][wanted]
    alone = [x.detach() for x in together]
    alone[[0, 2, 3, 4, 5, 7][wanted]].requires_grad_()
    assert_same_bits(train(alone, RAGGED.chunk_size)[2:], [expected])


@every_dtype
def test_the_banks_gradient_in_float32(dtype: torch.dtype) -> None:
    """Rounded once at the end: closer to the exact one. Writes of no weight let every step do no more than decay."""
    inputs = replace(MANY_STEPS, tokens=417, slots=44).make(dtype)
    inputs = inputs._replace(k_val=torch.zeros_like(inputs.k_val), g=inputs.g * 1e-3)
    exact = train(leaves(inputs, "cpu", exact=True), 32, (False, True))[2]
    rounded, once = (
        (train(leaves(inputs), 32, (False, True), grad_bank_fp32=fp32)[2].cpu().double() - exact).norm()
        for fp32 in (False, True)
    )
    assert once < 0.5 * rounded if dtype == BF16 else once == rounded


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4", "recompute"])
@every_dtype
@every_case
def test_snapshot_modes(case: Case, dtype: torch.dtype, mode: str, rows: str) -> None:
    case = replace(case, head_dim=24)
    inputs = case.make(dtype)
    none = train(leaves(inputs), case.chunk_size)
    got = train(leaves(inputs), case.chunk_size, snapshot_quant=mode)
    rounded = [3, 6, 7]  # k_val, g, q_val
    if mode == "recompute" or (mode == "bf16" and dtype == BF16):
        rounded = []
    exact = [i for i in range(8) if i not in rounded]
    assert_same_bits([got[i] for i in exact], [none[i] for i in exact])
    for i in rounded:
        error = (got[i].double() - none[i].double()).norm() / none[i].double().norm().clamp_min(1e-30)
        assert error <= {"bf16": 1e-2, "fp8": 6e-2, "int4": 2e-1}[mode]


@every_dtype
@every_case
def test_every_way_to_run_a_step_gives_the_same_bits(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = case.make(dtype)
    expected = train(leaves(inputs), case.chunk_size)
    with torch.no_grad():
        assert_same_bits(sdm_write_read(*leaves(inputs), chunk_size=case.chunk_size), expected[:2])
    assert_same_bits(replayed(inputs, case.chunk_size), expected)
    for name, value in (("SLABS", 1), ("working_bytes", lambda *args: 1)):
        monkeypatch.setattr(slabs, name, value)
        free_captured_loops()  # and what is known of calls like this one
        assert_same_bits(train(leaves(inputs), case.chunk_size), expected)


@every_dtype
def test_many_steps_over_and_over(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = MANY_STEPS.make(dtype)
    expected = train(leaves(inputs), 32)
    assert_near(expected, train(leaves(inputs, "cpu", exact=True), 32), TOLERANCES[dtype])
    for least, steps in ((4, 64), (1, 64), (1, 4), (1, 1)):
        monkeypatch.setattr(slabs, "SLABS", least)
        monkeypatch.setattr(slabs, "SLAB_STEPS", steps)
        for writer in ("write", "gather"):
            monkeypatch.setattr(write_read_ops, "plan_snapshot", lambda *_, w=writer: SnapshotPlan(COMPACT, w))
            for _ in range(4):
                assert_same_bits(train(leaves(inputs), 32), expected)
        free_captured_loops()


def test_a_stream_does_not_depend_on_its_batch(rows: str) -> None:
    inputs = MANY_STEPS.make(BF16)
    together = train(leaves(inputs), 32, (True, False))
    readings_grad = normal_like(inputs.v)
    for p in range(MANY_STEPS.streams):
        own = slice(p * MANY_STEPS.slots, (p + 1) * MANY_STEPS.slots)
        alone = leaves([inputs.memory, *(x[p : p + 1] for x in inputs[1:])])
        readings, _ = sdm_write_read(*alone, chunk_size=32)
        grads = torch.autograd.grad(readings, [x for x in alone if x.requires_grad], readings_grad[p : p + 1].cuda())
        assert_same_bits([grads[0][own], *grads[1:]], [together[2][own], *(x[p : p + 1] for x in together[3:])])


def test_a_replay_takes_the_inputs_of_now(rows: str) -> None:
    static = leaves(MANY_STEPS.make(F32))
    expected = [train(leaves(MANY_STEPS.make(F32, seed=seed)), 32) for seed in (1, 2)]
    upstream, graph = upstream_of(static), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(static, 32, upstream=upstream)
    for seed in (1, 2):
        with torch.no_grad():
            for x, y in zip(static, MANY_STEPS.make(F32, seed=seed), strict=True):
                x.copy_(y)
        graph.replay()
        assert_same_bits(got, expected[seed - 1])


@pytest.mark.parametrize("mode", ["none", "fp8", "recompute"])
def test_nothing_synchronises(mode: str, rows: str) -> None:
    inputs = leaves(MANY_STEPS.make(BF16))
    upstream = upstream_of(inputs)
    train(inputs, 32, upstream=upstream, snapshot_quant=mode)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(inputs, 32, upstream=upstream, snapshot_quant=mode)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_kept_is_in_nobodys_pool() -> None:
    """Whoever runs a call on a pool finds nothing in it afterwards: compiled code checks that before it captures."""
    inputs = leaves(MANY_STEPS.make(F32))
    upstream, graph = upstream_of(inputs), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # as long as it lives, the random generator keeps what captures need of it
        inputs[0].detach().clone()
    free_captured_loops()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        train(inputs, 32, upstream=upstream)
    torch.cuda.synchronize()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks and [block["size"] for block in blocks if block["state"] == "active_allocated"] == []


def test_other_strides() -> None:
    """Inputs that are no rows of their own, and a gradient that is one number everywhere."""
    inputs = RAGGED.make(F32)
    expected = leaves(inputs)
    sdm_write_read(*expected, chunk_size=RAGGED.chunk_size)[0].sum().backward()
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in leaves(inputs)]
    strided = [x.detach().requires_grad_(x.is_floating_point()) for x in strided]
    sdm_write_read(*strided, chunk_size=RAGGED.chunk_size)[0].sum().backward()
    assert_same_bits([x.grad for x in strided if x.grad is not None], [x.grad for x in expected if x.grad is not None])


def test_strides_beyond_int32() -> None:
    """Inputs whose entries lie so far apart that a token's last one is over 2^31 elements behind its first."""
    gap = 2**28 + 8
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    case = Case("far apart", writes=9, reads=10, head_dim=9, slots=12, write_gates=True, id_dtype=torch.int32)
    inputs = case.make(BF16)
    buffers = {dtype: torch.empty(10 * gap, dtype=dtype, device="cuda") for dtype in (torch.int32, BF16)}
    used = dict.fromkeys(buffers, 0)

    def apart(x: Tensor) -> Tensor:
        here = buffers[x.dtype].as_strided(x.shape, (x.shape[1], 1, gap), used[x.dtype])
        used[x.dtype] += x.shape[0] * x.shape[1]
        return here.copy_(x).requires_grad_(x.is_floating_point())

    expected = train(leaves(inputs), case.chunk_size)
    memory, *others = inputs
    assert_same_bits(train([*leaves([memory]), *map(apart, others)], case.chunk_size), expected)


@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4", "recompute"])
def test_every_row_of_the_handshakes_table(mode: str, rows: str) -> None:
    inputs = leaves(replace(RAGGED, head_dim=24).make(F32))
    exact = {"compact": (COMPACT, "gather"), "versions": (VERSIONS, "write")}[rows]

    def layout_and_writer() -> tuple[int | None, str | None, Situation]:
        record = last_dispatch().forward
        assert record is not None
        return record.layout, record.writer, record.situation

    with torch.no_grad():
        sdm_write_read(*inputs, chunk_size=4)
    assert layout_and_writer() == (NO_ROWS, None, Situation.EAGER)
    eager = (NO_ROWS, None) if mode == "recompute" else (COMPACT, "write")
    if mode == "none" and rows == "versions":
        eager = exact
    train(inputs, 4, snapshot_quant=mode)
    assert layout_and_writer() == (*eager, Situation.EAGER)
    backward = last_dispatch().backward
    assert backward is not None and (backward.situation, backward.route) == (Situation.EAGER, "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sdm_write_read(*inputs, chunk_size=4, snapshot_quant=mode)
    captured = exact if mode == "none" else eager
    assert layout_and_writer() == (*captured, Situation.CAPTURING)


@pytest.mark.parametrize(
    "announced",
    [Announcement(NO_ROWS, False), Announcement(COMPACT, False), Announcement(VERSIONS, False), Announcement(0, True)],
    ids=str,
)
def test_a_mismatch_raises_before_any_launch(
    announced: Announcement, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    inputs = leaves(replace(RAGGED, head_dim=24).make(F32))
    before = [x.detach().clone() for x in inputs]
    seen: list[Any] = []
    monkeypatch.setattr(write_read_cuda, "announce", lambda *args, **kwargs: announced)
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        with pytest.raises(SnapshotMismatchError):
            sdm_write_read(*inputs, chunk_size=4)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert not seen
    assert_same_bits([x.detach() for x in inputs], before)
