"""Which launches are bound, and where their addresses come from: with a kernel that only notes what it is given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from sdm_compile.ops import bound  # noqa: E402
from sdm_compile.ops.bound import (  # noqa: E402
    BoundKernel,  # as it is, where the tests below put `Bound` in its place
    CallsOfOneSignature,
    KernelCall,
    each_step,
    noted_launches,
)
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

    def __init__(self, call: KernelCall) -> None:
        self.kernel = call.kernel

    def launch(self, addresses: list[int]) -> None:
        Bound.launched.append(addresses)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Bound.launched = []
    monkeypatch.setattr(bound, "BoundKernel", Bound)
    monkeypatch.setattr(bound, "INTERPRETED", SimpleNamespace(value=False))


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


class Compiled:
    """Notes what the driver is given."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.launched.append(args)


def test_a_bound_kernel_gets_its_parameters_in_order_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [5, 6]
    driver = SimpleNamespace(get_current_device=lambda: 1, get_current_stream=lambda device: (device, streams[0]))
    monkeypatch.setattr(
        bound, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=driver)))
    )
    compiled = Compiled()
    kernel = SimpleNamespace(arg_names=["n", "p_x", "p_none", "p_y", "B"], warmup=lambda *args, **options: compiled)
    x, y = aligned(4), aligned(4)
    launch = BoundKernel(KernelCall(kernel, (3, 2), (7, x, None, y), {"B": 16, "num_warps": 1})).launch
    launch([160, 320])
    del streams[0]
    launch((16, 32))
    for args in ([16], [16, 32, 48]):
        with pytest.raises(ValueError, match="addresses for a launch with 2 tensors"):
            launch(args)
    assert compiled.launched == [
        (3, 2, 1, (1, stream), "function", "metadata", None, None, None, 7, x_, None, y_, 16)
        for stream, x_, y_ in ((5, 160, 320), (6, 16, 32))
    ]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [((), True), ((0, 2**47 + 16), True), ((-32, 48), True), ((16, 2**47 + 8), False), ((-8, 16), False)],
)
def test_what_is_aligned(addresses: tuple[int, ...], expected: bool) -> None:
    assert bound.aligned(addresses) == expected


def test_no_programs_no_launch() -> None:
    kernel = Kernel()
    calls = CallsOfOneSignature(lambda x: KernelCall(kernel, (4, 0), (x,), {}))
    calls.launch(aligned(4))
    calls.launch(aligned(4))
    assert kernel.launched == Bound.launched == NOTHING_BOUND


def test_launches_are_noted_in_order_by_the_thread_that_makes_them() -> None:
    kernel, x = Kernel(), aligned(4)
    first, second = (KernelCall(kernel, (n,), (x, n), {}) for n in (1, 2))
    first.launch()
    with noted_launches() as calls:
        first.launch()
        KernelCall(kernel, (4, 0), (x,), {}).launch()
        thread = threading.Thread(target=second.launch)
        thread.start()
        thread.join()
        second.launch()
    first.launch()
    assert [call is expected for call, expected in zip(calls, (first, second), strict=True)] == [True, True]
    assert len(kernel.launched) == 5


def test_a_grid_that_is_too_large_is_refused() -> None:
    kernel, x = Kernel(), aligned(4)
    with pytest.raises(UnsupportedConfigurationError, match="65535"):
        KernelCall(kernel, (1, 65536), (x,), {}).launch()
    KernelCall(kernel, (65536, 1), (x,), {}).launch()
    assert len(kernel.launched) == 1
