"""The solve: X = (I + diag(beta) tril(A, -1))^-1 and QX = QK X, per chunk.

Inputs A, QK [steps, P, C, C] and beta [steps, P, C, 1]; outputs X, QX [steps, P, C, C]. Always IEEE float32 (float64
for float64): the inverse amplifies rounding. Ops: `solve` and `solve_bwd`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_devices, check_like, check_rank, check_shape
from .layout import empty
from .registry import register


def _check_solve(A: Tensor, QK: Tensor, beta: Tensor) -> None:
    check_rank("A", A, "[steps, P, C, C]")
    check_shape("A", A, (*A.shape[:3], A.shape[2]), "[steps, P, C, C]")
    check_shape("QK", QK, A.shape, "[steps, P, C, C] like A")
    check_shape("beta", beta, (*A.shape[:3], 1), "[steps, P, C, 1]")
    for name, tensor in (("A", A), ("QK", QK), ("beta", beta)):
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.dtype != A.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; A, QK and beta are all float32 (or all float64)")
    check_devices(A=A, QK=QK, beta=beta)


def _empty_solve_outputs(A: Tensor) -> tuple[Tensor, Tensor]:
    return empty(tuple(A.shape), A), empty(tuple(A.shape), A)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """In float64, which no precision setting touches: with bfloat16 allowed, float32 matmuls are not IEEE ones."""
    return torch.matmul(a.double(), b.double())


def _solve_cpu(A: Tensor, QK: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    _check_solve(A, QK, beta)
    X, QX = _empty_solve_outputs(A)
    eye = torch.eye(A.shape[2], dtype=A.dtype)
    X.copy_(torch.linalg.solve_triangular(eye + beta * A.tril(-1), eye, upper=False, unitriangular=True))
    QX.copy_(_matmul(QK.tril(), X))
    return X, QX


def _solve_cuda(A: Tensor, QK: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    from .solve_kernels import launch_solve

    _check_solve(A, QK, beta)
    outs = _empty_solve_outputs(A)
    launch_solve(A.contiguous(), QK.contiguous(), beta.contiguous(), *outs)
    return outs


def _solve_fake(A: Tensor, QK: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    _check_solve(A, QK, beta)
    return _empty_solve_outputs(A)


def _check_solve_bwd(dX: Tensor, dQX: Tensor, A: Tensor, QK: Tensor, beta: Tensor, X: Tensor) -> None:
    _check_solve(A, QK, beta)
    for name, tensor in (("dX", dX), ("dQX", dQX), ("X", X)):
        check_like(name, tensor, "A", A)
    check_devices(A=A, dX=dX, dQX=dQX, X=X)


def _empty_solve_bwd_outputs(A: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return empty(tuple(A.shape), A), empty(tuple(A.shape), A), empty(tuple(beta.shape), A)


def _solve_bwd_cpu(
    dX: Tensor, dQX: Tensor, A: Tensor, QK: Tensor, beta: Tensor, X: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    _check_solve_bwd(dX, dQX, A, QK, beta, X)
    dA, dQK, dbeta = _empty_solve_bwd_outputs(A, beta)
    dQK.copy_(_matmul(dQX, X.mT)).tril_()
    dX = dX + _matmul(QK.tril().mT, dQX)
    dB = -_matmul(_matmul(X.mT, dX), X.mT).tril(-1)
    dbeta.copy_((A * dB).sum(-1, keepdim=True))
    dA.copy_(beta * dB)
    return dA, dQK, dbeta


def _solve_bwd_cuda(
    dX: Tensor, dQX: Tensor, A: Tensor, QK: Tensor, beta: Tensor, X: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from .solve_kernels import launch_solve_bwd

    _check_solve_bwd(dX, dQX, A, QK, beta, X)
    outs = _empty_solve_bwd_outputs(A, beta)
    dX, dQX, A, QK, beta, X = (x.contiguous() for x in (dX, dQX, A, QK, beta, X))
    scratch = empty(tuple(X.shape), X), empty(tuple(X.shape), X)
    launch_solve_bwd((dX, dQX), (A, QK, beta), X, scratch, outs)
    return outs


def _solve_bwd_fake(
    dX: Tensor, dQX: Tensor, A: Tensor, QK: Tensor, beta: Tensor, X: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    _check_solve_bwd(dX, dQX, A, QK, beta, X)
    return _empty_solve_bwd_outputs(A, beta)


solve_bwd_op = register(
    "solve_bwd(Tensor dX, Tensor dQX, Tensor A, Tensor QK, Tensor beta, Tensor X) -> (Tensor, Tensor, Tensor)",
    cpu=_solve_bwd_cpu,
    cuda=_solve_bwd_cuda,
    fake=_solve_bwd_fake,
)


def _setup_solve(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _solve_backward(ctx: Any, dX: Tensor, dQX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return solve_bwd_op(dX, dQX, *ctx.saved_tensors)


solve_op = register(
    "solve(Tensor A, Tensor QK, Tensor beta) -> (Tensor, Tensor)",
    cpu=_solve_cpu,
    cuda=_solve_cuda,
    fake=_solve_fake,
    setup_context=_setup_solve,
    backward=_solve_backward,
)


def solve(A: Tensor, QK: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """X and QX of every chunk. Equivalent code: `X = inv(eye + beta * A.tril(-1)); QX = QK.tril() @ X`.

    Args:
        A, QK: [steps, P, C, C] float32 (or float64); the upper triangles are not read.
        beta: [steps, P, C, 1], the same dtype.
    Returns:
        X, QX: [steps, P, C, C], fresh memory.
    Raises:
        ValueError: shapes or dtypes disagree.
    Note: differentiable; SPEC section 2.
    """
    return solve_op(A, QK, beta)
