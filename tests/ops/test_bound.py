"""Which launches are bound, and where their addresses come from: with a kernel that only notes what it is given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from sdm_compile.ops import bound  # noqa: E402
from sdm_compile.ops.bound import BoundKernel, CallsOfOneSignature, KernelCall, each_step  # noqa: E402
from sdm_compile.ops.checks import UnsupportedConfigurationError  # noqa: E402

NOTHING_BOUND: list[list[int]] = []


class Kernel:
    """Notes the addresses of every launch through Triton. Its third parameter is one that it is not specialized for."""

    def __init__(self) -> None:
        self.launched: list[list[int]] = []
        self.pre_run_hooks: list[Any] = []
        self.params = [SimpleNamespace(do_not_specialize=i == 2) for i in range(4)]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **_: self.launched.append([x.data_ptr() for x in args if isinstance(x, Tensor)])


class Bound:
    """Stands for BoundKernel, which needs a GPU."""

    launched: list[list[int]]
    calls: list[KernelCall]  # those of `launch_call`

    def __init__(self, call: KernelCall) -> None:
        self.kernel = call.kernel

    def launch(self, addresses: list[int]) -> None:
        Bound.launched.append(addresses)

    def launch_call(self, call: KernelCall) -> None:
        assert call.kernel is self.kernel
        Bound.calls.append(call)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Bound.launched, Bound.calls = [], []
    monkeypatch.setattr(bound, "BoundKernel", Bound)
    monkeypatch.setattr(bound, "_known", OrderedDict())
    monkeypatch.setattr(bound.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bound.triton.knobs.runtime, "interpret", False)


def aligned(*shape: int, offset: int = 0) -> Tensor:
    """float32 memory that begins `offset` elements behind a multiple of 16 bytes."""
    raw = torch.zeros(torch.Size(shape).numel() + 4 + offset)
    first = -raw.data_ptr() % bound.ALIGNMENT // 4 + offset
    return raw[first : first + torch.Size(shape).numel()].view(shape)


def loop(rows: Tensor, out: Tensor, grid: tuple[int, ...] = (1,)) -> tuple[Kernel, Callable[[int], None]]:
    kernel = Kernel()
    return kernel, each_step(lambda step: KernelCall(kernel, grid, (rows[step], out, 7), {}), rows.shape[0])


def test_steps_are_bound_to_their_own_addresses() -> None:
    rows, out = aligned(3, 8), aligned(8)
    kernel, step = loop(rows, out)
    for s in (0, 2, 1):
        step(s)
    assert Bound.launched == [[rows[s].data_ptr(), out.data_ptr()] for s in (0, 2, 1)]
    assert kernel.launched == []


@pytest.mark.parametrize("rows", [aligned(3, 8, offset=1), aligned(3, 5), aligned(1, 8)], ids=["odd", "uneven", "one"])
def test_steps_of_other_alignments_go_through_triton(rows: Tensor) -> None:
    out = aligned(8)
    kernel, step = loop(rows, out)
    for s in range(rows.shape[0]):
        step(s)
    assert Bound.launched == NOTHING_BOUND
    assert kernel.launched == [[rows[s].data_ptr(), out.data_ptr()] for s in range(rows.shape[0])]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_sees_every_launch(name: str) -> None:
    hooks, seen = getattr(bound.triton.knobs.runtime, name), print
    hooks.add(seen)
    try:
        kernel, step = loop(aligned(2, 8), aligned(8))
        step(1)
    finally:
        hooks.remove(seen)
    assert len(kernel.launched) == 1 and Bound.launched == NOTHING_BOUND


def test_debug_settings_and_hooks_of_a_kernel_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    assert bound.can_bind(kernel)
    kernel.pre_run_hooks.append(print)
    assert not bound.can_bind(kernel)
    monkeypatch.setattr(bound.triton.knobs.runtime, "debug", True)
    assert not bound.can_bind(Kernel())


def test_calls_of_one_signature() -> None:
    kernel = Kernel()
    calls = CallsOfOneSignature(lambda x, y: KernelCall(kernel, (2,), (x, y), {}))
    odd, x, y = aligned(4, offset=1), aligned(4), aligned(4)
    calls.launch(odd, x)  # not aligned: through Triton, and nothing is kept of it
    calls.launch(x, y)  # the first that is: compiles, and binds
    calls.launch(y, x)
    calls.launch(x, odd)
    assert kernel.launched == [[a.data_ptr(), b.data_ptr()] for a, b in ((odd, x), (x, y), (x, odd))]
    assert Bound.launched == [[y.data_ptr(), x.data_ptr()]]


def test_no_programs_no_launch() -> None:
    kernel = Kernel()
    calls = CallsOfOneSignature(lambda x: KernelCall(kernel, (4, 0), (x,), {}))
    calls.launch(aligned(4))
    calls.launch(aligned(4))
    assert kernel.launched == Bound.launched == NOTHING_BOUND


def again(kernel: Kernel, *args: Any, grid: tuple[int, ...] = (3,), **options: Any) -> bool:
    """Launches this again; whether Triton was passed by."""
    before = len(kernel.launched), len(Bound.calls)
    call = KernelCall(kernel, grid, args, options)
    call.launch_again()
    through_triton, directly = len(kernel.launched) - before[0], len(Bound.calls) - before[1]
    assert through_triton + directly == 1
    if directly:
        assert Bound.calls[-1] is call
    else:
        assert kernel.launched[-1] == [x.data_ptr() for x in args if isinstance(x, Tensor)]
    return directly == 1


def test_a_kernel_is_bound_from_the_third_launch_on() -> None:
    """Other addresses, other integers that it is not specialized for, and other grids are no other launch."""
    kernel, x, y = Kernel(), aligned(4), aligned(400)
    assert [again(kernel, x, y, n, 5, grid=(n + 1, 2), B=8) for n in range(5)] == [False, False, True, True, True]
    assert again(kernel, y, x, 7, 5, grid=(1,), B=8)


@pytest.mark.parametrize(
    "other",
    [
        {"y": aligned(4).int()},
        {"y": None},
        {"specialized": 6},
        {"specialized": None},
        {"options": {"B": 16}},
    ],
    ids=lambda other: " ".join(f"{name} {value}" for name, value in other.items())[:20],
)
def test_launches_that_are_not_alike(other: dict[str, Any]) -> None:
    kernel, x = Kernel(), aligned(4)

    def launch(y: Tensor | None, specialized: int | None, options: dict[str, Any]) -> bool:
        return again(kernel, x, y, 3, specialized, **options)

    usual: dict[str, Any] = {"y": x, "specialized": 5, "options": {"B": 8}}
    assert [launch(**usual) for _ in range(3)] == [False, False, True]
    assert [launch(**{**usual, **other}) for _ in range(3)] == [False, False, True]
    assert launch(**usual)
    assert not again(Kernel(), x, x, 3, 5, B=8)


def test_every_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Kernel(), aligned(4)
    assert [again(kernel, x) for _ in range(3)] == [False, False, True]
    monkeypatch.setattr(bound.torch.cuda, "current_device", lambda: 1)
    assert [again(kernel, x) for _ in range(3)] == [False, False, True]


def test_what_is_not_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x, odd = Kernel(), aligned(4), aligned(4, offset=1)
    for _ in range(3):
        assert not again(kernel, x, odd)  # nothing is kept of it
    assert [again(kernel, x, x) for _ in range(3)] == [False, False, True]
    assert not again(kernel, odd, x) and not again(kernel, x, odd)
    kernel.pre_run_hooks.append(print)
    assert not again(kernel, x, x)
    kernel.pre_run_hooks.clear()
    with monkeypatch.context() as patch:
        patch.setattr(bound.triton.knobs.runtime, "debug", True)
        assert not again(kernel, x, x)
    assert again(kernel, x, x)
    launched = len(kernel.launched), len(Bound.calls)
    KernelCall(kernel, (3, 0), (x, x), {}).launch_again()
    assert (len(kernel.launched), len(Bound.calls)) == launched


def test_a_grid_that_is_too_large_is_refused_however_often_it_was_launched_before() -> None:
    kernel, x = Kernel(), aligned(4)
    assert [again(kernel, x) for _ in range(3)] == [False, False, True]
    with pytest.raises(UnsupportedConfigurationError, match="65535"):
        KernelCall(kernel, (1, 65536), (x,), {}).launch_again()


def test_so_many_kinds_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "MAX_KNOWN", 3)
    kernel, x = Kernel(), aligned(4)
    for n in range(5):
        assert [again(kernel, x, n) for _ in range(3)] == [False, False, True]
        assert len(bound._known) == min(n + 1, 3)
    assert again(kernel, x, 4) and again(kernel, x, 2)
    assert [again(kernel, x, 0) for _ in range(3)] == [False, False, True]


@triton.jit(do_not_specialize=["n", "plus"])
def _add_kernel(p_out, p_x, n, plus: tl.int64, times, B: tl.constexpr):
    """out = times * x + plus for n integers, in blocks of B that both dimensions of the grid number."""
    at = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * B + tl.arange(0, B)
    x = tl.load(p_x + at, mask=at < n, other=0)
    tl.store(p_out + at, times * x + plus, mask=at < n)


@pytest.mark.gpu
def test_a_kernel_launched_again_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other addresses, integers and grids; what is not aligned goes through Triton, and is right as well."""

    class Counted(BoundKernel):
        launches = 0

        def launch_call(self, call: KernelCall) -> None:
            Counted.launches += 1
            super().launch_call(call)

    monkeypatch.undo()
    monkeypatch.setattr(bound, "BoundKernel", Counted)
    monkeypatch.setattr(bound, "_known", OrderedDict())
    block = 64

    def launch(n: int, plus: int, times: int = 16, grid: tuple[int, ...] | None = None, offset: int = 0) -> int:
        """How many launches passed Triton by."""
        before = Counted.launches
        room = torch.full((n + offset + 8,), -1, dtype=torch.int64, device="cuda")
        out = room[offset : offset + n]
        x = torch.arange(n, device="cuda") % 1000
        options = {"B": block, "num_warps": 1}
        KernelCall(_add_kernel, grid or (triton.cdiv(n, block),), (out, x, n, plus, times), options).launch_again()
        assert torch.equal(out, times * x + plus)
        assert (room[offset + n :] == -1).all() and (room[:offset] == -1).all()
        return Counted.launches - before

    assert [launch(n, plus) for n, plus in ((5, 1), (1, 2**40), (1000, 16), (64, -(2**40)))] == [0, 0, 1, 1]
    assert launch(300, 5, grid=(2, 3)) == launch(300, 6, grid=(5, 1, 1)) == 1
    assert launch(70, 3, offset=1) == 0
    assert launch(70, 3, offset=2) == 1
    assert [launch(70, 3, times=5) for _ in range(3)] == [0, 0, 1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert launch(70, 4) == 1
    torch.cuda.current_stream().wait_stream(stream)
    assert launch(70, 5) == 1
