"""The kernels of a backward step that touch bank rows: in Triton's interpreter, on a GPU, and compiled without one.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.layout import Staged, WriteGroups
from sdm_compile.ops.phase1 import phase1
from sdm_compile.ops.snapshot import SNAPSHOT_MODES, StepRows, dequantize_rows, quantize_rows
from sdm_compile.ops.write_read_bwd import Saved, _step_backward, no_versions
from tests.compiled import compile_call
from tests.harness import assert_close, assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter

triton = pytest.importorskip("triton")
from sdm_compile.ops.slot_entries_kernels import entry_dots_call, entry_weights_call, row_numbers_call  # noqa: E402
from sdm_compile.ops.slot_groups_kernels import SlotGroups  # noqa: E402
from sdm_compile.ops.step_bwd_kernels import (  # noqa: E402
    Banks,
    GradientGatherConfig,
    SlotEntries,
    SlotRowsConfig,
    gradient_gather_call,
    slot_rows_call,
    sum_parts_call,
)
from tests.ops.test_slot_groups_kernels import grouped  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
UNTOUCHED = -INF  # what outputs hold beforehand: no dot is that, and a sum over it stays it
STEPS, NUMBER = 3, 1  # of a payload; the step at hand has one before it and one after it
SMALL_GATHER = GradientGatherConfig(rows=2, columns=4, warps=1)
SMALL_ROWS = SlotRowsConfig(groups=4, tiles=3, columns=4, warps=1)
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
every_mode = pytest.mark.parametrize("mode", SNAPSHOT_MODES)
# The bank's dtype and its gradient's.
every_dtype = pytest.mark.parametrize(("dtype", "grad_dtype"), [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


@dataclass(frozen=True)
class Sizes:
    name: str
    streams: int = 2  # P
    chunk: int = 5  # C
    writes: int = 3  # W
    reads: int = 4  # R
    width: int = 7  # D
    slots: int = 9  # per stream, that may be written
    apart: int = 3  # how much higher the ids of reads are
    absent: float = 0.2  # share of ids that are negative
    distinct: bool = True  # the writes of a token; reads never are


RAGGED = Sizes("ragged")
SIZES = [
    RAGGED,
    Sizes("one of everything", 1, 1, 1, 1, 1, 1, 0, 0.0),
    Sizes("all to one slot", chunk=9, writes=1, reads=2, width=6, slots=1, apart=0),
    Sizes("every one to one slot", chunk=4, writes=5, reads=3, width=6, slots=1, apart=0, distinct=False),
    Sizes("dense", streams=3, chunk=6, writes=4, reads=5, slots=4, apart=0, absent=0.0),
    Sizes("no slot at all", absent=1.0),
    Sizes("no slot is written and read", slots=4, apart=4),
    Sizes("wide", streams=1, chunk=3, writes=33, reads=21, width=70, slots=40),
    Sizes("more than one block", streams=1, chunk=2, writes=2, reads=3, width=1030, slots=3, apart=1),
    Sizes("many groups", streams=2, chunk=16, writes=9, reads=7, width=3, slots=20),
]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=lambda s: s.name)


class Step(NamedTuple):
    """What one step's kernels take."""

    dM: Tensor
    bank: Tensor
    where: Tensor
    snapshot: StepRows  # of all steps
    number: int  # which of them it is
    k_idx: Tensor
    q_idx: Tensor
    groups: SlotGroups
    k_eff: Tensor
    q_w: Tensor
    beta: Tensor
    group_decay: Tensor
    du: Tensor
    dy: Tensor
    write_w: Tensor
    delta: Tensor

    def per_step(self) -> int:
        """Of the payload's rows."""
        return self.k_idx.numel()

    def values(self) -> tuple[Tensor, ...]:
        """What `slot_rows` takes, besides ids, of every stream."""
        return self.k_eff, self.q_w, self.beta, self.group_decay, self.du, self.dy

    def with_ids(self, k_idx: Tensor, q_idx: Tensor) -> Step:
        return self._replace(k_idx=k_idx, q_idx=q_idx, groups=grouped(k_idx, q_idx))


def random_step(sizes: Sizes, dtype: torch.dtype, grad_dtype: torch.dtype, mode: str = "none", seed: int = 0) -> Step:
    """Half of the slots were written by a later step. The rows that are not to be used are NaN."""
    g = torch.Generator().manual_seed(seed)
    P, C, own = sizes.streams, sizes.chunk, sizes.slots + sizes.apart
    writes, reads = (P, C, sizes.writes), (P, C, sizes.reads)
    if sizes.distinct:
        k_idx = torch.rand(P, C, max(sizes.writes, sizes.slots), generator=g).argsort(-1)[..., : sizes.writes]
        k_idx[k_idx >= sizes.slots] = -2
    else:
        k_idx = torch.randint(sizes.slots, writes, generator=g)
    q_idx = torch.randint(sizes.slots, reads, generator=g) + sizes.apart
    for ids in (k_idx, q_idx):
        ids += own * torch.arange(P)[:, None, None] * (ids >= 0)
        ids[torch.rand(ids.shape, generator=g) < sizes.absent] = -5
    k_idx, q_idx = k_idx.int(), q_idx.int()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    num_slots, E = P * own + 1, C * sizes.writes
    stream = (torch.arange(num_slots) // own).clamp_max(P - 1)
    where = ((NUMBER + 1) * P + stream) * E + torch.randint(E, (num_slots,), generator=g)
    where[torch.rand(num_slots, generator=g) < 0.5] = -1
    bank, rows = normal(num_slots, sizes.width), normal(STEPS, P, E, sizes.width)
    bank[where >= 0] = NAN
    rows[:NUMBER] = NAN
    for p in range(P):
        written = k_idx[p][k_idx[p] >= 0].unique()
        bank[written] = NAN
        rows[NUMBER, p, len(written) :] = NAN
    return Step(
        dM=normal(num_slots, sizes.width).to(grad_dtype),
        bank=bank.to(dtype),
        where=where.int(),
        snapshot=StepRows(*quantize_rows(rows.flatten(0, 2).to(dtype), mode), mode),
        number=NUMBER,
        k_idx=k_idx,
        q_idx=q_idx,
        groups=grouped(k_idx, q_idx),
        k_eff=normal(*writes),
        q_w=normal(*reads),
        beta=normal(P, C, 1),
        group_decay=torch.rand(P, E, generator=g),
        du=normal(P, C, sizes.width),
        dy=normal(P, C, sizes.width).to(dtype),
        write_w=normal(*writes),
        delta=normal(P, C, sizes.width),
    )


class Fence:
    """Tensors in the middle of larger ones, and a check that nothing around them has changed."""

    def __init__(self, device: str) -> None:
        self.device, self.edges = device, []

    def around(self, x: Tensor, odd: int = 0) -> Tensor:
        """A copy of x with NaN, or 77 where there is none, around it; `odd` elements off a multiple of 16 bytes."""
        wide = torch.empty(x.numel() + 64 + odd, dtype=x.dtype, device=self.device)
        if x.is_floating_point():
            wide.view(torch.uint8).fill_(255)
        else:
            wide.fill_(77)
        inner = wide[32 + odd : wide.numel() - 32].view(x.shape)
        for edge in (wide[: 32 + odd], wide[-32:]):
            self.edges.append((edge.view(torch.uint8), edge.view(torch.uint8).clone()))
        inner.copy_(x)
        return inner

    def untouched(self, *shape: int) -> Tensor:
        return self.around(torch.full(shape, UNTOUCHED))

    def check(self) -> None:
        for edge, before in self.edges:
            assert torch.equal(edge, before)


def summed(parts: Tensor) -> Tensor:
    """[n, parts, N] as [n, N], on the CPU."""
    out = torch.full((parts.shape[0], parts.shape[2]), NAN, device=parts.device)
    sum_parts_call(parts, out).launch()
    return out.cpu()


def fenced_banks(step: Step, fence: Fence, odd: int) -> Banks:
    payload, scales, mode = step.snapshot
    snapshot = StepRows(fence.around(payload, odd), fence.around(scales), mode)
    return Banks(fence.around(step.dM, odd), fence.around(step.bank, odd), snapshot)


class Addressed(NamedTuple):
    """What may come from a table, in its order."""

    dM: Tensor
    bank: Tensor
    payload: Tensor
    scales: Tensor
    where: Tensor
    rows: Tensor

    def table(self) -> tuple[Addressed, Tensor]:
        """Tensors that have only the dtypes and shapes, and the table that has the addresses."""
        table = torch.tensor([x.data_ptr() for x in self], device=self.dM.device)
        return Addressed(*(torch.empty_like(x) for x in self)), table


def gather(step: Step, device: str, config: GradientGatherConfig | None = None, *, table: bool = False) -> list[Tensor]:
    """The sums [P, C, D] and the dots [P, C, W]."""
    P, C, W = step.k_idx.shape
    D = step.dM.shape[1]
    fence = Fence(device)
    parts = (config or GradientGatherConfig.from_shapes(C, W, D)).parts(D)
    sums, dots = fence.untouched(P, C, D), fence.untouched(P, C, parts, W)
    banks = fenced_banks(step, fence, odd=0)
    given = banks
    if table:
        given = Banks(torch.empty_like(banks.dM), *banks[1:3], torch.tensor([banks.dM.data_ptr()], device=device))
    args = [fence.around(x) for x in (step.k_idx, step.write_w, step.delta)]
    gradient_gather_call(given, *args, sums, dots, config).launch()
    fence.check()
    assert_same_bits(banks.dM.cpu(), step.dM)
    return [sums.cpu(), summed(dots.flatten(0, 1)).view(P, C, W)]


def slot_rows(
    step: Step,
    device: str,
    config: SlotRowsConfig | None = None,
    *,
    odd: int = 0,
    table: bool = False,
    first_stream: int = 0,
) -> list[Tensor]:
    """dM, where, and the gradients of the decays [P, E], of k_eff [P, C, W] and of q_w [P, C, R]."""
    P, C, W = step.k_idx.shape
    D, E = step.dM.shape[1], C * W
    fence = Fence(device)
    banks = fenced_banks(step, fence, odd)
    streams = slice(first_stream, None)
    inputs = [x[streams].contiguous() for x in (*step.groups, *step.values())]
    keys, *groups, k_eff, q_w, beta, decay, du, dy = on_device = [fence.around(x) for x in inputs]
    count = P - first_stream
    weights = fence.untouched(*keys.shape)
    sources, numbers = (fence.around(torch.full(keys.shape, 77, dtype=torch.int32)) for _ in range(2))
    entry_weights_call(keys, k_eff, q_w, beta, sources, weights).launch()
    parts = (config or SlotRowsConfig.from_shapes(C, D)).parts(D)
    ddecay, dots = (fence.untouched(count, parts, n) for n in (E, keys.shape[1]))
    begin = step.number * step.per_step()
    rows = banks.snapshot.payload[begin + first_stream * E : begin + step.per_step()]
    where = fence.around(step.where, odd)
    given, addresses = Addressed(*banks[:2], *banks.snapshot[:2], where, rows), None
    if table:
        given, addresses = given.table()
    _, slot, _, ordinal = groups
    row_numbers_call(
        *(given.where, given.payload, given.rows, None, addresses, slot[None], ordinal[None], numbers[None]),
        rows_per_step=step.per_step(),
        rows_per_stream=E,
    ).launch()
    entries = SlotEntries(*groups, numbers, sources, weights, decay)
    given_banks = Banks(*given[:2], StepRows(given.payload, given.scales, step.snapshot.mode), addresses)
    slot_rows_call(given_banks, entries, du, dy, ddecay, dots, config=config).launch()
    dk_eff, dq_w = (fence.untouched(*x.shape) for x in (k_eff, q_w))
    entry_dots_call(keys, dots, beta, dk_eff, dq_w).launch()
    fence.check()
    read, unchanged = [banks.bank, *banks.snapshot[:2], *on_device], [step.bank, *step.snapshot[:2], *inputs]
    for a, b in zip(read, unchanged, strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
    return [banks.dM.cpu(), where.cpu(), summed(ddecay), dk_eff.cpu(), dq_w.cpu()]


def all_rows(step: Step) -> Tensor:
    """The payload's rows, in the bank's dtype."""
    return dequantize_rows(*step.snapshot, step.bank.shape[1], step.bank.dtype)


def expected_rows(step: Step) -> list[Tensor]:
    """What `slot_rows` should find, in float64, one entry after the other."""
    rows = all_rows(step)
    P, C, W = step.k_idx.shape
    num_slots = len(step.dM)
    k_eff, q_w, beta, decay, du, dy = (x.double() for x in step.values())
    dM, where = step.dM.double(), step.where.clone()
    ddecay, dk_eff, dq_w = (torch.full_like(x, UNTOUCHED) for x in (decay, k_eff, q_w))

    def row(slot: int) -> Tensor:
        return (step.bank[slot] if where[slot] < 0 else rows[where[slot]]).double()

    for p in range(P):
        for o, slot in enumerate(step.k_idx[p][step.k_idx[p] >= 0].unique().tolist()):
            if slot < num_slots:
                where[slot] = step.number * step.per_step() + p * C * W + o
                ddecay[p, o] = row(slot) @ dM[slot]
                dM[slot] *= decay[p, o]
        for i in range(C):
            for w, slot in enumerate(step.k_idx[p, i].tolist()):
                if 0 <= slot < num_slots:
                    dk_eff[p, i, w] = row(slot) @ (-beta[p, i] * du[p, i])
                    dM[slot] -= k_eff[p, i, w] * beta[p, i] * du[p, i]
            for r, slot in enumerate(step.q_idx[p, i].tolist()):
                if 0 <= slot < num_slots:
                    dq_w[p, i, r] = row(slot) @ dy[p, i]
                    dM[slot] += q_w[p, i, r] * dy[p, i]
    return [dM.to(step.dM.dtype), where, ddecay, dk_eff, dq_w]


def assert_absent_are_zero(step: Step, dots: Tensor) -> None:
    assert not dots[step.k_idx < 0].any()


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


def added(
    start: float, writes: list[float], reads: list[float], device: str, decay: float = 1.0, dtype: torch.dtype = F32
) -> float:
    """A gradient after each token has added one number by a write to its slot, and one by a read of it."""
    ids = torch.zeros(1, len(writes), 1, dtype=torch.int32)
    one = torch.ones(ids.shape)
    step = Step(
        dM=torch.full((2, 1), start, dtype=dtype),
        bank=torch.ones(2, 1, dtype=dtype),
        where=torch.full((2,), -1, dtype=torch.int32),
        snapshot=StepRows(torch.ones(len(writes), 1, dtype=dtype), torch.empty(0), "none"),
        number=0,
        k_idx=ids,
        q_idx=ids,
        groups=grouped(ids, ids),
        k_eff=one,
        q_w=one,
        beta=-one,
        group_decay=torch.full((1, len(writes)), decay),
        du=torch.tensor(writes, dtype=F32).view(ids.shape),
        dy=torch.tensor(reads, dtype=F32).view(ids.shape),
        write_w=one,
        delta=one,
    )
    dM = slot_rows(step, device)[0]
    assert dM[1] == start
    return dM[0].item()


@every_device
def test_sums_are_taken_in_token_order_and_rounded_once(device: str) -> None:
    """1e8 swallows a one that is added to it; four halves onto 256 would each round away in bfloat16."""
    none, swallowed, kept = [0.0] * 4, [1, 1e8, 1, -1e8], [1e8, 1, -1e8, 1]
    assert added(0, none, swallowed, device) == added(0, swallowed, none, device) == 0
    assert added(0, none, kept, device) == added(0, kept, none, device) == 1
    assert added(0, [1e8, -1e8], [1, 1], device) == 1  # not all writes before the reads
    assert added(0, [1, -1e8], [1e8, 1], device) == 1  # but those of a token are
    halves, quarters = [0.5, 0.5], [0.25, 0.25]
    assert added(256, halves, halves, device, dtype=BF16) == 258
    assert added(256, none, halves * 2, device, dtype=BF16) == 258
    assert added(256, halves * 2, none, device, dtype=BF16) == 258
    assert added(256, quarters, quarters, device, decay=257 / 256, dtype=BF16) == 258  # 257 is no bfloat16
    parts = torch.tensor([[1e8, 1.0, -1e8], [1e8, -1e8, 1.0], [1.0, 1e8, -1e8]]).T[None].contiguous()
    assert summed(parts.to(device)).tolist() == [[0, 1, 0]]
    k_idx, q_idx = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 2, dtype=torch.int32)
    keys, one = grouped(k_idx, q_idx).keys.to(device), torch.ones(1, 1, 1, device=device)
    dk_eff, dq_w = (torch.full(x.shape, NAN, device=device) for x in (k_idx, q_idx))
    entry_dots_call(keys, parts.roll(1, -1).to(device), -3 * one, dk_eff, dq_w).launch()
    assert dk_eff.tolist() == [[[0]]] and dq_w.tolist() == [[[0, 1]]]
    entry_dots_call(keys, parts.roll(-1, -1).to(device), -3 * one, dk_eff, dq_w).launch()
    assert dk_eff.tolist() == [[[3]]] and dq_w.tolist() == [[[0, 0]]]


@every_device
@every_dtype
def test_zeros_keep_their_signs_beside_longer_groups(dtype: torch.dtype, grad_dtype: torch.dtype, device: str) -> None:
    """Every sum here is one of -0.0; a shorter group of a tile would lose its sign to the entries that it has not."""
    step = random_step(RAGGED, dtype, grad_dtype)
    lengths = step.groups.start.diff()[:, :4]
    assert (lengths.min(1).values < lengths.max(1).values).all()
    minus = {"k_eff": 0.0, "beta": 1.0, "du": 2.0, "q_w": 0.0, "dy": -2.0}  # -0.0 times 2, and 0.0 times -2
    zeros = step._replace(
        dM=torch.full_like(step.dM, -0.0),
        **{name: torch.full_like(getattr(step, name), value) for name, value in minus.items()},
    )
    # And some of them among other numbers: half of the weights are zeros, and what is sent back has either sign.
    mixed = step._replace(
        dM=zeros.dM,
        **{name: getattr(step, name) * (torch.rand(getattr(step, name).shape) < 0.5) for name in ("k_eff", "q_w")},
    )
    one_by_one = SlotRowsConfig(groups=1, tiles=1, columns=8, warps=1)
    expected = slot_rows(mixed, device, one_by_one)[0]
    for config in (one_by_one, replace(one_by_one, groups=4), SMALL_ROWS):
        dM = slot_rows(zeros, device, config)[0]
        assert (dM == 0).all() and dM.signbit().all()
        assert_same_bits(slot_rows(mixed, device, config)[0], expected)


@every_device
@pytest.mark.parametrize("mode", ["none", "fp8", "int4"])
def test_columns_beyond_the_row_reach_nothing(mode: str, device: str) -> None:
    """Int4's code for no column stands for more than float32 holds, beside the largest numbers."""
    step = random_step(replace(RAGGED, width=9), F32, F32)
    largest = torch.finfo(F32).max
    rows = quantize_rows(torch.full((STEPS * step.per_step(), 9), largest), mode)
    zeros = {name: torch.zeros_like(getattr(step, name)) for name in ("dM", "du", "dy")}
    step = step._replace(**zeros, bank=torch.full_like(step.bank, largest), snapshot=StepRows(*rows, mode))
    dM, _, *dots = slot_rows(step, device)
    assert not dM.any()
    for x in dots:
        assert (x == 0).any() and not x[x != UNTOUCHED].any()


@every_device
@every_mode
def test_ids_beyond_the_bank_touch_nothing(mode: str, device: str) -> None:
    step = random_step(Sizes("some beyond", slots=6), F32, F32, mode)
    few = len(step.bank) - 6
    step = step._replace(**{name: getattr(step, name)[:few].contiguous() for name in ("dM", "bank", "where")})
    ids = (step.k_idx, step.q_idx)
    beyond = [x >= few for x in ids]
    assert all(x.sum() > 1 for x in beyond)
    far = step.with_ids(*(x.masked_fill(y, 2**31 - 1) for x, y in zip(ids, beyond, strict=True)))
    without = step.with_ids(*(x.masked_fill(y, -1) for x, y in zip(ids, beyond, strict=True)))
    expected = [gather(without, device), slot_rows(without, device)]
    assert_close(expected[1], expected_rows(without))
    for other in (step, far):
        got = slot_rows(other, device)
        for dots, without_slot in zip(got[3:], beyond, strict=True):
            assert not dots[without_slot].isfinite().any()  # nothing came out of the step's kernel
            dots[without_slot] = UNTOUCHED
        assert_same_bits([gather(other, device), got], expected)


@every_device
@every_mode
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_stays_in_its_stream_and_without_a_slot_reaches_nothing(bad: float, mode: str, device: str) -> None:
    sizes = Sizes("streams", streams=3, chunk=4, writes=3, reads=2, width=5, slots=4, apart=1)
    step = random_step(sizes, F32, F32, mode)
    own = slice(sizes.slots + sizes.apart, 2 * (sizes.slots + sizes.apart))
    clean = [*gather(step, device), *slot_rows(step, device, SMALL_ROWS)]

    def poisoned(x: Tensor, at: int | slice) -> Tensor:
        x = x.clone()
        x[at] = bad
        return x

    snapshot = [x.clone() for x in step.snapshot[:2]]
    of_bad = quantize_rows(torch.full((step.per_step() // 3, sizes.width), bad), mode)
    for x, y in zip(snapshot, of_bad, strict=True):
        x.view(torch.uint8).view(STEPS, 3, -1)[:, 1] = y.view(torch.uint8).flatten()
    with_bad = step._replace(
        **{name: poisoned(getattr(step, name), own) for name in ("dM", "bank")},
        **{name: poisoned(getattr(step, name), 1) for name in ("k_eff", "q_w", "beta", "group_decay", "du", "dy")},
        **{name: poisoned(getattr(step, name), 1) for name in ("write_w", "delta")},
        snapshot=StepRows(*snapshot, mode),
    )
    got = [*gather(with_bad, device), *slot_rows(with_bad, device, SMALL_ROWS)]
    others = torch.ones(len(step.bank), dtype=torch.bool)
    others[own] = False
    for a, b in zip(got, clean, strict=True):
        keep = others if len(a) == len(others) else [0, 2]
        assert_same_bits(a[keep], b[keep])
    assert not got[0][1].isfinite().all() and not got[2][own].isfinite().all()
    assert_absent_are_zero(step, got[1])
    assert_same_bits(got[3], clean[3])
    for a, b in zip(got[4:], clean[4:], strict=True):
        assert (a[b == UNTOUCHED] == UNTOUCHED).all()


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
def test_the_rows_of_many_steps(versions: bool, first: int, sizes: Sizes, device: str) -> None:
    """Those that one step after the other finds, the last one first; `first`: the steps that are not among them.

    versions: a written slot's row is the one that its version was made from."""
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
        of_groups = (step.groups.slot[None], step.groups.ordinal[None], numbers)
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
