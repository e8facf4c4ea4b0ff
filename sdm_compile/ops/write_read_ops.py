"""The write/read's ops, each one node of a graph however long the sequence: `write_read` (functional, saves nothing),
`write_read_saving` (the same values, saves what its backward reads), `write_read_bwd`, and `write_read_` (in place, for
inference). `write_read` chooses between them; SPEC sections 1 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .checks import (
    accumulate_dtype,
    check_chunk_size,
    check_contiguous_bank,
    check_devices,
    check_dtype,
    check_like,
    check_shape,
    check_token_inputs,
)
from .dispatch import Dispatch, record, record_for, thread_records
from .layout import empty, empty_gradients, num_steps, wanted_gradients
from .registry import register
from .saved import Saved, empty_saved
from .situation import current_situation
from .snapshot import (
    SnapshotPlan,
    check_mode,
    check_rows,
    keeps_versions,
    plan_snapshot,
)
from .working_memory import Fill
from .write_read_routes import CPU, CUDA, Inputs, Route, empty_bank, empty_readings

INPUTS = "Tensor k_idx, Tensor k_val, Tensor v, Tensor beta, Tensor g, Tensor q_idx, Tensor q_val"


def check_write_read(memory: Tensor, inputs: Inputs, chunk_size: int, bank: str = "memory") -> None:
    """`bank` is the argument that `memory` is."""
    check_chunk_size(chunk_size)
    k_idx, k_val, v, beta, g, q_idx, q_val = inputs
    check_token_inputs(memory, k_idx, k_val, v, beta, g, q_idx, q_val, bank=bank)


def _check_saving(memory: Tensor, k_idx: Tensor, chunk_size: int, mode: str) -> None:
    """A backward can follow a call that saves rows in this mode."""
    check_mode("snapshot_quant", mode, memory.dtype)
    streams, tokens, writes = k_idx.shape
    check_rows(num_steps(tokens, chunk_size) * streams * chunk_size * writes, memory.device)


def plan_call(bank: Tensor, saving: bool, mode: str = "none") -> SnapshotPlan:
    """What a call keeps that runs now, on a bank like this one."""
    return plan_snapshot(saving, mode, current_situation(bank.device), keeps_versions(bank, mode))


def record_call(
    kind: str, op: str, bank: Tensor, inputs: Inputs, chunk_size: int, route: str, plan: SnapshotPlan
) -> None:
    """Keeps what a forward or backward call decided, for `last_dispatch`."""
    streams, tokens, writes = inputs[0].shape
    record(
        kind,
        Dispatch(
            op=op,
            route=route,
            situation=current_situation(bank.device),
            layout=plan.layout,
            writer=plan.writer,
            steps=num_steps(tokens, chunk_size),
            streams=streams,
            tokens=tokens,
            writes=writes,
            reads=inputs[5].shape[2],
            chunk_size=chunk_size,
            head_dim=bank.shape[1],
            num_slots=bank.shape[0],
        ),
    )


def _write_read(on: Route, memory: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    bank = empty_bank(memory)
    readings, route = on.forward(bank, inputs, chunk_size, partial(bank.copy_, memory))
    record_call("forward", "write_read", bank, inputs, chunk_size, route, plan_call(bank, saving=False))
    return readings, bank


def _write_read_fake(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    return empty_readings(memory, inputs[0]), empty_bank(memory)


def _write_read_in_place(on: Route, memory: Tensor, *args: Any) -> Tensor:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    check_contiguous_bank(memory)
    readings, route = on.forward(memory, inputs, chunk_size)
    record_call("forward", "write_read_", memory, inputs, chunk_size, route, plan_call(memory, saving=False))
    return readings


def _write_read_in_place_fake(memory: Tensor, *args: Any) -> Tensor:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    check_contiguous_bank(memory)
    return empty_readings(memory, inputs[0])


def _write_read_saving(on: Route, memory: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *inputs, chunk_size, mode, _ = args
    check_write_read(memory, inputs, chunk_size)
    _check_saving(memory, inputs[0], chunk_size, mode)
    plan = plan_call(memory, True, mode)
    readings, bank, saved, route = on.save(memory, inputs, chunk_size, mode, plan)
    record_call("forward", "write_read_saving", bank, inputs, chunk_size, route, plan)
    return readings, bank, *saved


def _write_read_save_fake(memory: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *inputs, chunk_size, mode, _ = args
    check_write_read(memory, inputs, chunk_size)
    _check_saving(memory, inputs[0], chunk_size, mode)
    saved = empty_saved(memory, inputs[0], inputs[5], chunk_size, mode, keeps_versions(memory, mode))
    return empty_readings(memory, inputs[0]), empty_bank(memory), *saved


def _check_write_read_bwd(
    dreadings: Tensor | None,
    dfinal: Tensor | None,
    bank: Tensor,
    inputs: Inputs,
    saved: Saved,
    chunk_size: int,
    mode: str,
) -> None:
    check_write_read(bank, inputs, chunk_size, "bank")
    check_mode("snapshot_quant", mode, bank.dtype)
    k_idx, _, v, _, _, q_idx, _ = inputs
    if dreadings is not None:
        check_shape("dreadings", dreadings, v.shape, "[P, T, D]")
        check_dtype("dreadings", dreadings, bank.dtype, "like bank")
    if dfinal is not None:
        check_like("dfinal", dfinal, "bank", bank)
    like, versions = bank.new_empty(bank.shape, device="meta"), keeps_versions(bank, mode)
    form = empty_saved(like, k_idx, q_idx, chunk_size, mode, versions)
    for name, tensor in saved._asdict().items():
        check_shape(name, tensor, getattr(form, name).shape, "the shape that write_read_saving returned")
        check_dtype(name, tensor, getattr(form, name).dtype, "from write_read_saving")
    check_devices(bank=bank, dreadings=dreadings, dfinal=dfinal, **saved._asdict())


def empty_call_gradients(bank: Tensor, inputs: Inputs, mask: list[bool]) -> tuple[Tensor, ...]:
    _, k_val, v, beta, g, _, q_val = inputs
    return empty_gradients((bank, k_val, v, beta, g, q_val), mask)


def bank_gradient(dfinal: Tensor | None, like: Tensor, grad_bank_fp32: bool) -> tuple[Tensor, Fill]:
    """Where a backward accumulates the gradient of a bank like `like`, and what fills it: with `dfinal`, or zeros."""
    dM = empty(tuple(like.shape), like, accumulate_dtype(like.dtype) if grad_bank_fp32 else like.dtype)
    return dM, dM.zero_ if dfinal is None else partial(dM.copy_, dfinal)


def input_gradients(inputs: Inputs) -> list[Tensor]:
    """Fresh memory for the gradients of k_val, v, beta, g and q_val."""
    _, *floats, _, q_val = inputs
    return [empty(tuple(x.shape), x) for x in (*floats, q_val)]


def only_wanted(grads: Sequence[Tensor], mask: Sequence[bool]) -> tuple[Tensor, ...]:
    """A backward op's outputs: of what is not wanted, an empty tensor."""
    return tuple(grad if wanted else grad.new_empty(0) for grad, wanted in zip(grads, mask, strict=True))


def _write_read_bwd(
    on: Route, dreadings: Tensor | None, dfinal: Tensor | None, bank: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    inputs, saved = args[:7], Saved(*args[7:-4])
    chunk_size, mode, grad_bank_fp32, mask = args[-4:]
    _check_write_read_bwd(dreadings, dfinal, bank, inputs, saved, chunk_size, mode)
    (dM, fill), grads = bank_gradient(dfinal, bank, grad_bank_fp32), input_gradients(inputs)
    route = on.backward(dreadings, dM, bank, inputs, saved, chunk_size, mode, grads, fill)
    plan = plan_call(bank, True, mode)
    record_call("backward", "write_read_bwd", bank, inputs, chunk_size, route, plan)
    return only_wanted((dM.to(bank.dtype), *grads), mask)


def _write_read_bwd_fake(
    dreadings: Tensor | None, dfinal: Tensor | None, bank: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    inputs, saved = args[:7], Saved(*args[7:-4])
    chunk_size, mode, _, mask = args[-4:]
    _check_write_read_bwd(dreadings, dfinal, bank, inputs, saved, chunk_size, mode)
    return empty_call_gradients(bank, inputs, mask)


write_read_bwd_op = register(
    f"write_read_bwd(Tensor? dreadings, Tensor? dfinal, Tensor bank, {INPUTS}, "
    f"{', '.join(f'Tensor {name}' for name in Saved._fields)}, "
    "int chunk_size, str snapshot_quant, bool grad_bank_fp32, bool[] mask)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=partial(_write_read_bwd, CPU),
    cuda=partial(_write_read_bwd, CUDA),
    fake=_write_read_bwd_fake,
)


def bank_to_keep(memory: Tensor, final: Tensor, saved: Saved) -> Tensor:
    """Where a backward finds rows that are no part of the snapshot: in the final bank, or, where it holds versions, in
    the one before the call."""
    return memory if saved.has_versions else final


def _setup_write_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    bank = bank_to_keep(inputs[0], output[1], Saved(*output[2:]))
    ctx.save_for_backward(bank, *inputs[1:8], *output[2:])
    ctx.settings, ctx.records = inputs[8:], thread_records()
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _write_read_backward(ctx: Any, dreadings: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Any, ...]:
    if dreadings is None and dfinal is None:
        return (None,) * 11
    mask = [ctx.needs_input_grad[i] for i in (0, 2, 3, 4, 5, 7)]
    grads = write_read_bwd_op(dreadings, dfinal, *ctx.saved_tensors, *ctx.settings, mask)
    record_for(ctx.records, "backward")
    dmemory, dk_val, dv, dbeta, dg, dq_val = wanted_gradients(grads, mask)
    return dmemory, None, dk_val, dv, dbeta, dg, None, dq_val, None, None, None


write_read_op = register(
    f"write_read(Tensor memory, {INPUTS}, int chunk_size) -> (Tensor, Tensor)",
    cpu=partial(_write_read, CPU),
    cuda=partial(_write_read, CUDA),
    fake=_write_read_fake,
)

write_read_save_op = register(
    f"write_read_saving(Tensor memory, {INPUTS}, int chunk_size, str snapshot_quant, bool grad_bank_fp32)"
    f" -> ({', '.join(['Tensor'] * (2 + len(Saved._fields)))})",
    cpu=partial(_write_read_saving, CPU),
    cuda=partial(_write_read_saving, CUDA),
    fake=_write_read_save_fake,
    setup_context=_setup_write_read,
    backward=_write_read_backward,
)

write_read_in_place_op = register(
    f"write_read_(Tensor(a!) memory, {INPUTS}, int chunk_size) -> Tensor",
    cpu=partial(_write_read_in_place, CPU),
    cuda=partial(_write_read_in_place, CUDA),
    fake=_write_read_in_place_fake,
)
