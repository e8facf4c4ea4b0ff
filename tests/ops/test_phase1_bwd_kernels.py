"""The kernels of Phase 1's backward against the CPU kernel in float64: in Triton's interpreter, and on a GPU.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.phase1 import _phase1_bwd_cpu, _phase1_bwd_cuda
from tests.harness import assert_same_bits, in_float64
from tests.interpreted import in_the_interpreter, run_interpreted

triton = pytest.importorskip("triton")
from sdm_compile.ops import phase1_bwd_kernels  # noqa: E402
from sdm_compile.ops.phase1_bwd_kernels import (  # noqa: E402
    Phase1BwdConfig,
    empty_phase1_bwd_sorted_scratch,
    launch_phase1_bwd_sorted,
)
from sdm_compile.ops.slot_groups_kernels import empty_slot_groups, launch_slot_groups  # noqa: E402
from sdm_compile.ops.slot_sort_kernels import SortConfig  # noqa: E402

every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)


@dataclass(frozen=True)
class Chunks:
    name: str
    chunk: int
    writes: int
    reads: int
    slots: int  # fewer than writes: the others have no slot
    lead: tuple[int, int] = (1, 2)
    write_gates: bool = True
    no_slot: float = 0.1
    ascending: bool = False  # a token's ids ascend, as those of a top-k do

    def make(self, exact: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
        """The op's arguments. A third of the gates erase, some of them with a finite number.

        exact: small whole numbers, and no gate that leaves a fraction, so that every sum is exact in any order.
        """
        generator = torch.Generator().manual_seed(seed)
        lead = (*self.lead, self.chunk)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator)

        def numbers(*shape: int) -> Tensor:
            if exact:
                return torch.randint(-2, 3, shape, generator=generator).float()
            return torch.randn(*shape, generator=generator)

        def no_slots(ids: Tensor) -> Tensor:
            ids = ids.sort(-1).values if self.ascending else ids
            missing = torch.tensor([-1, -7, -(2**31)])[(uniform(*ids.shape) * 3).long()]
            hidden = (ids >= self.slots) | (uniform(*ids.shape) < self.no_slot)
            return torch.where(hidden, missing, 1_000_003 * ids).int()

        k_idx = no_slots(uniform(*lead, max(self.writes, self.slots)).argsort(-1)[..., : self.writes])
        q_idx = no_slots((uniform(*lead, self.reads) * self.slots).long())  # a token may read a slot twice
        gates = (*lead, self.writes if self.write_gates else 1)
        g = torch.zeros(gates) if exact else 0.3 - uniform(*gates)
        g = g.masked_fill(uniform(*gates) < 0.2, float("-inf")).masked_fill(uniform(*gates) < 0.2, -1e30)
        writes, reads, square = (*lead, self.writes), (*lead, self.reads), (*lead, self.chunk)
        grads = [numbers(*shape) for shape in (writes, reads, writes, square, square)]
        grads.append(numbers(*self.lead, self.chunk * self.writes))
        return [*grads, k_idx, numbers(*writes).to(dtype), g, q_idx, numbers(*reads).to(dtype)]


HOT = Chunks("one hot slot", 17, 1, 2, slots=1)
REUSE = Chunks("heavy reuse", 11, 3, 5, slots=4)
SPARSE = Chunks("sparse", 9, 6, 4, slots=200, lead=(3, 1))
CHUNKS = [
    HOT,
    Chunks("more of one slot than one program has places", 65, 1, 1, slots=1, lead=(1, 1), no_slot=0),
    REUSE,
    replace(REUSE, name="heavy reuse, gates per token", write_gates=False),
    SPARSE,
    Chunks("wide, gates per token", 3, 33, 17, slots=40, write_gates=False),
    Chunks("fewer slots than writes", 5, 8, 4, slots=5),
    Chunks("one token", 1, 2, 3, slots=3),
    Chunks("one of everything", 1, 1, 1, slots=1, lead=(2, 3)),
    Chunks("ascending", 10, 8, 4, slots=16, no_slot=0, ascending=True),
    Chunks("ascending, with gaps", 10, 4, 12, slots=16, ascending=True, write_gates=False),
    Chunks("merged runs", 40, 8, 6, slots=90, lead=(1, 1)),
    Chunks("no slot", 4, 3, 2, slots=5, no_slot=1),
]
every_chunks = pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: chunks.name)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def on_device(args: list[Tensor], device: str) -> list[Tensor]:
    return [x.cpu() for x in _phase1_bwd_cuda(*(x.to(device) for x in args))]


def assert_exact(chunks: Chunks, device: str) -> None:
    args = chunks.make(exact=True, dtype=torch.bfloat16)
    got = on_device(args, device)
    assert [x.dtype for x in got] == [torch.float32] * 3
    assert_same_bits([x.double() for x in got], _phase1_bwd_cpu(*in_float64(args)))


@every_device
@every_chunks
def test_exact_sums(chunks: Chunks, device: str) -> None:
    assert_exact(chunks, device)


@every_device
@pytest.mark.parametrize("chunks", [HOT, CHUNKS[3], SPARSE], ids=lambda chunks: chunks.name)
def test_exact_sums_of_small_tiles(chunks: Chunks, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, sort = Phase1BwdConfig(places=16, rows=2), SortConfig(tile=4, merge=16)
    monkeypatch.setattr(Phase1BwdConfig, "from_shapes", lambda *_: tiny)
    monkeypatch.setattr(SortConfig, "from_shapes", lambda *_: sort)
    assert_exact(replace(chunks, lead=(1, 1)), device)


@every_device
@every_chunks
def test_every_element(chunks: Chunks, device: str) -> None:
    """Also that an erasing gate's own gradient is zero, up to the rounding of the sums."""
    args = chunks.make(exact=False)
    got, expected = on_device(args, device), _phase1_bwd_cpu(*in_float64(args))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6 * (1 + float(b.abs().max())))


@every_device
def test_a_chunk_has_its_bits_in_every_company(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = replace(REUSE, lead=(3, 1)).make(exact=False)
    together = on_device(args, device)
    for step in range(3):
        alone = on_device([x[step : step + 1] for x in args], device)
        assert_same_bits(alone, [x[step : step + 1] for x in together])
    monkeypatch.setattr(phase1_bwd_kernels, "MAX_ENTRIES", 2 * REUSE.chunk * (REUSE.writes + REUSE.reads))
    assert_same_bits(on_device(args, device), together)


@every_device
def test_other_strides(device: str) -> None:
    args = REUSE.make(exact=True)
    strided = [x.movedim(0, -1).contiguous().movedim(-1, 0) for x in args]
    strided[3] = args[3].mT.contiguous().mT
    assert_same_bits(on_device(strided, device), on_device(args, device))


@every_device
@pytest.mark.parametrize("chunks", [REUSE, CHUNKS[3], CHUNKS[-2], CHUNKS[-1]], ids=lambda chunks: chunks.name)
def test_sorted_already(chunks: Chunks, device: str) -> None:
    """From the keys of the slot groups, into memory whose entries without a slot stay what they are."""
    args = chunks.make(exact=False)
    flat = [x.flatten(0, 1).to(device) for x in args]
    grads, (k_idx, k_val, g, q_idx, q_val) = flat[:6], flat[6:]
    sizes = (*k_idx.shape, q_idx.shape[2])
    groups, scratch = empty_slot_groups(*sizes, k_idx)
    launch_slot_groups(k_idx, q_idx, groups, scratch)
    outs = [torch.full(x.shape, float("nan"), device=device) for x in (k_val, g, q_val)]
    rest = empty_phase1_bwd_sorted_scratch(*sizes, k_idx)
    launch_phase1_bwd_sorted(groups.keys, grads, flat[6:], outs, rest)
    expected = [x.flatten(0, 1) for x in on_device(args, device)]
    for x, ids in zip(expected, (k_idx, k_idx, q_idx), strict=True):
        if x.shape == ids.shape:  # not the gate of a whole token
            x.masked_fill_(ids.cpu() < 0, float("nan"))
    assert_same_bits([x.cpu() for x in outs], expected)
