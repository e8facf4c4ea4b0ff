"""The top-k kernels in Triton's interpreter, against the CPU kernel; and compiled for every architecture.

The interpreter has to be chosen before Triton is imported, so that these tests run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.topk import product_key_topk
from tests.harness import assert_same_bits
from tests.interpreted import in_the_interpreter, run_interpreted, without_the_interpreter

triton = pytest.importorskip("triton")
from sdm_compile.ops import topk_kernels  # noqa: E402
from sdm_compile.ops.topk_kernels import (  # noqa: E402
    FoldConfig,
    _fold_kernel,
    _one_factor_kernel,
    _topk_bwd_kernel,
    launch_topk,
    launch_topk_bwd,
)

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
every_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def drawn(choices: Sequence[float], rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.tensor(choices)[torch.randint(len(choices), (rows, width), generator=generator)].to(dtype)


def normal(rows: int, width: int) -> Tensor:
    """Multiples of 1/16 below 8, as the interpreter cuts sums off where a GPU rounds them to bfloat16."""
    return (torch.randn(rows, width) * 16).round().clamp(-127, 127) / 16


def launched(scores: Tensor, factors: Sequence[int], k: int, **changes: Any) -> tuple[Tensor, Tensor]:
    values = torch.full((len(scores), k), NAN, dtype=scores.dtype)
    ids = torch.full((len(scores), k), -1)
    launch_topk(scores, factors, k, values, ids, lambda *shapes: replace(FoldConfig.from_shapes(*shapes), **changes))
    return values, ids


def assert_topk(scores: Tensor, factors: Sequence[int], k: int, **changes: Any) -> None:
    got, expected = launched(scores, factors, k, **changes), product_key_topk(scores, factors, k)
    assert_same_bits(got, expected)
    number = ~expected[0].isnan()
    assert torch.equal(got[0].signbit() & number, expected[0].signbit() & number)  # also of zeros


SHAPES = [
    ((7, 11), 6),
    ((16, 16), 16),
    ((8, 4), 32),
    ((1, 9), 5),
    ((9, 1), 5),
    ((6, 5), 1),
    ((1, 1), 1),
    ((3, 4, 5), 13),
    ((2, 3, 1, 2), 9),
    ((17,), 4),
    ((5,), 5),
]


@in_the_interpreter
@every_dtype
@pytest.mark.parametrize(("factors", "k"), SHAPES)
def test_is_the_cpu_kernel_exactly(factors: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    assert_topk(normal(3, sum(factors)).to(dtype), factors, k)


@in_the_interpreter
@pytest.mark.parametrize(("factors", "k"), [((9, 11), 32), ((20, 20), 64), ((16, 30), 100), ((20, 24), 256)])
def test_many_candidates(factors: tuple[int, ...], k: int) -> None:
    assert_topk(normal(1, sum(factors)).bfloat16(), factors, k)
    assert_topk(torch.zeros(1, sum(factors)).bfloat16(), factors, k)  # more ties than are sorted at once
    for choices in ([0.0, 1.0, 2.0, 3.0], [INF, -INF, 1.0], [NAN, -INF, INF, 0.0]):
        assert_topk(drawn(choices, 1, sum(factors), torch.bfloat16), factors, k)


@in_the_interpreter
@every_dtype
@pytest.mark.parametrize(("factors", "k"), [((6, 5), 7), ((4, 3), 12), ((3, 9), 20), ((2, 3, 2), 5), ((9,), 5)])
def test_ties_nan_and_infinities(factors: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    for choices in ([0.0, -0.0, 1.0], [NAN, INF, -INF, 0.0, -0.0, 1.0, 2.0], [INF, -INF, 1.0], [NAN, -INF], [NAN]):
        assert_topk(drawn(choices, 3, sum(factors), dtype), factors, k)


@in_the_interpreter
@every_dtype
def test_opposite_infinities(dtype: torch.dtype) -> None:
    scores = torch.tensor([[INF, 0.0, -INF, -2.0]], dtype=dtype)
    for k in (2, 3, 4):
        assert_topk(scores, (2, 2), k)


@in_the_interpreter
def test_sums_that_rounding_makes_equal() -> None:
    big = 2.0**25
    for scores in ([0.0, 1.0, big, -big], [big, big + 4, 0.0, 3.0]):
        for k in (1, 2, 3):
            assert_topk(torch.tensor([scores]), (2, 2), k)


@in_the_interpreter
@every_dtype
def test_columns_ranked_piece_by_piece(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_kernels, "MAX_COLUMNS", 8)
    for factors, k in (((19, 5), 7), ((3, 30), 8), ((21,), 4), ((4, 19, 9), 6)):
        assert_topk(normal(2, sum(factors)).to(dtype), factors, k)


@in_the_interpreter
def test_as_many_columns_as_a_packed_key_holds() -> None:
    scores = normal(1, 2**14 + 1).bfloat16()
    scores[:, 2**14 - 2 : 2**14] = 8.0
    assert launched(scores, (2**14, 1), 2)[1].tolist() == [[2**14 - 2, 2**14 - 1]]


@in_the_interpreter
def test_more_columns_than_a_packed_key_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_kernels, "PACKED_COLUMNS", 8)
    for factors, k in (((9, 3), 5), ((3, 9), 5), ((9,), 5)):
        assert_topk(drawn([NAN, INF, 0.0, 1.0, 2.0], 2, sum(factors), BF16), factors, k)


@in_the_interpreter
def test_slots_beyond_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_kernels, "MAX_COLUMNS", 512)
    scores = normal(1, 2048 + 2048 + 1024)
    scores[:, 2000:2048] += 10
    assert launched(scores, (2048, 2048, 1024), 6)[1].min() > 2**31
    assert_topk(scores, (2048, 2048, 1024), 6)


@in_the_interpreter
@pytest.mark.parametrize(("factors", "k"), [((7, 11), 6), ((3, 2, 5), 4), ((17,), 4)])
def test_launch_shapes_change_nothing(factors: tuple[int, ...], k: int) -> None:
    scores = drawn([NAN, INF, 0.0, 1.0, 2.0, 3.0], 5, sum(factors), F32)
    for changes in ({"programs": 1}, {"programs": 2}):
        assert_topk(scores, factors, k, **changes)


@in_the_interpreter
@every_dtype
@pytest.mark.parametrize(("factors", "k"), [((7, 11), 6), ((3, 4, 5), 13), ((17,), 4), ((300, 2), 5)])
def test_backward_is_the_cpu_kernel_exactly(factors: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    scores = normal(3, sum(factors)).to(dtype)
    _, ids = product_key_topk(scores, factors, k)
    gradient = normal(3, k).to(dtype)
    gradient[1, 1] = NAN
    got = torch.full_like(scores, INF)
    launch_topk_bwd(gradient, ids, factors, got)
    assert_same_bits([got], [torch.ops.sdm.product_key_topk_bwd(gradient, ids, list(factors))])


@without_the_interpreter
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int) -> None:
    fold = {"WIDTH": 32, "OFFSET": 16, "N0": 16, "N1": 16, "BN0": 16, "BN1": 16, "k": 9, "ROOT": 3, "COUNT": 9, "K": 16}
    fold |= {"HOOKS": 0, "OTHERS": 32, "WORK": 97, "FIRST": True, "PACKED": True, "FULL": True}
    hooks = fold | {"k": 64, "ROOT": 8, "COUNT": 64, "K": 64, "HOOKS": 3, "OTHERS": 64, "WORK": 321}
    later = fold | {"COUNT": 9, "FIRST": False, "PACKED": False, "FULL": False}
    pointers = ["*bf16", "*i64", "*bf16", "*bf16", "*i64", "*i64", "i32"]
    one = {"N": 16, "BN": 16, "k": 9, "K": 16, "PACKED": True}
    back = {"WIDTH": 32, "OFFSET": 16, "N": 16, "STRIDE": 1, "k": 9, "BN": 16}
    for kernel, types, constants in (
        (_fold_kernel, pointers, fold),
        (_fold_kernel, pointers, hooks),
        (_fold_kernel, ["*fp32", *pointers[1:]], later),
        (_one_factor_kernel, ["*bf16", "*bf16", "*i64"], one),
        (_topk_bwd_kernel, ["*fp32", "*i64", "*fp32"], back),
    ):
        names = [name for name in kernel.arg_names if name not in constants]
        signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(kernel, signature, constants)
        target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": 1, "enable_fp_fusion": False})
        assert compiled.asm["cubin"]
