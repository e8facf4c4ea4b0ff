"""The kernels that group writes and reads by slot, against plain Python: interpreted, on a GPU, compiled without one.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.checks import UnsupportedConfigurationError
from sdm_compile.ops.phase1 import phase1
from tests.compiled import compile_call
from tests.harness import assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter

triton = pytest.importorskip("triton")
from sdm_compile.ops import slot_groups_kernels  # noqa: E402
from sdm_compile.ops.slot_groups_kernels import (  # noqa: E402
    SlotGroups,
    SlotGroupsScratch,
    empty_slot_groups,
    launch_slot_groups,
)
from sdm_compile.ops.slot_sort_kernels import SortConfig  # noqa: E402
from tests.slot_groups import grouped  # noqa: E402

every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


@dataclass(frozen=True)
class Sizes:
    name: str
    lead: tuple[int, ...] = (2,)
    chunk: int = 7
    writes: int = 3
    reads: int = 5
    slots: int = 9
    absent: float = 0.2  # share of ids that are negative
    largest: int | None = None  # ids go down from here
    apart: int = 0  # how much higher the ids of reads are
    ascending: bool = False  # a token's ids ascend, as those of a top-k do

    def make(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """k_idx [*lead, C, W], distinct within a token, and q_idx [*lead, C, R]; int32."""
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*self.lead, self.chunk, *shape, generator=generator)

        def finish(ids: Tensor) -> Tensor:
            ids = ids.sort(-1).values if self.ascending else ids
            missing = torch.tensor([-1, -7, -(2**31)])[(uniform(ids.shape[-1]) * 3).long()]
            hidden = (ids >= self.slots + self.apart) | (uniform(ids.shape[-1]) < self.absent)
            return torch.where(hidden, missing, ids if self.largest is None else self.largest - ids).int()

        k_idx = finish(uniform(max(self.writes, self.slots)).argsort(-1)[..., : self.writes])
        return k_idx, finish((uniform(self.reads) * self.slots).long() + self.apart)


RAGGED = Sizes("ragged", lead=(2, 1))
TILES = Sizes("two tiles", lead=(1,), chunk=37, writes=2, reads=6, slots=30)
SIZES = [
    RAGGED,
    Sizes("one of everything", (1,), 1, 1, 1, 1, 0.0),
    Sizes("more writes than reads", (3,), chunk=6, writes=6, reads=4, slots=200),
    Sizes("as many writes as reads", chunk=5, writes=4, reads=4, slots=6),
    Sizes("all to one slot", chunk=17, writes=1, reads=2, slots=1, absent=0.0),
    Sizes("no slot at all", absent=1.0),
    Sizes("some slots are only read", slots=12, apart=5),
    Sizes("no slot is written and read", slots=4, apart=4),
    Sizes("the largest ids", slots=8, largest=2**31 - 2),
    Sizes("ascending", chunk=10, writes=8, reads=4, slots=16, absent=0.0, ascending=True),
    TILES,
    replace(TILES, name="one slot of two tiles", slots=1, writes=1),
    Sizes("two merged runs", lead=(1,), chunk=40, writes=8, reads=6, slots=90),
    Sizes("three merged runs", lead=(1,), chunk=90, writes=4, reads=8, slots=300, apart=100),
]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: sizes.name)


class Fence:
    """Tensors in the middle of larger ones, and a check that nothing around them has changed."""

    BEYOND = 77

    def __init__(self) -> None:
        self.wide: list[Tensor] = []

    def around(self, x: Tensor) -> Tensor:
        wide = torch.full((x.numel() + 64,), self.BEYOND, dtype=x.dtype, device=x.device)
        self.wide.append(wide)
        inner = wide[32:-32].view(x.shape)
        inner.copy_(x)
        return inner

    def check(self) -> None:
        for wide in self.wide:
            assert (wide[:32] == self.BEYOND).all() and (wide[-32:] == self.BEYOND).all()


def fenced(k_idx: Tensor, q_idx: Tensor) -> tuple[Fence, SlotGroups, SlotGroupsScratch]:
    chunks = k_idx.shape[:-2].numel()
    fence = Fence()
    groups, scratch = empty_slot_groups(chunks, *k_idx.shape[-2:], q_idx.shape[-1], k_idx)
    groups, scratch = (type(x)(*(fence.around(v) for v in x)) for x in (groups, scratch))
    return fence, groups, scratch


def on_device(k_idx: Tensor, q_idx: Tensor, device: str, times: int = 1) -> SlotGroups:
    ids = [k_idx.to(device), q_idx.to(device)]
    fence, groups, scratch = fenced(*ids)
    for _ in range(times):
        launch_slot_groups(*ids, groups, scratch)
    fence.check()
    assert_same_bits([x.cpu() for x in ids], [k_idx, q_idx])
    return SlotGroups(*(x.cpu() for x in groups))


def flat(ids: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [x.flatten(0, -3) for x in ids]


@every_device
@every_size
def test_groups(sizes: Sizes, device: str) -> None:
    ids = sizes.make()
    assert_same_bits(on_device(*ids, device), grouped(*flat(ids)))


@every_device
@pytest.mark.parametrize("sizes", [*SIZES[:9], TILES], ids=lambda sizes: sizes.name)
def test_groups_of_small_tiles(sizes: Sizes, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sort = SortConfig(tile=4, merge=16)
    monkeypatch.setattr(SortConfig, "from_shapes", lambda *_: sort)
    monkeypatch.setattr(slot_groups_kernels, "PLACES", 16)
    ids = replace(sizes, lead=(1,)).make(seed=1)
    assert_same_bits(on_device(*ids, device), grouped(*flat(ids)))


@every_device
def test_a_slot_is_written_after_many_reads(device: str) -> None:
    """The write that decides about a group stands in another tile than the group's first entry."""
    k_idx, q_idx = torch.full((2, 60, 1), 3, dtype=torch.int32), torch.full((2, 60, 5), 7, dtype=torch.int32)
    k_idx[0, -1] = 7
    assert on_device(k_idx, q_idx, device).ordinal[:, :2].tolist() == [[0, 1], [0, -1]]
    assert_same_bits(on_device(k_idx, q_idx, device), grouped(k_idx, q_idx))


@every_device
def test_ordinals_are_those_of_phase_1(device: str) -> None:
    k_idx, q_idx = replace(RAGGED, slots=12, apart=4).make()
    keys, start, _, _, ordinal = on_device(k_idx, q_idx, device)
    k_val, q_val = (torch.ones(x.shape) for x in (k_idx, q_idx))
    group_slot = phase1(k_idx, k_val, torch.zeros(*k_idx.shape[:-1], 1), q_idx, q_val).group_slot.flatten(0, 1)
    assert (ordinal >= 0).sum() == (group_slot >= 0).sum() < (start[:, 1:] > start[:, :-1]).sum()
    for n, o in (ordinal >= 0).nonzero().tolist():
        assert group_slot[n, ordinal[n, o]] == keys[n, start[n, o]] >> 32


@every_device
@pytest.mark.parametrize("sizes", [RAGGED, SIZES[-2]], ids=lambda sizes: sizes.name)
def test_same_bits_on_repeats(sizes: Sizes, device: str) -> None:
    ids = sizes.make()
    assert_same_bits(on_device(*ids, device, times=2), on_device(*ids, device))


@every_device
def test_a_chunk_has_its_groups_in_every_company(device: str) -> None:
    k_idx, q_idx = replace(RAGGED, lead=(3,)).make()
    together = on_device(k_idx, q_idx, device)
    for n in range(3):
        alone = on_device(k_idx[n : n + 1], q_idx[n : n + 1], device)
        assert_same_bits(alone, [x[n : n + 1] for x in together])


@every_device
def test_no_chunks(device: str) -> None:
    k_idx, q_idx = torch.empty(0, 4, 3, dtype=torch.int32), torch.empty(0, 4, 2, dtype=torch.int32)
    shapes = [tuple(x.shape) for x in on_device(k_idx, q_idx, device)]
    assert shapes == [(0, 20), (0, 21), *[(0, 20)] * 3]


def test_more_chunks_than_a_grid_takes() -> None:
    k_idx = torch.zeros(65536, 1, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedConfigurationError, match="65535"):
        launch_slot_groups(k_idx, k_idx, *empty_slot_groups(65536, 1, 1, 1, k_idx))


@pytest.mark.gpu
def test_capture_and_replay_with_other_ids() -> None:
    first, second = (SIZES[-1].make(seed) for seed in range(2))
    ids = [x.cuda() for x in first]
    fence, groups, scratch = fenced(*ids)
    launch_slot_groups(*ids, groups, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_slot_groups(*ids, groups, scratch)
    for x, other in zip(ids, second, strict=True):
        x.copy_(other)
    graph.replay()
    fence.check()
    assert_same_bits([x.cpu() for x in groups], grouped(*flat(second)))


def calls(sizes: Sizes) -> list[Any]:
    k_idx, q_idx = sizes.make()
    groups, scratch = empty_slot_groups(k_idx.shape[0], *k_idx.shape[-2:], q_idx.shape[-1], k_idx)
    return [
        slot_groups_kernels._join_call(k_idx, q_idx, scratch.ids),
        *slot_groups_kernels._group_calls(k_idx, q_idx, groups, scratch),
    ]


@without_the_interpreter
@pytest.mark.parametrize(("chunk", "writes", "reads"), [(7, 3, 5), (64, 64, 64)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles(capability: int, chunk: int, writes: int, reads: int) -> None:
    sizes = replace(RAGGED, lead=(2,), chunk=chunk, writes=writes, reads=reads)
    for call in calls(sizes):
        assert compile_call(call, capability).asm["cubin"]
