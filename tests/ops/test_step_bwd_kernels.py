"""The kernels of a backward step that touch bank rows: in Triton's interpreter, on a GPU, and compiled without one.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.layout import Staged
from sdm_compile.ops.phase1 import phase1
from sdm_compile.ops.snapshot import SNAPSHOT_MODES, StepRows, dequantize_rows, empty_snapshot, quantize_rows
from sdm_compile.ops.write_read_bwd import Saved, _step_backward
from tests.compiled import compile_call
from tests.harness import assert_close, assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter

triton = pytest.importorskip("triton")
from sdm_compile.ops.step_bwd_kernels import (  # noqa: E402
    Banks,
    GradientGatherConfig,
    SlotEntries,
    SlotRowsConfig,
    gradient_gather_call,
    read_side_call,
    sum_parts_call,
    write_side_call,
)

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
SMALL_GATHER = GradientGatherConfig(rows=2, columns=4, warps=1)
SMALL_ROWS = SlotRowsConfig(groups=8, columns=4, warps=1)
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
    each: int = 3  # W or R
    width: int = 7  # D
    slots: int = 9  # per stream
    absent: float = 0.2  # share of ids that are negative
    distinct: bool = True  # within a token, as writes are; reads need not be


SIZES = [
    Sizes("ragged"),
    Sizes("one of everything", 1, 1, 1, 1, 1, 0.0),
    Sizes("all to one slot", chunk=9, each=1, slots=1, width=6),
    Sizes("every one to one slot", chunk=4, each=5, slots=1, width=6, distinct=False),
    Sizes("dense", streams=3, chunk=6, each=4, slots=4, absent=0.0),
    Sizes("no slot at all", absent=1.0),
    Sizes("wide", streams=1, chunk=3, each=33, slots=40, width=70),
    Sizes("more than one block", streams=1, chunk=2, each=2, slots=3, width=1030),
    Sizes("many groups", streams=2, chunk=16, each=9, slots=20, width=3),
]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=lambda s: s.name)


class Step(NamedTuple):
    """One step's inputs; the bank is that after the step."""

    dM: Tensor
    bank: Tensor
    entries: SlotEntries
    x: Tensor
    decay: Tensor
    rows: StepRows


def grouped(idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """order, start and slot of entries [P, C, N], as `ChunkFields` has them."""
    P, entries = idx.shape[0], idx[0].numel()
    order = torch.full((P, entries), -1, dtype=torch.int32)
    slot = order.clone()
    start = torch.zeros(P, entries + 1, dtype=torch.int32)
    for p in range(P):
        flat = idx[p].flatten()
        sorted_ids, place = flat.sort(stable=True)
        place = place[sorted_ids >= 0]
        order[p, : len(place)] = place
        slots, counts = sorted_ids[sorted_ids >= 0].unique_consecutive(return_counts=True)
        slot[p, : len(slots)] = slots
        start[p, 1:] = len(place)
        start[p, 1 : 1 + len(slots)] = counts.cumsum(0)
    return order, start, slot


def random_step(
    sizes: Sizes, dtype: torch.dtype, grad_dtype: torch.dtype, mode: str = "none", seed: int = 0
) -> Step:
    g = torch.Generator().manual_seed(seed)
    lead = (sizes.streams, sizes.chunk, sizes.each)
    if sizes.distinct:
        ids = torch.rand(*lead[:2], max(sizes.each, sizes.slots), generator=g).argsort(-1)[..., : sizes.each]
        ids[ids >= sizes.slots] = -2
    else:
        ids = torch.randint(sizes.slots, lead, generator=g)
    ids += sizes.slots * torch.arange(sizes.streams)[:, None, None] * (ids >= 0)
    ids[torch.rand(lead, generator=g) < sizes.absent] = -5
    ids = ids.int()
    num_slots = sizes.streams * sizes.slots + 1
    order, start, slot = grouped(ids)
    before = torch.randn(slot.numel(), sizes.width, generator=g).to(dtype)
    return Step(
        dM=torch.randn(num_slots, sizes.width, generator=g).to(grad_dtype),
        bank=torch.randn(num_slots, sizes.width, generator=g).to(dtype),
        entries=SlotEntries(ids, torch.randn(lead, generator=g), order, start, slot),
        x=torch.randn(*lead[:2], sizes.width, generator=g),
        decay=torch.rand(slot.shape, generator=g),
        rows=StepRows(*quantize_rows(before, mode), mode),
    )


class Fence:
    """Tensors in the middle of larger ones, and a check that nothing around them has changed."""

    def __init__(self, device: str) -> None:
        self.device, self.wide = device, []

    def around(self, x: Tensor, odd: int = 0) -> Tensor:
        """A copy of x with NaN before and behind; `odd` elements off a multiple of 16."""
        wide = torch.full((x.numel() + 64 + odd,), NAN, dtype=x.dtype, device=self.device)
        inner = wide[32 + odd : wide.numel() - 32].view(x.shape)
        inner.copy_(x)
        self.wide.append((wide, 32 + odd))
        return inner

    def empty(self, *shape: int) -> Tensor:
        return self.around(torch.full(shape, NAN))

    def check(self) -> None:
        for wide, before in self.wide:
            assert wide[:before].isnan().all() and wide[-32:].isnan().all()


def to(device: str, x: Any) -> Any:
    """A named tuple with its tensors on the device."""
    return type(x)(*(v.to(device) if isinstance(v, Tensor) else v for v in x))


def summed(parts: Tensor) -> Tensor:
    """[n, parts, N] as [n, N], on the CPU."""
    out = torch.full((parts.shape[0], parts.shape[2]), NAN, device=parts.device)
    sum_parts_call(parts, out).launch()
    return out.cpu()


def gather(step: Step, device: str, config: GradientGatherConfig | None = None) -> list[Tensor]:
    """The sums [P, C, D] and the dots [P, C, W]."""
    P, C, W = step.entries.idx.shape
    D = step.dM.shape[1]
    fence = Fence(device)
    parts = (config or GradientGatherConfig.from_shapes(W, D)).parts(D)
    sums, dots = fence.empty(P, C, D), fence.empty(P, C, parts, W)
    banks = Banks(fence.around(step.dM), fence.around(step.bank))
    args = (step.entries.idx.to(device), step.entries.weights.to(device), fence.around(step.x))
    gradient_gather_call(banks, *args, sums, dots, config).launch()
    fence.check()
    assert_same_bits([x.cpu() for x in banks[:2]], [step.dM, step.bank])
    return [sums.cpu(), summed(dots.flatten(0, 1)).view(P, C, W)]


def write_side(step: Step, device: str, config: SlotRowsConfig | None = None, odd: int = 0) -> list[Tensor]:
    """dM, bank, the decays' gradient [P, E] and the dots [P, E]."""
    P, C, _ = step.entries.idx.shape
    D, E = step.dM.shape[1], step.entries.order.shape[1]
    fence = Fence(device)
    parts = (config or SlotRowsConfig.from_shapes(C, D)).parts(D)
    ddecay, dots = fence.empty(P, parts, E), fence.empty(P, parts, E)
    banks = Banks(fence.around(step.dM, odd), fence.around(step.bank, odd))
    args = (to(device, step.entries), fence.around(step.x), to(device, step.rows), step.decay.to(device))
    write_side_call(banks, *args, ddecay, dots, config).launch()
    fence.check()
    return [banks.dM.cpu(), banks.bank.cpu(), summed(ddecay), summed(dots)]


def read_side(step: Step, device: str, config: SlotRowsConfig | None = None) -> list[Tensor]:
    """dM, and the dots [P, E]."""
    P, C, _ = step.entries.idx.shape
    D, E = step.dM.shape[1], step.entries.order.shape[1]
    fence = Fence(device)
    dots = fence.empty(P, (config or SlotRowsConfig.from_shapes(C, D)).parts(D), E)
    banks = Banks(fence.around(step.dM), fence.around(step.bank))
    read_side_call(banks, to(device, step.entries), fence.around(step.x), dots, config).launch()
    fence.check()
    assert_same_bits(banks.bank.cpu(), step.bank)
    return [banks.dM.cpu(), summed(dots)]


def rows_before(step: Step) -> Tensor:
    """[P, E, D]: each group's row before the step, in the bank's dtype."""
    payload, scales, mode = step.rows
    width, dtype = step.bank.shape[1], step.bank.dtype
    return dequantize_rows(payload, scales, mode, width, dtype).view(*step.entries.slot.shape, width)


def dots_and_sums(step: Step, bank: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, entry by entry: <bank[id], x_i> [P, E], and dM with the weighted x_i added."""
    dots = torch.zeros(step.entries.order.shape, dtype=torch.float64)
    dM = step.dM.double()
    P, C, N = step.entries.idx.shape
    for p, i, n in torch.cartesian_prod(*(torch.arange(s) for s in (P, C, N))).view(-1, 3).tolist():
        slot = step.entries.idx[p, i, n]
        if slot >= 0:
            x = step.x[p, i].double()
            dots[p, i * N + n] = bank[slot].double() @ x
            dM[slot] += step.entries.weights[p, i, n].double() * x
    return dots, dM


def expected_write_side(step: Step) -> list[Tensor]:
    rows, bank = rows_before(step), step.bank.clone()
    ddecay = torch.zeros(step.decay.shape, dtype=torch.float64)
    decayed = step.dM.double()
    for p, o in (step.entries.slot >= 0).nonzero().tolist():
        slot = step.entries.slot[p, o]
        bank[slot] = rows[p, o]
        ddecay[p, o] = rows[p, o].double() @ step.dM[slot].double()
        decayed[slot] *= step.decay[p, o].double()
    dots, dM = dots_and_sums(step._replace(dM=decayed), bank)
    return [dM.to(step.dM.dtype), bank, ddecay, dots]


def assert_absent_are_zero(step: Step, dots: Tensor) -> None:
    assert not dots.view(step.entries.idx.shape)[step.entries.idx < 0].any()


@every_device
@every_dtype
@every_size
def test_gather(sizes: Sizes, dtype: torch.dtype, grad_dtype: torch.dtype, device: str) -> None:
    step = random_step(sizes, dtype, grad_dtype)
    dM, (idx, weights, *_), x = step.dM.double(), step.entries, step.x.double()
    rows = torch.where((idx >= 0)[..., None], dM[idx.clamp_min(0).long()], 0)
    expected = [torch.einsum("pcw,pcwd->pcd", weights.double(), rows), torch.einsum("pcwd,pcd->pcw", rows, x)]
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
def test_write_side(dtype: torch.dtype, grad_dtype: torch.dtype, sizes: Sizes, mode: str, device: str) -> None:
    step = random_step(sizes, dtype, grad_dtype, mode)
    expected = expected_write_side(step)
    got = write_side(step, device)
    assert_same_bits(got[1], expected[1])
    assert_close(got, expected)
    assert_absent_are_zero(step, got[3])
    assert not got[2][step.entries.slot < 0].any()
    if sizes.width < 50:
        blocks = write_side(step, device, SMALL_ROWS, odd=1)
        assert_same_bits(blocks[:2], got[:2])
        assert_close(blocks, expected)


@every_device
@every_dtype
@every_size
def test_read_side(sizes: Sizes, dtype: torch.dtype, grad_dtype: torch.dtype, device: str) -> None:
    step = random_step(replace(sizes, distinct=False), dtype, grad_dtype)
    dots, dM = dots_and_sums(step, step.bank)
    got = read_side(step, device)
    assert_close(got, [dM.to(grad_dtype), dots])
    assert_absent_are_zero(step, got[1])
    if sizes.width < 50:
        blocks = read_side(step, device, SMALL_ROWS)
        assert_same_bits(blocks[0], got[0])
        assert_close(blocks[1], dots)


def whole_step(
    sizes: Sizes, reads: Sizes, dtype: torch.dtype, grad_dtype: torch.dtype, mode: str
) -> tuple[Step, Step, Staged, Saved, Tensor, Tensor]:
    """A step's two sides, and what `_step_backward` takes, as the only one of three steps that is not zero."""
    write, read = (random_step(s, dtype, grad_dtype, mode, seed) for seed, s in enumerate((sizes, reads)))
    P, C, _ = write.entries.idx.shape
    g = torch.Generator().manual_seed(9)
    k_idx, q_idx = write.entries.idx, read.entries.idx
    gates = -torch.rand(1, P, C, 1, generator=g)
    k_val, q_val = torch.randn(1, *k_idx.shape, generator=g), torch.randn(1, *q_idx.shape, generator=g)
    fields = phase1(k_idx[None], k_val, gates, q_idx[None], q_val)
    for mine, theirs in zip(write.entries[2:], fields[6:], strict=True):
        assert torch.equal(mine, theirs[0])  # the test's groups are Phase 1's
    write = write._replace(
        entries=write.entries._replace(weights=fields.k_eff[0]), decay=fields.group_decay[0].contiguous()
    )
    read = read._replace(entries=read.entries._replace(weights=fields.q_w[0]), dM=write.dM, bank=write.bank)
    dy, delta = (torch.randn(P, C, sizes.width, generator=g) for _ in range(2))
    X, QX = (torch.randn(P, C, C, generator=g).tril() for _ in range(2))

    def last(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x)[None]] * 2 + [x[None]])

    payload, scales, _ = write.rows
    others = empty_snapshot(2 * len(payload), write.bank, mode)
    for x in others:
        x.view(torch.uint8).zero_()
    saved = Saved(
        retrieved=last(dy),
        snapshot=torch.cat([others[0].view(torch.uint8), payload.view(torch.uint8)]).view(payload.dtype),
        scales=torch.cat([others[1], scales]),
        **{"X": last(X), "QX": last(QX), "A": last(X)},
        **{name: last(getattr(fields, name)[0]) for name in ("k_eff", "q_w", "write_w", "group_decay")},
        **{name: last(getattr(fields, name)[0]) for name in ("order", "group_start", "group_slot")},
    )
    inputs = (k_idx, k_val[0], dy, torch.rand(P, C, 1, generator=g), gates[0], q_idx, q_val[0])
    return write, read, Staged(*(last(x) for x in inputs)), saved, dy, delta


@every_device
@every_mode
@every_dtype
def test_the_three_are_the_cpu_step(dtype: torch.dtype, grad_dtype: torch.dtype, mode: str, device: str) -> None:
    sizes = Sizes("writes", streams=2, chunk=6, each=4, width=11, slots=7)
    reads = replace(sizes, each=5, distinct=False)
    write, read, staged, saved, dy, delta = whole_step(sizes, reads, dtype, grad_dtype, mode)
    dM, bank = write.dM.clone(), write.bank.clone()
    expected = _step_backward(2, dM, bank, dy, delta, staged, saved, mode)

    weighted = write.entries._replace(weights=saved.write_w[2])
    sums, dwrite_w = gather(write._replace(entries=weighted, x=delta), device, SMALL_GATHER)
    du = saved.QX[2].mT @ dy + saved.X[2].mT @ sums
    write = write._replace(x=-staged.beta[2] * du)
    dM_written, walked, ddecay, dk_eff = write_side(write, device, SMALL_ROWS)
    dM_before, dq_w = read_side(read._replace(dM=dM_written, bank=walked, x=dy), device, SMALL_ROWS)
    assert_same_bits(walked, bank)
    grads = (dk_eff.view_as(expected.dk_eff), dq_w.view_as(expected.dq_w), dwrite_w, ddecay)
    assert_close([du, dM_before], [expected.du, dM])
    assert_close(grads, expected[1:])


@every_device
def test_sums_are_taken_in_token_order_and_rounded_once(device: str) -> None:
    """1e8 swallows a one that is added to it; four halves onto 256 would each round away in bfloat16."""
    ids = torch.zeros(1, 4, 1, dtype=torch.int32)
    entries = SlotEntries(ids, torch.ones(1, 4, 1), *grouped(ids))
    x = torch.tensor([1.0, 1e8, 1.0, -1e8]).view(1, 4, 1)
    bank, none = torch.ones(2, 1), torch.empty(0)
    step = Step(torch.zeros(2, 1), bank, entries, x, torch.ones(1, 4), StepRows(torch.ones(4, 1), none, "none"))
    assert read_side(step, device)[0][0] == 0
    assert write_side(step, device)[0][0] == 0
    reordered = step._replace(x=torch.tensor([1e8, 1.0, -1e8, 1.0]).view(1, 4, 1))
    assert read_side(reordered, device)[0][0] == 1
    halves = step._replace(dM=torch.full((2, 1), 256.0, dtype=BF16), x=torch.full_like(x, 0.5))
    assert read_side(halves, device)[0].flatten().tolist() == [258, 256]
    assert write_side(halves, device)[0].flatten().tolist() == [258, 256]
    decayed = halves._replace(decay=torch.full((1, 4), 257 / 256), x=torch.full_like(x, 0.25))  # 257 is no bfloat16
    assert write_side(decayed, device)[0].flatten().tolist() == [258, 256]
    parts = torch.tensor([[1e8, 1.0, -1e8], [1e8, -1e8, 1.0], [1.0, 1e8, -1e8]]).T[None].contiguous()
    assert summed(parts.to(device)).tolist() == [[0, 1, 0]]


@every_device
@pytest.mark.parametrize("mode", ["none", "fp8", "int4"])
def test_columns_beyond_the_row_reach_nothing(mode: str, device: str) -> None:
    """Int4's code for no column stands for more than float32 holds, beside the largest numbers."""
    step = random_step(replace(SIZES[0], width=9), F32, F32)
    largest = torch.full((step.entries.slot.numel(), 9), torch.finfo(F32).max)
    zeros = {"dM": torch.zeros_like(step.dM), "x": torch.zeros_like(step.x)}
    step = step._replace(**zeros, rows=StepRows(*quantize_rows(largest, mode), mode))
    dM, _, ddecay, dots = write_side(step, device)
    assert not dM.any() and not ddecay.any() and not dots.any()


@every_device
@every_mode
def test_ids_beyond_the_bank_touch_nothing(mode: str, device: str) -> None:
    step = random_step(Sizes("two beyond", slots=6), F32, F32, mode)
    step = step._replace(dM=step.dM[:-3].contiguous(), bank=step.bank[:-3].contiguous())
    few = len(step.bank)
    assert (step.entries.idx >= few).sum() > 1
    hidden = torch.where(step.entries.idx >= few, -1, step.entries.idx)
    without = step._replace(entries=SlotEntries(hidden, step.entries.weights, *grouped(hidden)))
    assert_same_bits(gather(step, device), gather(without, device))
    assert_same_bits(read_side(step, device), read_side(without, device))
    assert_same_bits(write_side(step, device), write_side(without, device))
    far = step.entries.idx.masked_fill(step.entries.idx >= few, 2**31 - 1)
    step = step._replace(entries=SlotEntries(far, step.entries.weights, *grouped(far)))
    assert_same_bits(read_side(step, device), read_side(without, device))


@every_device
@every_mode
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_stays_in_its_stream_and_without_a_slot_reaches_nothing(bad: float, mode: str, device: str) -> None:
    sizes = Sizes("streams", streams=3, chunk=4, each=3, width=5, slots=4)
    step = random_step(sizes, F32, F32, mode)
    own = slice(sizes.slots, 2 * sizes.slots)
    clean = [gather(step, device), write_side(step, device, SMALL_ROWS), read_side(step, device, SMALL_ROWS)]
    dM, bank, before = step.dM.clone(), step.bank.clone(), rows_before(step)
    weights, x, decay = step.entries.weights.clone(), step.x.clone(), step.decay.clone()
    for poisoned in (dM[own], bank[own], before[1], weights[1], x[1], decay[1]):
        poisoned.fill_(bad)
    rows = StepRows(*quantize_rows(before.flatten(0, 1), mode), mode)
    poisoned = Step(dM, bank, step.entries._replace(weights=weights), x, decay, rows)
    others = torch.ones(len(step.bank), dtype=torch.bool)
    others[own] = False
    got = [gather(poisoned, device), write_side(poisoned, device, SMALL_ROWS)]
    got.append(read_side(poisoned, device, SMALL_ROWS))
    for a, b in zip(chain(*got), chain(*clean), strict=True):
        keep = others if len(a) == len(others) else [0, 2]
        assert_same_bits(a[keep], b[keep])
    for side in (got[0][1], got[1][3], got[2][1]):
        assert_absent_are_zero(step, side)
    assert not got[1][2][step.entries.slot < 0].any()


@every_device
@every_dtype
def test_addresses_from_a_table(dtype: torch.dtype, grad_dtype: torch.dtype, device: str) -> None:
    step = random_step(SIZES[0], dtype, grad_dtype)
    dM, bank = step.dM.to(device), step.bank.to(device)
    table = torch.tensor([dM.data_ptr(), bank.data_ptr()], device=device)
    banks = Banks(torch.empty_like(dM), torch.empty_like(bank), table)
    P, C, W = step.entries.idx.shape
    entries, x = to(device, step.entries), step.x.to(device)
    sums, dots = torch.empty_like(x), torch.empty(P, C, 1, W, device=device)
    gradient_gather_call(banks, entries.idx, entries.weights, x, sums, dots).launch()
    assert_same_bits([sums.cpu(), dots[:, :, 0].cpu()], gather(step, device))
    expected = write_side(step, device)
    ddecay, dots = (torch.empty(P, 1, C * W, device=device) for _ in range(2))
    write_side_call(banks, entries, x, to(device, step.rows), step.decay.to(device), ddecay, dots).launch()
    assert_same_bits([x.cpu() for x in (dM, bank, ddecay[:, 0], dots[:, 0])], expected)
    expected = read_side(step._replace(dM=expected[0], bank=expected[1]), device)
    read_side_call(banks, entries, x, dots).launch()
    assert_same_bits([x.cpu() for x in (dM, dots[:, 0])], expected)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 768, 1000, 1024, 5000, 16384, 20000])
def test_parts_cover_the_columns(width: int) -> None:
    for config in (GradientGatherConfig.from_shapes(64, width), SlotRowsConfig.from_shapes(64, width)):
        assert (config.parts(width) - 1) * config.columns < width <= config.parts(width) * config.columns


def calls(dtype: torch.dtype, sizes: Sizes) -> Iterator[Any]:
    out, table = torch.empty(1), torch.empty(2, dtype=torch.int64)
    for mode in SNAPSHOT_MODES:
        step = random_step(sizes, dtype, dtype, mode)
        banks = Banks(step.dM, step.bank, table if mode in ("none", "fp8") else None)
        yield write_side_call(banks, step.entries, step.x, step.rows, step.decay, out, out)
    yield gradient_gather_call(banks, *step.entries[:2], step.x, out, out)
    yield gradient_gather_call(banks._replace(table=table), *step.entries[:2], step.x, out, out)
    yield read_side_call(banks, step.entries, step.x, out)
    yield sum_parts_call(torch.empty(2, 3, 5), torch.empty(2, 5))


@without_the_interpreter
@pytest.mark.parametrize(("dtype", "width"), [(F32, 33), (BF16, 1024)], ids=str)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles(capability: int, dtype: torch.dtype, width: int) -> None:
    sizes = Sizes("compiled", streams=1, chunk=2, each=20, slots=30, width=width)
    for call in calls(dtype, sizes):
        assert compile_call(call, capability).asm["cubin"]
