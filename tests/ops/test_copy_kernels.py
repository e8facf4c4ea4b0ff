"""Copying several tensors at once, and transposing many: in Triton's interpreter, on a GPU, and compiled without one.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiled import compile_call
from tests.harness import assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter

pytest.importorskip("triton")
from sdm_compile.ops import copy_kernels
from sdm_compile.ops.bound import KernelCall
from sdm_compile.ops.copy_kernels import MOST, copy_all, transpose_all

F32, I32 = torch.float32, torch.int32
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
SIZES = [(2, 3, 7), (1,), (1024,), (1025,), (3, 0, 5), (2047,), (31, 100), (4, 1), (5,), (1, 1, 2)]


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


class Launches:
    """Stands for `KernelCall`, and keeps what is launched through it."""

    def __init__(self) -> None:
        self.calls: list[KernelCall] = []

    def __call__(self, *args: Any) -> KernelCall:
        self.calls.append(KernelCall(*args))
        return self.calls[-1]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    kept = Launches()
    monkeypatch.setattr(copy_kernels, "KernelCall", kept)
    return kept


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit at random: NaN of all kinds, and zeros of either sign."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, tuple(shape), generator=generator).int()
    bits[..., ::3] = torch.tensor([-(2**31), 2**31 - 1])[seed % 2]
    return bits.view(dtype)


def within(x: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Memory for x with 77 in it, and with as much around it; that, and the memory."""
    wide = torch.full((x.numel() + 64,), 77, device=device).to(x.dtype)
    return wide, wide[32 : 32 + x.numel()].view(x.shape)


def assert_copied(sources: Sequence[Tensor], device: str) -> None:
    rooms = [within(x, device) for x in sources]
    given = [x.to(device) if x.is_contiguous() else x.mT.contiguous().to(device).mT for x in sources]
    copy_all([target for _, target in rooms], given)
    for (wide, target), source in zip(rooms, sources, strict=True):
        assert torch.equal(target.cpu().view(torch.uint8), source.contiguous().view(torch.uint8))
        assert (wide[:32] == 77).all() and (wide[32 + source.numel() :] == 77).all()
    assert_same_bits([x.cpu() for x in given], sources)


@every_device
@pytest.mark.parametrize("dtypes", [(F32,), (I32,), (F32, I32)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 7, MOST])
def test_one_launch_copies_all(count: int, dtypes: tuple[torch.dtype, ...], device: str, launches: Launches) -> None:
    """Of several sizes, the largest first, last or between."""
    for first in (0, 5):
        sizes = [SIZES[(first + i) % len(SIZES)] for i in range(count)]
        assert_copied([numbers(size, dtypes[i % len(dtypes)], i) for i, size in enumerate(sizes)], device)
    assert len(launches.calls) == 2


@every_device
def test_nothing_to_copy(device: str, launches: Launches) -> None:
    assert_copied([torch.empty(0), torch.empty(3, 0)], device)
    assert_copied([torch.empty(0), torch.ones(1)], device)
    assert [call.grid for call in launches.calls] == [(0,), (1,)]


@every_device
def test_what_one_launch_does_not_take(device: str, launches: Launches) -> None:
    """More tensors than it has room for, elements of other sizes, and other strides, of the source or of the target."""
    many = [numbers(SIZES[i % len(SIZES)], F32, i) for i in range(MOST + 1)]
    assert_copied(many, device)
    for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.int64):
        assert_copied([many[0], torch.arange(5).to(dtype)], device)
    assert_copied([many[0], many[6].mT], device)
    target = torch.zeros(100, 31, device=device)
    copy_all([target.mT], [many[6].to(device)])
    assert_same_bits(target.mT.cpu(), many[6])
    assert launches.calls == []


@every_device
def test_targets_and_sources_are_as_many(device: str) -> None:
    x = torch.zeros(3, device=device)
    with pytest.raises(ValueError, match="argument 2"):
        copy_all([x, x], [x])


@every_device
@pytest.mark.parametrize("size", [1, 2, 5, 31, 32, 33, 65])
def test_transposed(size: int, device: str, launches: Launches) -> None:
    source = numbers((3, size, size), F32, size)
    wide, target = within(source, device)
    transpose_all(target, source.to(device))
    assert torch.equal(target.cpu().view(torch.uint8), source.mT.contiguous().view(torch.uint8))
    assert (wide[:32] == 77).all() and (wide[32 + source.numel() :] == 77).all()
    assert len(launches.calls) == 1


@without_the_interpreter
@pytest.mark.parametrize("count", [1, MOST])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles(
    capability: int, count: int, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelCall, "launch", lambda call: None)
    copy_all(*([torch.empty(5, 3 + i) for i in range(count)] for _ in range(2)))
    transpose_all(*torch.empty(2, 3, 64 * count, 64 * count))
    assert len(launches.calls) == 2
    for call in launches.calls:
        assert compile_call(call, capability).asm["cubin"]
