"""Staging: inputs [P, T, *] to time-major chunks [steps, P, C, *], and readings back.

Ops: `stage_inputs` and `unstage_readings`, each with its backward.

Everything that later stages would each have to think of is done here, once: ids narrowed to int32 and every "no slot"
set to -1 with weight and gate 0; weights and values rounded to the bank's dtype; padding tokens that touch nothing; v,
beta and g of a token without a write slot set to 0, so that nothing of it reaches the chunk; repeated write slots of
one token merged into the first (weights add, its gate counts) and counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import (
    MAX_CHUNK,
    accumulate_dtype,
    check_chunk_size,
    check_devices,
    check_float,
    check_ids_in_bank,
    check_inputs,
    check_range,
    check_rank,
    check_shape,
)
from .layout import Staged, empty, empty_staged, num_steps
from .registry import register
from .repeats import add_repeats, merge_repeated, merge_repeated_backward, repeat_count

_INPUTS = "Tensor k_idx, Tensor k_val, Tensor v, Tensor beta, Tensor g, Tensor q_idx, Tensor q_val"


def _check_inputs(
    k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> None:
    check_rank("v", v, "[P, T, D]")
    check_inputs(k_idx, k_val, v, beta, g, q_idx, q_val)
    check_devices(k_idx=k_idx, k_val=k_val, v=v, beta=beta, g=g, q_idx=q_idx, q_val=q_val)


def _check_stage_inputs(
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    dtype: torch.dtype,
    chunk_size: int,
) -> None:
    check_chunk_size(chunk_size)
    check_float("memory", empty((0,), v, dtype))
    _check_inputs(k_idx, k_val, v, beta, g, q_idx, q_val)


def _check_steps(name: str, chunks: Tensor, tokens: int) -> None:
    """[steps, P, C, *] with as many steps as so many tokens need."""
    steps, _, chunk, _ = chunks.shape
    check_range(f"the chunk size (third dimension of {name})", chunk, 1, MAX_CHUNK)
    if steps != num_steps(tokens, chunk):
        want = num_steps(tokens, chunk)
        raise ValueError(f"tokens is {tokens}, which {want} steps of {chunk} hold; {name} has {steps}")


def _empty_stage_inputs_outputs(
    k_idx: Tensor, v: Tensor, g: Tensor, q_idx: Tensor, dtype: torch.dtype, chunk_size: int
) -> Staged:
    streams, tokens, writes = k_idx.shape
    lead = (num_steps(tokens, chunk_size), streams, chunk_size)
    return empty_staged(lead, writes, q_idx.shape[2], g.shape[2], v.shape[2], v, dtype, accumulate_dtype(dtype))


def _to_chunks(out: Tensor, x: Tensor, fill: int) -> Tensor:
    """[P, T, K] into `out` [steps, P, C, K], padded."""
    steps, streams, chunk, width = out.shape
    padded = out.new_full((streams, steps * chunk, width), fill)
    padded[:, : x.shape[1]] = x
    return out.copy_(padded.view(streams, steps, chunk, width).transpose(0, 1))


def _from_chunks(x: Tensor, tokens: int) -> Tensor:
    """[steps, P, C, K] as [P, T, K], padding dropped."""
    steps, streams, chunk, width = x.shape
    return x.transpose(0, 1).reshape(streams, steps * chunk, width)[:, :tokens]


def _stage_inputs_cpu(
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    num_slots: int,
    dtype: torch.dtype,
    chunk_size: int,
    count_repeats: bool,
) -> tuple[Tensor, ...]:
    _check_stage_inputs(k_idx, k_val, v, beta, g, q_idx, q_val, dtype, chunk_size)
    check_ids_in_bank(num_slots, k_idx=k_idx, q_idx=q_idx)
    accumulate = accumulate_dtype(dtype)
    ids, weights, gates, repeats = merge_repeated(k_idx, k_val.to(dtype).to(accumulate), g.to(accumulate))
    if count_repeats:
        add_repeats(repeats)
    silent = (k_idx < 0).all(-1, keepdim=True)
    no_read = q_idx < 0
    cleaned = (
        ids,
        weights,
        v.masked_fill(silent, 0),
        beta.masked_fill(silent, 0),
        gates,
        q_idx.masked_fill(no_read, -1),
        q_val.masked_fill(no_read, 0),
    )
    outs = _empty_stage_inputs_outputs(k_idx, v, g, q_idx, dtype, chunk_size)
    for out, x in zip(outs, cleaned, strict=True):
        _to_chunks(out, x, 0 if x.is_floating_point() else -1)
    return outs


def _stage_inputs_cuda(
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    num_slots: int,
    dtype: torch.dtype,
    chunk_size: int,
    count_repeats: bool,
) -> tuple[Tensor, ...]:
    from .staging_kernels import launch_stage_inputs

    _check_stage_inputs(k_idx, k_val, v, beta, g, q_idx, q_val, dtype, chunk_size)
    outs = _empty_stage_inputs_outputs(k_idx, v, g, q_idx, dtype, chunk_size)
    silent = empty(tuple(outs.k_idx.shape[:3]), v, torch.int8)
    repeats = repeat_count(v.device) if count_repeats else None
    launch_stage_inputs((k_idx, k_val, v, beta, g, q_idx, q_val), outs, silent, repeats, num_slots)
    return outs


def _stage_inputs_fake(
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    num_slots: int,
    dtype: torch.dtype,
    chunk_size: int,
    count_repeats: bool,
) -> tuple[Tensor, ...]:
    _check_stage_inputs(k_idx, k_val, v, beta, g, q_idx, q_val, dtype, chunk_size)
    return _empty_stage_inputs_outputs(k_idx, v, g, q_idx, dtype, chunk_size)


def _check_stage_inputs_bwd(
    dk_val: Tensor,
    dv: Tensor,
    dbeta: Tensor,
    dg: Tensor,
    dq_val: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
) -> None:
    """Each gradient may be in the bank's or in the accumulate dtype."""
    _check_inputs(k_idx, k_val, v, beta, g, q_idx, q_val)
    check_rank("dk_val", dk_val, "[steps, P, C, W]")
    _check_steps("dk_val", dk_val, k_idx.shape[1])
    lead = (dk_val.shape[0], k_idx.shape[0], dk_val.shape[2])
    grads = (("dk_val", dk_val, k_val), ("dv", dv, v), ("dbeta", dbeta, beta), ("dg", dg, g), ("dq_val", dq_val, q_val))
    for name, grad, x in grads:
        check_shape(name, grad, (*lead, x.shape[2]), f"[steps, P, C, *], the shape of the staged {name[1:]}")
        check_float(name, grad)
    wide = dv.dtype == torch.float64
    for name, grad, _ in grads:
        if (grad.dtype == torch.float64) != wide:
            raise ValueError(f"{name} has dtype {grad.dtype} and dv {dv.dtype}; float64 is for all of them or for none")
    check_devices(k_idx=k_idx, dk_val=dk_val, dv=dv, dbeta=dbeta, dg=dg, dq_val=dq_val)


def _empty_stage_inputs_bwd_outputs(
    k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_val: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        empty(tuple(k_val.shape), k_val),
        empty(tuple(v.shape), v),
        empty(tuple(beta.shape), beta),
        empty(tuple(g.shape), g),
        empty(tuple(q_val.shape), q_val),
    )


def _stage_inputs_bwd_cpu(
    dk_val: Tensor,
    dv: Tensor,
    dbeta: Tensor,
    dg: Tensor,
    dq_val: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
) -> tuple[Tensor, ...]:
    _check_stage_inputs_bwd(dk_val, dv, dbeta, dg, dq_val, k_idx, k_val, v, beta, g, q_idx, q_val)
    tokens = k_idx.shape[1]
    silent = (k_idx < 0).all(-1, keepdim=True)
    chunks = (_from_chunks(x, tokens) for x in (dk_val, dv, dbeta, dg, dq_val))
    dk_val, dv, dbeta, dg, dq_val = chunks
    dk_val, dg = merge_repeated_backward(k_idx, dk_val, dg)
    grads = (
        dk_val,
        dv.masked_fill(silent, 0),
        dbeta.masked_fill(silent, 0),
        dg,
        dq_val.masked_fill(q_idx < 0, 0),
    )
    outs = _empty_stage_inputs_bwd_outputs(k_val, v, beta, g, q_val)
    return tuple(out.copy_(grad) for out, grad in zip(outs, grads, strict=True))


def _stage_inputs_bwd_cuda(
    dk_val: Tensor,
    dv: Tensor,
    dbeta: Tensor,
    dg: Tensor,
    dq_val: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
) -> tuple[Tensor, ...]:
    from .staging_kernels import launch_stage_inputs_bwd

    _check_stage_inputs_bwd(dk_val, dv, dbeta, dg, dq_val, k_idx, k_val, v, beta, g, q_idx, q_val)
    outs = _empty_stage_inputs_bwd_outputs(k_val, v, beta, g, q_val)
    silent = empty(tuple(k_idx.shape[:2]), v, torch.int8)
    grads = [x.contiguous() for x in (dk_val, dv, dbeta, dg, dq_val)]
    launch_stage_inputs_bwd(grads, k_idx, q_idx, outs, silent)
    return outs


def _stage_inputs_bwd_fake(
    dk_val: Tensor,
    dv: Tensor,
    dbeta: Tensor,
    dg: Tensor,
    dq_val: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
) -> tuple[Tensor, ...]:
    _check_stage_inputs_bwd(dk_val, dv, dbeta, dg, dq_val, k_idx, k_val, v, beta, g, q_idx, q_val)
    return _empty_stage_inputs_bwd_outputs(k_val, v, beta, g, q_val)


stage_inputs_bwd_op = register(
    "stage_inputs_bwd(Tensor dk_val, Tensor dv, Tensor dbeta, Tensor dg, Tensor dq_val, "
    f"{_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_stage_inputs_bwd_cpu,
    cuda=_stage_inputs_bwd_cuda,
    fake=_stage_inputs_bwd_fake,
)


def _setup_stage_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.mark_non_differentiable(output[0], output[5])


def _stage_inputs_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    _, dk_val, dv, dbeta, dg, _, dq_val = grads
    dk_val, dv, dbeta, dg, dq_val = stage_inputs_bwd_op(dk_val, dv, dbeta, dg, dq_val, *ctx.saved_tensors)
    return None, dk_val, dv, dbeta, dg, None, dq_val, None, None, None, None


stage_inputs_op = register(
    f"stage_inputs({_INPUTS}, SymInt num_slots, ScalarType dtype, int chunk_size, bool count_repeats)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_stage_inputs_cpu,
    cuda=_stage_inputs_cuda,
    fake=_stage_inputs_fake,
    setup_context=_setup_stage_inputs,
    backward=_stage_inputs_backward,
)


def _check_unstage(readings: Tensor, tokens: int) -> None:
    check_rank("readings", readings, "[steps, P, C, D]")
    check_float("readings", readings)
    _check_steps("readings", readings, tokens)


def _empty_unstage_output(readings: Tensor, tokens: int) -> Tensor:
    return empty((readings.shape[1], tokens, readings.shape[3]), readings)


def _unstage_readings_cpu(readings: Tensor, tokens: int) -> Tensor:
    _check_unstage(readings, tokens)
    return _empty_unstage_output(readings, tokens).copy_(_from_chunks(readings, tokens))


def _unstage_readings_cuda(readings: Tensor, tokens: int) -> Tensor:
    from .staging_kernels import launch_unstage_readings

    _check_unstage(readings, tokens)
    out = _empty_unstage_output(readings, tokens)
    launch_unstage_readings(readings.contiguous(), out)
    return out


def _unstage_readings_fake(readings: Tensor, tokens: int) -> Tensor:
    _check_unstage(readings, tokens)
    return _empty_unstage_output(readings, tokens)


def _check_unstage_bwd(dreadings: Tensor, chunk_size: int) -> None:
    check_chunk_size(chunk_size)
    check_rank("dreadings", dreadings, "[P, T, D]")
    check_float("dreadings", dreadings)


def _empty_unstage_bwd_output(dreadings: Tensor, chunk_size: int) -> Tensor:
    streams, tokens, width = dreadings.shape
    return empty((num_steps(tokens, chunk_size), streams, chunk_size, width), dreadings)


def _unstage_readings_bwd_cpu(dreadings: Tensor, chunk_size: int) -> Tensor:
    _check_unstage_bwd(dreadings, chunk_size)
    return _to_chunks(_empty_unstage_bwd_output(dreadings, chunk_size), dreadings, 0)


def _unstage_readings_bwd_cuda(dreadings: Tensor, chunk_size: int) -> Tensor:
    from .staging_kernels import launch_unstage_readings_bwd

    _check_unstage_bwd(dreadings, chunk_size)
    out = _empty_unstage_bwd_output(dreadings, chunk_size)
    launch_unstage_readings_bwd(dreadings, out)
    return out


def _unstage_readings_bwd_fake(dreadings: Tensor, chunk_size: int) -> Tensor:
    _check_unstage_bwd(dreadings, chunk_size)
    return _empty_unstage_bwd_output(dreadings, chunk_size)


unstage_readings_bwd_op = register(
    "unstage_readings_bwd(Tensor dreadings, int chunk_size) -> Tensor",
    cpu=_unstage_readings_bwd_cpu,
    cuda=_unstage_readings_bwd_cuda,
    fake=_unstage_readings_bwd_fake,
)


def _setup_unstage(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.chunk_size = inputs[0].shape[2]


def _unstage_backward(ctx: Any, dreadings: Tensor) -> tuple[Tensor, None]:
    return unstage_readings_bwd_op(dreadings, ctx.chunk_size), None


unstage_readings_op = register(
    "unstage_readings(Tensor readings, SymInt tokens) -> Tensor",
    cpu=_unstage_readings_cpu,
    cuda=_unstage_readings_cuda,
    fake=_unstage_readings_fake,
    setup_context=_setup_unstage,
    backward=_unstage_backward,
)


def stage_inputs(
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    *,
    num_slots: int,
    dtype: torch.dtype,
    chunk_size: int,
    count_repeats: bool = True,
) -> Staged:
    """Inputs [P, T, *] as cleaned time-major chunks [steps, P, C, *].

    Args:
        k_idx, q_idx: [P, T, W] and [P, T, R] int32 or int64 bank rows; negative means no slot.
        k_val, v, beta, g, q_val: [P, T, W], [P, T, D], [P, T, 1], [P, T, 1 or W], [P, T, R] float.
        num_slots: rows of the bank; on the CPU an id at or above it raises.
        dtype: the bank's dtype.
        chunk_size: tokens per chunk, 1 to 256.
        count_repeats: add repeated write slots to the count that `repeated_write_slots` returns.
    Returns:
        `Staged`, fresh memory.
    Raises:
        ValueError: shapes disagree. UnsupportedConfigurationError: a dtype or chunk size outside the supported ones.
        IndexError: an id beyond the bank (CPU).
    Note: differentiable; SPEC sections 1 (edges) and 2.
    """
    return Staged(*stage_inputs_op(k_idx, k_val, v, beta, g, q_idx, q_val, num_slots, dtype, chunk_size, count_repeats))


def unstage_readings(readings: Tensor, tokens: int) -> Tensor:
    """Readings [steps, P, C, D] back to fresh [P, T, D], padding dropped. Differentiable; SPEC section 2."""
    return unstage_readings_op(readings, tokens)
