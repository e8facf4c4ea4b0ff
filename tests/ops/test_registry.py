"""No op without everything that an op needs: kernels, a fake kernel, samples and a reference; and the entry of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.registry import NAMESPACE, OPS, RegisteredOp, _known_entry, register
from tests.harness import OpCase
from tests.observers import CANNOT, NOBODY, OBSERVERS, pair
from tests.samples import CASES

KERNELS = {"CPU": "CPU kernel", "CUDA": "CUDA kernel", "Meta": "fake kernel", "Autograd": "autograd kernel"}


def lacking(op: RegisteredOp, cases: Sequence[OpCase]) -> list[str]:
    """What an op is still without."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    missing = [kernel for key, kernel in KERNELS.items() if not has(op.overload._schema.name, key)]
    own = [case for case in cases if case.op == op.name]
    if len(own) != 1:
        return [*missing, "one OpCase in tests/samples"]
    (case,) = own
    names = [sample.name for sample in case.samples]
    if len(names) < 3 or len(set(names)) < len(names):
        missing.append("three samples or more, each with a name of its own")
    elif any(a.shape == b.shape for a, b in zip(*first_two(case), strict=True) if a.numel()):
        missing.append("two first samples that differ in every shape")
    if op.differentiable != bool(case.differentiable):
        missing.append("the outputs that its formula differentiates")
    return missing


def first_two(case: OpCase) -> list[list[Tensor]]:
    return [[x for x in s.args(torch.float32) if isinstance(x, Tensor)] for s in case.samples[:2]]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_op_lacks_nothing(op: RegisteredOp) -> None:
    assert lacking(op, CASES) == []


def test_every_case_is_of_an_op() -> None:
    assert len(OPS) > 20
    assert {case.op for case in CASES} == set(OPS)


def test_every_op_of_the_namespace_was_made_by_register() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::")}
    assert names == {op.overload._schema.name for op in OPS.values()}


def test_what_an_op_lacks_is_found() -> None:
    library = torch.library.Library("sdm_test", "FRAGMENT")
    library.define("newcomer(Tensor x) -> Tensor")
    newcomer = RegisteredOp("newcomer", torch.ops.sdm_test.newcomer.default, False, ())
    assert lacking(newcomer, CASES) == [*KERNELS.values(), "one OpCase in tests/samples"]
    solve = OPS["solve"]
    case = next(case for case in CASES if case.op == "solve")
    assert lacking(solve, []) == lacking(solve, [case, case]) == ["one OpCase in tests/samples"]
    bare = OpCase("solve", case.samples[:1] * 3, case.reference)
    assert lacking(solve, [bare]) == [
        "three samples or more, each with a name of its own",
        "the outputs that its formula differentiates",
    ]
    alike = [case.samples[0], replace(case.samples[0], name="the same sizes"), case.samples[1]]
    assert lacking(solve, [replace(case, samples=alike)]) == ["two first samples that differ in every shape"]


@pytest.mark.parametrize(
    "schema", ["x(Tensor a, Tensor b) -> ()", "y(Tensor(a!) a) -> ()", "z(Tensor(a!) a, int b) -> ()"]
)
def test_work_again_is_for_ops_of_tensors_that_write_to_the_first(schema: str) -> None:
    with pytest.raises(ValueError, match="that write to the first one"):
        register(schema, cpu=print, cuda=print, fake=print, again=print)


class Entry:
    """An op's entry, and how often each way behind it was taken."""

    def __init__(self) -> None:
        self.through = self.again = self.straight = 0
        self.call = _known_entry(self.entry, self.found)
        self.tensors = pair()

    def entry(self, *args: Any) -> str:
        self.through += 1
        return "result"

    def found(self, *args: Tensor) -> Callable[..., str] | None:
        self.again += 1
        return None if args[0].dtype == torch.float64 else self.work

    def work(self, *args: Tensor) -> str:
        self.straight += 1
        return "result"

    def calls(self, count: int = 1) -> tuple[int, int]:
        """How many of them went through, and how many went straight."""
        before = self.through, self.straight
        assert [self.call(*self.tensors) for _ in range(count)] == ["result"] * count
        return self.through - before[0], self.straight - before[1]


@pytest.mark.parametrize("nobody", NOBODY.values(), ids=NOBODY)
def test_the_first_call_of_a_kind_goes_through(nobody: Callable[[], AbstractContextManager[Any]]) -> None:
    entry, others = Entry(), pair()
    with nobody():
        assert entry.calls(3) == (1, 2)
        entry.tensors = others
        assert entry.calls() == (0, 1)
        entry.tensors[1] = entry.tensors[1][1:]
        assert entry.calls(3) == (1, 2)
    assert entry.again == 2


def test_a_known_call_counts_as_a_change() -> None:
    entry = Entry()
    bank, ids = entry.tensors
    entry.calls()
    before = bank._version, ids._version
    assert entry.calls(2) == (0, 2)
    with torch.inference_mode():
        assert entry.calls(2) == (1, 1)  # the entry counts its own
    assert (bank._version, ids._version) == (before[0] + 3, before[1])


@pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
def test_observed_calls_go_through(observer: Callable[[], AbstractContextManager[Any]]) -> None:
    entry = Entry()
    with observer():
        assert entry.calls(2) == (2, 0)
    assert entry.calls(2) == (1, 1)
    with observer():
        assert entry.calls(2) == (2, 0)
    assert entry.again == 1


@pytest.mark.parametrize("made", CANNOT.values(), ids=CANNOT)
def test_what_cannot_be_known_goes_through(made: Callable[[], Tensor]) -> None:
    entry = Entry()
    entry.tensors = [*pair(), made()]
    assert entry.calls(2) == (2, 0)
    entry.tensors.reverse()
    assert entry.calls(2) == (2, 0)
    assert entry.again == 0


def test_where_nothing_does_the_work_again() -> None:
    entry = Entry()
    entry.tensors[0] = entry.tensors[0].double()
    assert entry.calls(2) == (2, 0)


def test_calls_of_ever_other_strides_soon_become_known_no_more() -> None:
    entry, (bank, ids) = Entry(), pair()
    for step in range(1, 100):
        entry.tensors = [bank, ids, torch.ones(4, step)[:, 0]]
        entry.calls()
    assert entry.through == 99 and entry.again < 10


def test_inside_another_op_the_entry_decides() -> None:
    """That op counts what it writes."""
    entry = Entry()
    for _ in range(2):
        with torch._C._AutoDispatchBelowAutograd():
            assert entry.calls(2) == (2, 0)
        entry.calls(2)


def test_a_bank_made_in_inference_mode_is_refused_outside_of_it() -> None:
    """By the entry; nor is it taken for one made outside, on which calls in inference mode are known."""
    entry = Entry()
    made_outside = entry.tensors
    with torch.inference_mode():
        made_inside = pair()
        for entry.tensors in (made_outside, made_inside):
            assert entry.calls(3) == (1, 2)
    entry.tensors = made_inside
    assert entry.calls(3) == (3, 0)


@pytest.mark.parametrize(("current", "expected"), [(1, (0, 2)), (0, (2, 0))], ids=["current", "another"])
def test_a_bank_of_another_device(current: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry makes its device the current one."""
    entry = Entry()
    entry.calls()
    monkeypatch.setattr(Tensor, "get_device", lambda x: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    assert entry.calls(2) == expected


def test_threads_find_what_others_have_added() -> None:
    entry = Entry()
    entry.calls()
    shapes = [[torch.ones(4, n), torch.ones(n)] for n in range(1, 9)]

    def work(k: int) -> None:
        for _ in range(50):
            for tensors in (*shapes[k:], *shapes[:k]):
                assert entry.call(*tensors) == "result"

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(4)))
    assert entry.through + entry.straight == 1 + 4 * 50 * 8
    assert 9 <= entry.through <= 1 + 4 * 8
