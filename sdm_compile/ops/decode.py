"""The decode step: one token per stream, written and then read, in place (SPEC section 1).

    rows = exp(g) bank[k_idx]      delta = beta (v - sum_w k_val rows)      bank[k_idx] = rows + k_val delta
    reading = sum_r q_val bank[q_idx]                                        after the write

bank [num_slots, D]; every input [..., *]; a row is rounded to the bank's dtype once per token. Op: `decode_step_`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import accumulate_dtype, check_contiguous_bank, check_ids_in_bank, check_token_inputs
from .dispatch import Dispatch, record
from .registry import register
from .repeats import add_repeats, merge_repeated, repeat_count
from .rows import load_rows, store_rows_, weighted_rows
from .situation import current_situation, situation_on_cuda

MAX_ADMITTED = 256  # signatures whose check is remembered

_INPUTS = "Tensor(a!) memory, Tensor k_idx, Tensor k_val, Tensor v, Tensor beta, Tensor g, Tensor q_idx, Tensor q_val"


def _check_decode_step(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> None:
    check_token_inputs(memory, k_idx, k_val, v, beta, g, q_idx, q_val, lead="...")
    check_contiguous_bank(memory)


def _empty_decode_step_output(memory: Tensor, v: Tensor) -> Tensor:
    # Of less work for the host than `layout.empty`, which has a shape and a device parsed.
    return torch.empty_like(v, dtype=memory.dtype, memory_format=torch.contiguous_format)


def _decode_step_cpu(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> Tensor:
    _check_decode_step(memory, k_idx, k_val, v, beta, g, q_idx, q_val)
    check_ids_in_bank(memory.shape[0], k_idx=k_idx, q_idx=q_idx)
    readings, _ = decode_tokens(memory, k_idx, k_val, v, beta, g, q_idx, q_val)
    record("decode", token_dispatch("cpu", memory, k_idx, q_idx))
    return readings


def decode_tokens(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> tuple[Tensor, Tensor]:
    """The step on the CPU, of checked arguments: the readings, and which write entries [..., W] wrote a row."""
    readings = _empty_decode_step_output(memory, v)
    dtype, accumulate = memory.dtype, accumulate_dtype(memory.dtype)
    ids, weights, gates, repeats = merge_repeated(k_idx, k_val.to(dtype).to(accumulate), g.to(accumulate))
    add_repeats(repeats)
    weights = weights.to(dtype).to(accumulate).unsqueeze(-1)
    silent = (k_idx < 0).all(-1, keepdim=True)
    v = v.to(dtype).to(accumulate).masked_fill(silent, 0)
    beta = beta.to(accumulate).masked_fill(silent, 0)
    rows = load_rows(memory, ids, accumulate) * gates.exp().unsqueeze(-1)
    q_weights = q_val.to(dtype).to(accumulate, copy=True)  # before the write: it may lie in the bank
    delta = beta * (v - (weights * rows).sum(-2))
    rows += weights * delta.unsqueeze(-2)
    keep = ids >= 0
    store_rows_(memory, ids[keep], rows[keep])
    readings.copy_(weighted_rows(memory, q_idx, q_weights))
    return readings, keep


def token_dispatch(route: str, memory: Tensor, k_idx: Tensor, q_idx: Tensor) -> Dispatch:
    return Dispatch(
        op="decode_step_",
        route=route,
        situation=current_situation(memory.device),
        layout=None,
        writer=None,
        steps=1,
        streams=k_idx[..., 0].numel(),
        tokens=1,
        writes=k_idx.shape[-1],
        reads=q_idx.shape[-1],
        chunk_size=1,
        head_dim=memory.shape[1],
        num_slots=memory.shape[0],
    )


class _Admitted(NamedTuple):
    """What every CUDA call of these shapes, dtypes and devices does, once they have passed the check."""

    launch: Callable[..., None]
    dispatch: Dispatch

    def run(self, *inputs: Tensor) -> Tensor:
        """inputs: all contiguous."""
        memory, v = inputs[0], inputs[3]
        readings = _empty_decode_step_output(memory, v)
        self.launch(*inputs, readings, repeat_count(memory.device))
        dispatch, situation = self.dispatch, situation_on_cuda()
        record("decode", dispatch if dispatch.situation is situation else replace(dispatch, situation=situation))
        return readings

    def run_any(self, *inputs: Tensor) -> Tensor:
        """Equivalent code: `run`, of contiguous inputs."""
        return self.run(*map(Tensor.contiguous, inputs))


_admitted: dict[Hashable, _Admitted] = {}
_lock = threading.Lock()  # over what is added to and dropped from it


def _admit(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> _Admitted:
    """What such a call does; checks it if no call of this signature has been."""
    signature = (
        memory.shape, k_idx.shape, k_val.shape, v.shape, beta.shape, g.shape, q_idx.shape, q_val.shape,
        memory.dtype, k_idx.dtype, k_val.dtype, v.dtype, beta.dtype, g.dtype, q_idx.dtype, q_val.dtype,
        memory.get_device(), k_idx.get_device(), k_val.get_device(), v.get_device(),
        beta.get_device(), g.get_device(), q_idx.get_device(), q_val.get_device(),
    )  # fmt: skip
    admitted = _admitted.get(signature)
    if admitted is not None:
        check_contiguous_bank(memory)
        return admitted

    from .bound import CallsOfOneSignature  # Triton is not installed everywhere
    from .decode_kernels import DecodeConfig, decode_step_call

    _check_decode_step(memory, k_idx, k_val, v, beta, g, q_idx, q_val)
    dispatch = token_dispatch("triton", memory, k_idx, q_idx)
    config = DecodeConfig.from_shapes(
        dispatch.streams, dispatch.writes, dispatch.reads, dispatch.head_dim, memory.element_size()
    )
    launch = CallsOfOneSignature(partial(decode_step_call, config)).launch
    with _lock:
        if len(_admitted) >= MAX_ADMITTED:
            _admitted.clear()
        return _admitted.setdefault(signature, _Admitted(launch, dispatch))


def _decode_step_cuda(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> Tensor:
    inputs = (memory, k_idx, k_val, v, beta, g, q_idx, q_val)
    return _admit(*inputs).run_any(*inputs)


def _decode_step_again(*inputs: Tensor) -> Callable[..., Tensor] | None:
    """What does the work of a call like one that has been made, on CUDA."""
    if not inputs[0].is_cuda:
        return None
    admitted = _admit(*inputs)
    return admitted.run if all(map(Tensor.is_contiguous, inputs)) else admitted.run_any


def _decode_step_fake(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> Tensor:
    _check_decode_step(memory, k_idx, k_val, v, beta, g, q_idx, q_val)
    return _empty_decode_step_output(memory, v)


decode_step_op = register(
    f"decode_step_({_INPUTS}) -> Tensor",
    cpu=_decode_step_cpu,
    cuda=_decode_step_cuda,
    fake=_decode_step_fake,
    again=_decode_step_again,
)


def sdm_decode_step(
    memory: Tensor, k_idx: Tensor, k_val: Tensor, v: Tensor, beta: Tensor, g: Tensor, q_idx: Tensor, q_val: Tensor
) -> Tensor:
    """Writes and reads one token per stream, advancing `memory` in place.

    Args:
        memory: [num_slots, D] contiguous, bfloat16 or float32 (float64 on the CPU).
        k_idx: [..., W] int32 or int64 bank rows, distinct within a token and over streams; negative means no slot.
        k_val: [..., W] write weights. v: [..., D] values. beta: [..., 1] write strengths.
        g: [..., 1 or W] log-decay; -inf erases.
        q_idx, q_val: [..., R] bank rows to read, and weights. W and R are 1 to 256.
    Returns:
        readings: [..., D], the bank's dtype, fresh memory.
    Raises:
        ValueError: shapes disagree, or the bank is not contiguous. UnsupportedConfigurationError: dtype or width.
        IndexError: an id at or above num_slots (CPU). RuntimeError: grad mode is on and an input requires a gradient.
        Nothing has been written then.
    Note: mutates `memory` alone; SPEC section 1. An eager CUDA call like an earlier one passes the dispatcher by unless
    something observes, see `known_calls.unobserved`.
    """
    return decode_step_op(memory, k_idx, k_val, v, beta, g, q_idx, q_val)
