"""One backward step's kernels on random steps: what they are given, how they run, and what they should find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sdm_compile.ops.slot_entries_kernels import entry_dots_call, entry_weights_call, row_numbers_call
from sdm_compile.ops.slot_groups_kernels import SlotGroups
from sdm_compile.ops.snapshot import StepRows, dequantize_rows, quantize_rows
from sdm_compile.ops.step_bwd_kernels import (
    Banks,
    GradientGatherConfig,
    SlotEntries,
    SlotRowsConfig,
    gradient_gather_call,
    slot_rows_call,
    sum_parts_call,
)
from tests.harness import assert_same_bits
from tests.slot_groups import grouped

NAN, INF = float("nan"), float("inf")
UNTOUCHED = -INF  # what outputs hold beforehand: no dot is that, and a sum over it stays it
STEPS, NUMBER = 3, 1  # of a payload; the step at hand has one before it and one after it
SMALL_GATHER = GradientGatherConfig(rows=2, columns=4, warps=1)
SMALL_ROWS = SlotRowsConfig(groups=4, tiles=3, columns=4, warps=1)


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
