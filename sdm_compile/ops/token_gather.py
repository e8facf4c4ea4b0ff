"""The token gather: one step's weighted sums of bank rows, at the write slots and at the read slots.

    retrieved_i = sum_w k_eff[i,w] bank[k_idx[i,w]]        inter_i = sum_r q_w[i,r] bank[q_idx[i,r]]

bank [num_slots, D]; ids and weights [P, C, W] and [P, C, R]; outputs [P, C, D]. Ops: `token_gather` and
`token_gather_bwd`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import (
    accumulate_dtype,
    check_devices,
    check_dtype,
    check_float,
    check_ids_in_bank,
    check_rank,
    check_shape,
    check_staged_ids,
)
from .layout import empty, empty_gradients, wanted_gradients
from .registry import register
from .rows import add_rows_, row_dots, weighted_rows

_INPUTS = "Tensor bank, Tensor k_idx, Tensor k_eff, Tensor q_idx, Tensor q_w"


def _check_token_gather(bank: Tensor, k_idx: Tensor, k_eff: Tensor, q_idx: Tensor, q_w: Tensor) -> None:
    check_rank("bank", bank, "[num_slots, D]")
    check_float("bank", bank)
    dtype = accumulate_dtype(bank.dtype)
    pairs = (("k_idx", k_idx, "k_eff", k_eff, "[P, C, W]"), ("q_idx", q_idx, "q_w", q_w, "[P, C, R]"))
    for name, ids, weight_name, weights, layout in pairs:
        check_rank(name, ids, layout)
        check_shape(name, ids, (*k_idx.shape[:2], ids.shape[2]), layout)
        check_shape(weight_name, weights, ids.shape, f"{layout} like {name}")
        check_staged_ids(name, ids)
        check_dtype(weight_name, weights, dtype, f"with a {bank.dtype} bank")
    check_devices(bank=bank, k_idx=k_idx, k_eff=k_eff, q_idx=q_idx, q_w=q_w)


def _empty_token_gather_outputs(bank: Tensor, k_idx: Tensor) -> tuple[Tensor, Tensor]:
    shape, dtype = (*k_idx.shape[:2], bank.shape[1]), accumulate_dtype(bank.dtype)
    return empty(shape, bank, dtype), empty(shape, bank, dtype)


def _token_gather_cpu(bank: Tensor, k_idx: Tensor, k_eff: Tensor, q_idx: Tensor, q_w: Tensor) -> tuple[Tensor, Tensor]:
    _check_token_gather(bank, k_idx, k_eff, q_idx, q_w)
    check_ids_in_bank(bank.shape[0], k_idx=k_idx, q_idx=q_idx)
    outs = _empty_token_gather_outputs(bank, k_idx)
    for out, idx, weights in zip(outs, (k_idx, q_idx), (k_eff, q_w), strict=True):
        out.copy_(weighted_rows(bank, idx, weights))
    return outs


def _token_gather_cuda(bank: Tensor, k_idx: Tensor, k_eff: Tensor, q_idx: Tensor, q_w: Tensor) -> tuple[Tensor, Tensor]:
    from .token_gather_kernels import token_gather_call

    _check_token_gather(bank, k_idx, k_eff, q_idx, q_w)
    outs = _empty_token_gather_outputs(bank, k_idx)
    bank, k_idx, k_eff, q_idx, q_w = (x.contiguous() for x in (bank, k_idx, k_eff, q_idx, q_w))
    token_gather_call(bank, None, k_idx, k_eff, q_idx, q_w, None, *outs).launch()
    return outs


def _token_gather_fake(bank: Tensor, k_idx: Tensor, k_eff: Tensor, q_idx: Tensor, q_w: Tensor) -> tuple[Tensor, Tensor]:
    _check_token_gather(bank, k_idx, k_eff, q_idx, q_w)
    return _empty_token_gather_outputs(bank, k_idx)


def _check_token_gather_bwd(
    dretrieved: Tensor, dinter: Tensor, bank: Tensor, k_idx: Tensor, k_eff: Tensor, q_idx: Tensor, q_w: Tensor
) -> None:
    _check_token_gather(bank, k_idx, k_eff, q_idx, q_w)
    for name, grad in (("dretrieved", dretrieved), ("dinter", dinter)):
        check_shape(name, grad, (*k_idx.shape[:2], bank.shape[1]), "[P, C, D]")
        check_dtype(name, grad, accumulate_dtype(bank.dtype), f"with a {bank.dtype} bank")
    check_devices(bank=bank, dretrieved=dretrieved, dinter=dinter)


def _empty_token_gather_bwd_outputs(bank: Tensor, k_eff: Tensor, q_w: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
    """dbank, dk_eff, dq_w."""
    return empty_gradients((bank, k_eff, q_w), mask)


def _token_gather_bwd_cpu(
    dretrieved: Tensor,
    dinter: Tensor,
    bank: Tensor,
    k_idx: Tensor,
    k_eff: Tensor,
    q_idx: Tensor,
    q_w: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    _check_token_gather_bwd(dretrieved, dinter, bank, k_idx, k_eff, q_idx, q_w)
    dbank, dk_eff, dq_w = _empty_token_gather_bwd_outputs(bank, k_eff, q_w, mask)
    if mask[0]:
        sums = torch.zeros(bank.shape, dtype=k_eff.dtype)
        add_rows_(sums, k_idx, k_eff, dretrieved)
        add_rows_(sums, q_idx, q_w, dinter)
        dbank.copy_(sums)
    if mask[1]:
        dk_eff.copy_(row_dots(bank, k_idx, dretrieved))
    if mask[2]:
        dq_w.copy_(row_dots(bank, q_idx, dinter))
    return dbank, dk_eff, dq_w


def _token_gather_bwd_cuda(
    dretrieved: Tensor,
    dinter: Tensor,
    bank: Tensor,
    k_idx: Tensor,
    k_eff: Tensor,
    q_idx: Tensor,
    q_w: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    from .token_gather_kernels import launch_token_gather_bwd

    _check_token_gather_bwd(dretrieved, dinter, bank, k_idx, k_eff, q_idx, q_w)
    outs = _empty_token_gather_bwd_outputs(bank, k_eff, q_w, mask)
    if any(mask):
        dretrieved, dinter, *inputs = (x.contiguous() for x in (dretrieved, dinter, bank, k_idx, k_eff, q_idx, q_w))
        launch_token_gather_bwd(dretrieved, dinter, inputs, wanted_gradients(outs, mask))
    return outs


def _token_gather_bwd_fake(
    dretrieved: Tensor,
    dinter: Tensor,
    bank: Tensor,
    k_idx: Tensor,
    k_eff: Tensor,
    q_idx: Tensor,
    q_w: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    _check_token_gather_bwd(dretrieved, dinter, bank, k_idx, k_eff, q_idx, q_w)
    return _empty_token_gather_bwd_outputs(bank, k_eff, q_w, mask)


token_gather_bwd_op = register(
    f"token_gather_bwd(Tensor dretrieved, Tensor dinter, {_INPUTS}, bool[] mask) -> (Tensor, Tensor, Tensor)",
    cpu=_token_gather_bwd_cpu,
    cuda=_token_gather_bwd_cuda,
    fake=_token_gather_bwd_fake,
)


def _setup_token_gather(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _token_gather_backward(ctx: Any, dretrieved: Tensor, dinter: Tensor) -> tuple[Tensor | None, ...]:
    mask = [ctx.needs_input_grad[i] for i in (0, 2, 4)]
    grads = token_gather_bwd_op(dretrieved, dinter, *ctx.saved_tensors, mask)
    dbank, dk_eff, dq_w = wanted_gradients(grads, mask)
    return dbank, None, dk_eff, None, dq_w


token_gather_op = register(
    f"token_gather({_INPUTS}) -> (Tensor, Tensor)",
    cpu=_token_gather_cpu,
    cuda=_token_gather_cuda,
    fake=_token_gather_fake,
    setup_context=_setup_token_gather,
    backward=_token_gather_backward,
)


def token_gather(bank: Tensor, k_idx: Tensor, k_eff: Tensor, q_idx: Tensor, q_w: Tensor) -> tuple[Tensor, Tensor]:
    """One step's retrieved and inter rows. Equivalent code: `(k_eff[..., None] * bank[k_idx]).sum(-2)`, likewise q.

    Args:
        bank: [num_slots, D] bfloat16 or float32 (float64 on the CPU).
        k_idx, k_eff: [P, C, W] int32 bank rows, negative for no slot, and their weights in the accumulate dtype. No two
            streams share a row, which the backward on CUDA relies on.
        q_idx, q_w: [P, C, R], likewise.
    Returns:
        retrieved, inter: [P, C, D] in the accumulate dtype, fresh memory.
    Raises:
        ValueError: shapes or dtypes disagree. IndexError: an id beyond the bank (CPU).
    Note: differentiable; SPEC section 2.
    """
    return token_gather_op(bank, k_idx, k_eff, q_idx, q_w)
