"""Where the addresses of recorded launches come from: with a kernel that only notes what it is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from sdm_compile.ops import recorded
from sdm_compile.ops.bound import KernelCall
from sdm_compile.ops.recorded import RecordedLaunch, record


class Kernel:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **_: None


class Bound:
    """Stands for BoundKernel, which needs a GPU."""

    launched: list[list[int]]

    def __init__(self, call: KernelCall) -> None:
        self.call = call

    def launch(self, addresses: list[int]) -> None:
        Bound.launched.append(addresses)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Bound.launched = []
    monkeypatch.setattr(recorded, "BoundKernel", Bound)
    monkeypatch.setattr(recorded, "can_bind", lambda kernel: True)


def launch(*args: Any, grid: tuple[int, ...] = (1,)) -> KernelCall:
    return KernelCall(Kernel(), grid, args, {})


def addresses(*tensors: Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


def test_addresses_follow_the_tensors_of_the_call() -> None:
    """Wherever in a tensor they are; those of memory that stays are what they were."""
    a, b, memory = torch.zeros(4, 6), torch.zeros(5, 3).mT, torch.zeros(100)
    call = launch(a[1, 2:], 7, memory[30:40].view(2, 5), None, b[:, 2], memory[:0], a)
    known = RecordedLaunch(call, (a, b), (memory,))
    known.launch(addresses(a, b))
    assert Bound.launched == [call.addresses()]
    c, d = torch.zeros(4, 6), torch.zeros(5, 3).mT
    known.launch(addresses(c, d))
    assert Bound.launched[1] == addresses(c[1, 2:], memory[30:40], d[:, 2], memory[:0], c)


def test_a_tensor_that_is_nobodys_or_of_two() -> None:
    a, b, memory = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(10)
    both = torch.zeros(4, 6)
    with pytest.raises(LookupError, match="tensor 1 lies in 0 of"):
        RecordedLaunch(launch(a, torch.zeros(3)), (a, b), (memory,))
    with pytest.raises(LookupError, match="tensor 0 lies in 2 of"):
        RecordedLaunch(launch(both[:, 3:4]), (both[:, :5], both[:, 2:]), ())
    with pytest.raises(LookupError, match="lies in 0 of"):  # it goes on behind the end
        RecordedLaunch(launch(both.flatten()[:20]), (both[:3],), ())


def test_work_is_recorded_in_order() -> None:
    a = torch.zeros(4, 6)
    calls = [launch(a), launch(a[2:].unflatten(1, (2, 3)).transpose(0, 1)), launch(a[1:].view(torch.int32))]
    known = record(lambda: [call.launch() for call in calls] and None, (a,))
    assert known is not None
    for one in known:
        one.launch(addresses(a))
    assert Bound.launched == [call.addresses() for call in calls]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.zero_(),
        lambda x: x.clone(),
        lambda x: x + 1,
        lambda x: torch.empty_like(x),
        lambda x: x.mT.reshape(-1),
    ],
    ids=["in place", "copy", "sum", "memory", "a view that cannot be"],
)
@pytest.mark.parametrize("inside_an_op", [False, True])
def test_other_work_cannot_be_made_again(other: Callable[[Tensor], Tensor], inside_an_op: bool) -> None:
    a, done = torch.ones(4, 6), []

    def work() -> None:
        launch(a).launch()
        other(a)
        done.append(True)

    with torch._C._AutoDispatchBelowAutograd() if inside_an_op else nullcontext():
        assert record(work, (a,)) is None
        assert record(lambda: launch(a.contiguous().flatten().view(2, 12)).launch(), (a,)) is not None
    assert done == [True]


def test_watched_kernels_and_unknown_tensors_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    assert record(lambda: launch(a).launch(), (a,)) is not None
    assert record(lambda: launch(b).launch(), (a,)) is None
    monkeypatch.setattr(recorded, "can_bind", lambda kernel: False)
    assert record(lambda: launch(a).launch(), (a,)) is None


def test_what_goes_wrong_is_not_hidden() -> None:
    def work() -> None:
        raise RuntimeError("as it was")

    with pytest.raises(RuntimeError, match="as it was"):
        record(work, ())
    a = torch.zeros(4)
    assert record(lambda: launch(a).launch(), (a,)) is not None
