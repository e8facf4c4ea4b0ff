"""The solve: what the generic tests do not reach."""

from __future__ import annotations

import pytest
import torch

from sdm_compile import reference
from sdm_compile.ops.solve import solve, solve_bwd_op
from tests.harness import assert_close, assert_same_bits, normal_like


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_float32_whatever_the_matmul_precision(precision: str) -> None:
    """Large enough that the matmuls around it do follow the setting, where the machine has what it asks for."""
    A = normal_like(torch.empty(1, 2, 256, 256), 1) / 32
    QK, beta = normal_like(A, 2), torch.sigmoid(normal_like(A[..., :1], 3))
    grads = normal_like(A, 4), normal_like(A, 5)

    def run() -> list[torch.Tensor]:
        X, QX = solve(A, QK, beta)
        return [X, QX, *solve_bwd_op(*grads, A, QK, beta, X)]

    expected = run()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert_same_bits(run(), expected)
    finally:
        torch.set_float32_matmul_precision(before)


def test_long_chunks_stay_accurate() -> None:
    """Every token writes the same slot with full weight and strength: no entry of A is below 1."""
    A = torch.ones(1, 1, 256, 256)
    X, QX = solve(A, A, torch.ones(1, 1, 256, 1))
    assert_same_bits(X[0, 0], torch.eye(256) - torch.ones(255).diag(-1))
    assert_same_bits(QX[0, 0], torch.eye(256))


def test_negative_and_large_strengths() -> None:
    A = normal_like(torch.empty(2, 1, 12, 12))
    beta = torch.linspace(-3, 3, 24).view(2, 1, 12, 1)
    assert_close(solve(A, A, beta), reference.solve(*(x.double() for x in (A, A, beta))))
