"""The dual matmul: the chunk's deltas and readings from what the gather retrieved.

    u = beta (v - retrieved)        delta = X u        readings = QX u + inter

X, QX [P, C, C]; everything else [P, C, D] (beta [P, C, 1]). v and readings have the bank's dtype, the rest the
accumulate dtype. Ops: `dual_matmul` and `dual_matmul_bwd`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import accumulate_dtype, check_devices, check_dtype, check_float, check_like, check_rank, check_shape
from .layout import empty, empty_gradients, wanted_gradients
from .registry import register

_INPUTS = "Tensor X, Tensor QX, Tensor v, Tensor beta, Tensor retrieved, Tensor inter"


def _check_dual_matmul(X: Tensor, QX: Tensor, v: Tensor, beta: Tensor, **rows: Tensor) -> None:
    """`rows` are [P, C, D] in the accumulate dtype."""
    check_rank("v", v, "[P, C, D]")
    check_float("v", v)
    streams, chunk, _ = v.shape
    check_shape("X", X, (streams, chunk, chunk), "[P, C, C]")
    check_shape("QX", QX, X.shape, "[P, C, C] like X")
    check_shape("beta", beta, (streams, chunk, 1), "[P, C, 1]")
    for name, tensor in rows.items():
        check_shape(name, tensor, v.shape, "[P, C, D] like v")
    for name, tensor in {"X": X, "QX": QX, "beta": beta, **rows}.items():
        check_dtype(name, tensor, accumulate_dtype(v.dtype), f"with {v.dtype} values")
    check_devices(X=X, QX=QX, v=v, beta=beta, **rows)


def _empty_dual_matmul_outputs(v: Tensor) -> tuple[Tensor, Tensor]:
    return empty(tuple(v.shape), v, accumulate_dtype(v.dtype)), empty(tuple(v.shape), v)


def _dual_matmul_cpu(
    X: Tensor, QX: Tensor, v: Tensor, beta: Tensor, retrieved: Tensor, inter: Tensor
) -> tuple[Tensor, Tensor]:
    _check_dual_matmul(X, QX, v, beta, retrieved=retrieved, inter=inter)
    delta, readings = _empty_dual_matmul_outputs(v)
    u = beta * (v - retrieved)
    torch.matmul(X, u, out=delta)
    readings.copy_(torch.matmul(QX, u).add_(inter))
    return delta, readings


def _dual_matmul_cuda(
    X: Tensor, QX: Tensor, v: Tensor, beta: Tensor, retrieved: Tensor, inter: Tensor
) -> tuple[Tensor, Tensor]:
    from .dual_matmul_kernels import lower_matmul_call

    _check_dual_matmul(X, QX, v, beta, retrieved=retrieved, inter=inter)
    delta, readings = _empty_dual_matmul_outputs(v)
    X, QX, v, beta, retrieved, inter = (x.contiguous() for x in (X, QX, v, beta, retrieved, inter))
    lower_matmul_call(X, retrieved, delta, v.dtype, residual=(v, beta)).launch()
    lower_matmul_call(QX, retrieved, readings, v.dtype, residual=(v, beta), plus=inter).launch()
    return delta, readings


def _dual_matmul_fake(
    X: Tensor, QX: Tensor, v: Tensor, beta: Tensor, retrieved: Tensor, inter: Tensor
) -> tuple[Tensor, Tensor]:
    _check_dual_matmul(X, QX, v, beta, retrieved=retrieved, inter=inter)
    return _empty_dual_matmul_outputs(v)


def _check_dual_matmul_bwd(
    ddelta: Tensor, dreadings: Tensor, X: Tensor, QX: Tensor, v: Tensor, beta: Tensor, retrieved: Tensor
) -> None:
    _check_dual_matmul(X, QX, v, beta, retrieved=retrieved, ddelta=ddelta)
    check_like("dreadings", dreadings, "v", v)
    check_devices(X=X, dreadings=dreadings)


def _empty_dual_matmul_bwd_outputs(X: Tensor, v: Tensor, beta: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
    """dX, dQX, dv, dbeta, dretrieved, dinter."""
    return empty_gradients((X, X, v, beta, v, v), mask, (X.dtype, X.dtype, v.dtype, X.dtype, X.dtype, X.dtype))


def _dual_matmul_bwd_cpu(
    ddelta: Tensor,
    dreadings: Tensor,
    X: Tensor,
    QX: Tensor,
    v: Tensor,
    beta: Tensor,
    retrieved: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    _check_dual_matmul_bwd(ddelta, dreadings, X, QX, v, beta, retrieved)
    outs = _empty_dual_matmul_bwd_outputs(X, v, beta, mask)
    error = v - retrieved
    u = beta * error
    dy = dreadings.to(X.dtype)
    du = X.mT @ ddelta + QX.mT @ dy
    grads = (
        lambda: ddelta @ u.mT,
        lambda: dy @ u.mT,
        lambda: beta * du,
        lambda: (error * du).sum(-1, keepdim=True),
        lambda: -beta * du,
        lambda: dy,
    )
    for out, grad, wanted in zip(outs, grads, mask, strict=True):
        if wanted:
            out.copy_(grad())
    return outs


def _dual_matmul_bwd_cuda(
    ddelta: Tensor,
    dreadings: Tensor,
    X: Tensor,
    QX: Tensor,
    v: Tensor,
    beta: Tensor,
    retrieved: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    from .dual_matmul_kernels import outer_product_call, transposed_lower_matmul_call, values_backward_call

    _check_dual_matmul_bwd(ddelta, dreadings, X, QX, v, beta, retrieved)
    outs = _empty_dual_matmul_bwd_outputs(X, v, beta, mask)
    dX, dQX, dv, dbeta, dretrieved, dinter = (out if wanted else None for out, wanted in zip(outs, mask, strict=True))
    inputs = (ddelta, dreadings, X, QX, v, beta, retrieved)
    ddelta, dreadings, X, QX, v, beta, retrieved = (x.contiguous() for x in inputs)
    if dX is not None or dQX is not None:
        u = beta * (v - retrieved)
    if dX is not None:
        outer_product_call(ddelta, u, dX, v.dtype).launch()
    if dQX is not None:
        outer_product_call(dreadings.to(X.dtype), u, dQX, v.dtype).launch()
    if dv is not None or dbeta is not None or dretrieved is not None:
        du = empty(tuple(v.shape), v, X.dtype)
        transposed_lower_matmul_call(QX, dreadings, du, v.dtype).launch()
        transposed_lower_matmul_call(X, ddelta, du, v.dtype, plus=du).launch()
        values_backward_call(du, v, beta, retrieved, dv, dbeta, dretrieved).launch()
    if dinter is not None:
        dinter.copy_(dreadings)
    return outs


def _dual_matmul_bwd_fake(
    ddelta: Tensor,
    dreadings: Tensor,
    X: Tensor,
    QX: Tensor,
    v: Tensor,
    beta: Tensor,
    retrieved: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    _check_dual_matmul_bwd(ddelta, dreadings, X, QX, v, beta, retrieved)
    return _empty_dual_matmul_bwd_outputs(X, v, beta, mask)


dual_matmul_bwd_op = register(
    "dual_matmul_bwd(Tensor ddelta, Tensor dreadings, Tensor X, Tensor QX, Tensor v, Tensor beta, Tensor retrieved, "
    "bool[] mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_dual_matmul_bwd_cpu,
    cuda=_dual_matmul_bwd_cuda,
    fake=_dual_matmul_bwd_fake,
)


def _setup_dual_matmul(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])


def _dual_matmul_backward(ctx: Any, ddelta: Tensor, dreadings: Tensor) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad)
    grads = dual_matmul_bwd_op(ddelta, dreadings, *ctx.saved_tensors, mask)
    return wanted_gradients(grads, mask)


dual_matmul_op = register(
    f"dual_matmul({_INPUTS}) -> (Tensor, Tensor)",
    cpu=_dual_matmul_cpu,
    cuda=_dual_matmul_cuda,
    fake=_dual_matmul_fake,
    setup_context=_setup_dual_matmul,
    backward=_dual_matmul_backward,
)


def dual_matmul(
    X: Tensor, QX: Tensor, v: Tensor, beta: Tensor, retrieved: Tensor, inter: Tensor
) -> tuple[Tensor, Tensor]:
    """delta and readings. Equivalent code: `u = beta * (v - retrieved); X @ u, QX @ u + inter`.

    Args:
        X, QX: [P, C, C] from the solve, lower triangular.
        v: [P, C, D] staged values, bank dtype. beta: [P, C, 1].
        retrieved, inter: [P, C, D] from the gather.
    Returns:
        delta: [P, C, D] in the accumulate dtype; readings: [P, C, D] in the bank's dtype. Fresh memory.
    Raises:
        ValueError: shapes or dtypes disagree.
    Note: differentiable; matmuls follow PyTorch's float32 matmul precision. SPEC section 2.
    """
    return dual_matmul_op(X, QX, v, beta, retrieved, inter)
