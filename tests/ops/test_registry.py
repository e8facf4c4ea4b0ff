"""No op without everything that an op needs: kernels, a fake kernel, samples and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.registry import NAMESPACE, OPS, RegisteredOp
from tests.harness import OpCase
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
