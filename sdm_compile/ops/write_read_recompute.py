"""The write/read for long sequences: training keeps the bank itself before every so many steps, and no rows.

Ops: `write_read_recompute` and its backward. The backward takes one segment of steps after the other, the last first:
it runs the segment again from the bank before it, this time saving every row, and then that forward's backward.
Gradients are those of `snapshot_quant="none"`. SPEC section 4.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from .checks import check_devices, check_dtype, check_shape
from .dispatch import record_for, thread_records
from .layout import empty, num_steps, wanted_gradients
from .registry import register
from .snapshot import RECOMPUTE, check_rows
from .write_read_ops import (
    INPUTS,
    bank_gradient,
    check_write_read,
    empty_call_gradients,
    input_gradients,
    only_wanted,
    plan_call,
    record_call,
)
from .write_read_routes import CPU, CUDA, Inputs, Route, empty_bank, empty_readings


def segments(num_slots: int, k_idx: Tensor, chunk_size: int) -> int:
    """How many segments a call is cut into: a power of two, so that few sequence lengths need a graph of their own, and
    of those the one with the fewest rows in a bank per segment and in one segment's snapshot."""
    streams, tokens, writes = k_idx.shape
    steps, count = num_steps(tokens, chunk_size), 1
    while count < steps and 2 * count * count * num_slots < steps * streams * chunk_size * writes:
        count *= 2
    return count


def _cut(inputs: Inputs, chunk_size: int, count: int) -> list[tuple[Tensor, ...]]:
    """The inputs [P, T, *] of each of `count` segments, of equally many steps; the last ones may have fewer or none."""
    length = num_steps(num_steps(inputs[0].shape[1], chunk_size), count) * chunk_size
    return [tuple(x[:, i * length : (i + 1) * length] for x in inputs) for i in range(count)]


def _empty_banks(memory: Tensor, inputs: Inputs, chunk_size: int) -> Tensor:
    streams, tokens, writes = inputs[0].shape
    count = segments(memory.shape[0], inputs[0], chunk_size)
    steps = num_steps(num_steps(tokens, chunk_size), count)
    check_rows(steps * streams * chunk_size * writes, memory.device)
    return empty((count, *memory.shape), memory)


def _write_read_recompute(on: Route, memory: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, chunk_size, _ = args
    check_write_read(memory, inputs, chunk_size)
    bank, readings = empty_bank(memory).copy_(memory), empty_readings(memory, inputs[0])
    banks, routes = _empty_banks(memory, inputs, chunk_size), []
    parts = _cut(inputs, chunk_size, len(banks))
    for kept, part, out in zip(banks, parts, _cut([readings], chunk_size, len(banks)), strict=True):
        kept.copy_(bank)
        found, route = on.forward(bank, part, chunk_size)
        routes.append(route)
        out[0].copy_(found)
    record_call(
        "forward", "write_read_recompute", bank, inputs, chunk_size, routes[0], plan_call(bank, True, RECOMPUTE)
    )
    return readings, bank, banks


def _write_read_recompute_fake(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, chunk_size, _ = args
    check_write_read(memory, inputs, chunk_size)
    return empty_readings(memory, inputs[0]), empty_bank(memory), _empty_banks(memory, inputs, chunk_size)


def _check_recompute_bwd(
    dreadings: Tensor | None, dfinal: Tensor | None, banks: Tensor, inputs: Inputs, chunk_size: int
) -> None:
    if banks.dim() != 3 or not len(banks):
        raise ValueError(f"banks has shape {tuple(banks.shape)}; expected [segments, num_slots, D]")
    memory = banks[0]
    check_write_read(memory, inputs, chunk_size, "banks")
    count = segments(memory.shape[0], inputs[0], chunk_size)
    check_shape("banks", banks, (count, *memory.shape), "[segments, num_slots, D]")
    for name, grad, shape in (("dreadings", dreadings, inputs[2].shape), ("dfinal", dfinal, memory.shape)):
        if grad is not None:
            check_shape(name, grad, shape, "[P, T, D]" if name == "dreadings" else "[num_slots, D]")
            check_dtype(name, grad, banks.dtype, "like banks")
    check_devices(banks=banks, dreadings=dreadings, dfinal=dfinal)


def _segment_backward(
    on: Route, dreadings: Tensor | None, dM: Tensor, start: Tensor, inputs: Inputs, chunk_size: int
) -> tuple[str, list[Tensor]]:
    """One segment from the bank before it: the route taken and the inputs' gradients. Its snapshot ends with it."""
    grads, plan = input_gradients(inputs), plan_call(start, saving=True)
    _, bank, saved, _ = on.save(start, inputs, chunk_size, "none", plan, count_repeats=False, final=False)
    return on.backward(dreadings, dM, bank, inputs, saved, chunk_size, "none", grads), grads


def _write_read_recompute_bwd(
    on: Route, dreadings: Tensor | None, dfinal: Tensor | None, banks: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    *inputs, chunk_size, grad_bank_fp32, mask = args
    _check_recompute_bwd(dreadings, dfinal, banks, inputs, chunk_size)
    (dM, fill), grads, count = bank_gradient(dfinal, banks[0], grad_bank_fp32), input_gradients(inputs), len(banks)
    fill()  # here, as segments may be empty
    parts, grads_of_parts = _cut(inputs, chunk_size, count), _cut(grads, chunk_size, count)
    of_readings = [None] * count if dreadings is None else [x for (x,) in _cut([dreadings], chunk_size, count)]
    route = ""
    for i in reversed(range(count)):
        route, made = _segment_backward(on, of_readings[i], dM, banks[i], parts[i], chunk_size)
        for grad, x in zip(grads_of_parts[i], made, strict=True):
            grad.copy_(x)
    record_call("backward", "write_read_recompute_bwd", dM, inputs, chunk_size, route, plan_call(dM, True, RECOMPUTE))
    return only_wanted((dM.to(banks.dtype), *grads), mask)


def _write_read_recompute_bwd_fake(
    dreadings: Tensor | None, dfinal: Tensor | None, banks: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    *inputs, chunk_size, _, mask = args
    _check_recompute_bwd(dreadings, dfinal, banks, inputs, chunk_size)
    return empty_call_gradients(banks[0], inputs, mask)


write_read_recompute_bwd_op = register(
    f"write_read_recompute_bwd(Tensor? dreadings, Tensor? dfinal, Tensor banks, {INPUTS}, int chunk_size, "
    "bool grad_bank_fp32, bool[] mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=partial(_write_read_recompute_bwd, CPU),
    cuda=partial(_write_read_recompute_bwd, CUDA),
    fake=_write_read_recompute_bwd_fake,
)


def _setup_recompute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2], *inputs[1:8])
    ctx.settings, ctx.records = inputs[8:], thread_records()
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _recompute_backward(ctx: Any, dreadings: Tensor | None, dfinal: Tensor | None, _: None) -> tuple[Any, ...]:
    if dreadings is None and dfinal is None:
        return (None,) * 10
    mask = [ctx.needs_input_grad[i] for i in (0, 2, 3, 4, 5, 7)]
    grads = write_read_recompute_bwd_op(dreadings, dfinal, *ctx.saved_tensors, *ctx.settings, mask)
    record_for(ctx.records, "backward")
    dmemory, dk_val, dv, dbeta, dg, dq_val = wanted_gradients(grads, mask)
    return dmemory, None, dk_val, dv, dbeta, dg, None, dq_val, None, None


write_read_recompute_op = register(
    f"write_read_recompute(Tensor memory, {INPUTS}, int chunk_size, bool grad_bank_fp32) -> (Tensor, Tensor, Tensor)",
    cpu=partial(_write_read_recompute, CPU),
    cuda=partial(_write_read_recompute, CUDA),
    fake=_write_read_recompute_fake,
    setup_context=_setup_recompute,
    backward=_recompute_backward,
)
