"""The write/read's ops, each one node of a graph however long the sequence: `write_read` (functional, saves nothing),
`write_read_save` (the same values, saves what its backward reads), `write_read_bwd`, and `write_read_` (in place, for
inference). `write_read` chooses between them; SPEC sections 1 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import (
    UnsupportedConfigurationError,
    accumulate_dtype,
    check_chunk_size,
    check_contiguous_bank,
    check_devices,
    check_dtype,
    check_like,
    check_shape,
    check_token_inputs,
)
from .decay_write import decay_write_
from .dispatch import Dispatch, record
from .layout import ChunkFields, StepGroups, empty, empty_gradients, num_steps, wanted_gradients
from .registry import register
from .situation import current_situation
from .snapshot import SnapshotPlan, check_mode, empty_snapshot, plan_snapshot
from .staging import stage_inputs, unstage_readings
from .step_loop import Coupled, couple, run_steps
from .write_read_bwd import Saved, write_read_backward_cpu

INPUTS = "Tensor k_idx, Tensor k_val, Tensor v, Tensor beta, Tensor g, Tensor q_idx, Tensor q_val"
Inputs = Sequence[Tensor]
"""k_idx, k_val, v, beta, g, q_idx, q_val."""


def check_write_read(memory: Tensor, inputs: Inputs, chunk_size: int, bank: str = "memory") -> None:
    """`bank` is the argument that `memory` is."""
    check_chunk_size(chunk_size)
    k_idx, k_val, v, beta, g, q_idx, q_val = inputs
    check_token_inputs(memory, k_idx, k_val, v, beta, g, q_idx, q_val, bank=bank)


def empty_bank(memory: Tensor) -> Tensor:
    return empty(tuple(memory.shape), memory)


def empty_readings(memory: Tensor, k_idx: Tensor) -> Tensor:
    return empty((*k_idx.shape[:2], memory.shape[1]), memory)


def _empty_call_snapshot(memory: Tensor, k_idx: Tensor, chunk_size: int, mode: str) -> tuple[Tensor, Tensor]:
    streams, tokens, writes = k_idx.shape
    return empty_snapshot(num_steps(tokens, chunk_size) * streams * chunk_size * writes, memory, mode)


def empty_saved(memory: Tensor, k_idx: Tensor, q_idx: Tensor, chunk_size: int, mode: str) -> Saved:
    streams, tokens, writes = k_idx.shape
    chunks = num_steps(tokens, chunk_size) * streams
    dtype = accumulate_dtype(memory.dtype)
    snapshot, scales = _empty_call_snapshot(memory, k_idx, chunk_size, mode)

    def per_token(width: int) -> Tensor:
        return empty((chunks * chunk_size, width), memory, dtype)

    def per_entry(dtype: torch.dtype = torch.int32, more: int = 0) -> Tensor:
        return empty((chunks * (chunk_size * writes + more),), memory, dtype)

    return Saved(
        retrieved=per_token(memory.shape[1]),
        snapshot=snapshot,
        scales=scales,
        X=per_token(chunk_size),
        QX=per_token(chunk_size),
        k_eff=per_token(writes),
        q_w=per_token(q_idx.shape[2]),
        write_w=per_token(writes),
        A=per_token(chunk_size),
        group_decay=per_entry(dtype),
        order=per_entry(),
        group_start=per_entry(more=1),
        group_slot=per_entry(),
    )


def _saved(retrieved: Tensor, snapshot: Tensor, scales: Tensor, X: Tensor, QX: Tensor, fields: ChunkFields) -> Saved:
    kept = {name: getattr(fields, name) for name in Saved._fields if name in ChunkFields._fields}
    return Saved(retrieved, snapshot, scales, X, QX, **kept).flattened()


def record_call(
    kind: str, op: str, memory: Tensor, inputs: Inputs, chunk_size: int, plan: SnapshotPlan, route: str
) -> None:
    streams, tokens, writes = inputs[0].shape
    record(
        kind,
        Dispatch(
            op=op,
            route=route,
            situation=current_situation(memory.device),
            layout=plan.layout,
            writer=plan.writer,
            steps=num_steps(tokens, chunk_size),
            streams=streams,
            tokens=tokens,
            writes=writes,
            reads=inputs[5].shape[2],
            chunk_size=chunk_size,
            head_dim=memory.shape[1],
            num_slots=memory.shape[0],
        ),
    )


def record_backward(op: str, bank: Tensor, inputs: Inputs, chunk_size: int, mode: str, route: str = "cpu") -> None:
    plan = plan_snapshot(True, mode, current_situation(bank.device))
    record_call("backward", op, bank, inputs, chunk_size, plan, route)


def record_forward(
    op: str, bank: Tensor, inputs: Inputs, chunk_size: int, saving: bool, mode: str = "none", route: str = "cpu"
) -> None:
    plan = plan_snapshot(saving, mode, current_situation(bank.device))
    record_call("forward", op, bank, inputs, chunk_size, plan, route)


def forward_cpu(
    bank: Tensor,
    inputs: Inputs,
    chunk_size: int,
    snapshot: tuple[Tensor, Tensor] | None = None,
    mode: str = "none",
    count_repeats: bool = True,
) -> tuple[Tensor, Tensor, Coupled]:
    """Advances `bank` over all steps: readings [P, T, D], the retrieved rows, and what Phase 1 and the solve made."""
    plan = plan_snapshot(snapshot is not None, mode, current_situation(bank.device))
    if plan.writer not in (None, "write"):
        raise UnsupportedConfigurationError(
            f"the {plan.writer} stage would store this call's snapshot, which it does not do on {bank.device.type}; "
            "call without a gradient, or outside a graph capture"
        )
    staged = stage_inputs(
        *inputs, num_slots=bank.shape[0], dtype=bank.dtype, chunk_size=chunk_size, count_repeats=count_repeats
    )
    coupled = couple(staged)
    rows_per_step = coupled.fields.group_slot[:1].numel()

    def write(step: int, bank: Tensor, delta: Tensor, groups: StepGroups) -> Tensor:
        rows = slice(step * rows_per_step, (step + 1) * rows_per_step)
        payload, scales = (None, None) if snapshot is None else (snapshot[0][rows], snapshot[1][rows])
        decay_write_(bank, delta, *groups, snapshot=payload, scales=scales, snapshot_quant=mode)
        return bank

    _, readings, retrieved = run_steps(bank, staged, coupled, write)
    return unstage_readings(readings, inputs[0].shape[1]), retrieved, coupled


def save_cpu(
    bank: Tensor, inputs: Inputs, chunk_size: int, mode: str, count_repeats: bool = True
) -> tuple[Tensor, Saved]:
    """`forward_cpu` that keeps what a backward needs: readings, and that, flattened."""
    snapshot = _empty_call_snapshot(bank, inputs[0], chunk_size, mode)
    for tensor in snapshot:
        tensor.zero_()  # rows of unused groups are outputs too, and every output is reproducible
    readings, retrieved, coupled = forward_cpu(bank, inputs, chunk_size, snapshot, mode, count_repeats)
    return readings, _saved(retrieved, *snapshot, coupled.X, coupled.QX, coupled.fields)


def _write_read_cpu(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    bank = empty_bank(memory).copy_(memory)
    readings, _, _ = forward_cpu(bank, inputs, chunk_size)
    record_forward("write_read", bank, inputs, chunk_size, saving=False)
    return readings, bank


def _write_read_cuda(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    bank = empty_bank(memory).copy_(memory)
    return _advance_cuda("write_read", bank, inputs, chunk_size), bank


def _advance_cuda(op: str, bank: Tensor, inputs: Inputs, chunk_size: int) -> Tensor:
    """Advances `bank` over all steps; returns the readings [P, T, D]."""
    from .write_read_cuda import write_read_cuda

    readings = empty_readings(bank, inputs[0])
    route = write_read_cuda(bank, inputs, chunk_size, readings)
    record_forward(op, bank, inputs, chunk_size, saving=False, route=route)
    return readings


def _write_read_fake(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    return empty_readings(memory, inputs[0]), empty_bank(memory)


def _write_read_in_place_cpu(memory: Tensor, *args: Any) -> Tensor:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    check_contiguous_bank(memory)
    readings, _, _ = forward_cpu(memory, inputs, chunk_size)
    record_forward("write_read_", memory, inputs, chunk_size, saving=False)
    return readings


def _write_read_in_place_cuda(memory: Tensor, *args: Any) -> Tensor:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    check_contiguous_bank(memory)
    return _advance_cuda("write_read_", memory, inputs, chunk_size)


def _write_read_in_place_fake(memory: Tensor, *args: Any) -> Tensor:
    *inputs, chunk_size = args
    check_write_read(memory, inputs, chunk_size)
    check_contiguous_bank(memory)
    return empty_readings(memory, inputs[0])


def _write_read_save_cpu(memory: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *inputs, chunk_size, mode, _ = args
    check_write_read(memory, inputs, chunk_size)
    check_mode("snapshot_quant", mode, memory.dtype)
    bank = empty_bank(memory).copy_(memory)
    readings, saved = save_cpu(bank, inputs, chunk_size, mode)
    record_forward("write_read_save", bank, inputs, chunk_size, saving=True, mode=mode)
    return readings, bank, *saved


def _write_read_save_fake(memory: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *inputs, chunk_size, mode, _ = args
    check_write_read(memory, inputs, chunk_size)
    check_mode("snapshot_quant", mode, memory.dtype)
    saved = empty_saved(memory, inputs[0], inputs[5], chunk_size, mode)
    return empty_readings(memory, inputs[0]), empty_bank(memory), *saved


def _check_write_read_bwd(
    dreadings: Tensor | None,
    dfinal: Tensor | None,
    final_memory: Tensor,
    inputs: Inputs,
    saved: Saved,
    chunk_size: int,
    mode: str,
) -> None:
    check_write_read(final_memory, inputs, chunk_size, "final_memory")
    check_mode("snapshot_quant", mode, final_memory.dtype)
    k_idx, _, v, _, _, q_idx, _ = inputs
    if dreadings is not None:
        check_shape("dreadings", dreadings, v.shape, "[P, T, D]")
        check_dtype("dreadings", dreadings, final_memory.dtype, "like final_memory")
    if dfinal is not None:
        check_like("dfinal", dfinal, "final_memory", final_memory)
    form = empty_saved(final_memory.new_empty(final_memory.shape, device="meta"), k_idx, q_idx, chunk_size, mode)
    for name, tensor in saved._asdict().items():
        check_shape(name, tensor, getattr(form, name).shape, "the shape that write_read_save returned")
        check_dtype(name, tensor, getattr(form, name).dtype, "from write_read_save")
    check_devices(final_memory=final_memory, dreadings=dreadings, dfinal=dfinal, **saved._asdict())


def empty_call_gradients(final_memory: Tensor, inputs: Inputs, mask: list[bool]) -> tuple[Tensor, ...]:
    _, k_val, v, beta, g, _, q_val = inputs
    return empty_gradients((final_memory, k_val, v, beta, g, q_val), mask)


def bank_gradient(dfinal: Tensor | None, like: Tensor, grad_bank_fp32: bool) -> Tensor:
    """Where a backward accumulates the gradient of a bank like `like`: `dfinal`, or zeros."""
    dM = empty(tuple(like.shape), like, accumulate_dtype(like.dtype) if grad_bank_fp32 else like.dtype)
    return dM.zero_() if dfinal is None else dM.copy_(dfinal)


def backward_cpu(
    dreadings: Tensor | None,
    dM: Tensor,
    final_memory: Tensor,
    inputs: Inputs,
    saved: Saved,
    chunk_size: int,
    mode: str,
) -> tuple[Tensor, ...]:
    """Gradients of k_val, v, beta, g and q_val; `dM`, the final bank's, becomes that of the bank before, in place."""
    staged = stage_inputs(
        *inputs, num_slots=final_memory.shape[0], dtype=final_memory.dtype, chunk_size=chunk_size, count_repeats=False
    )
    saved = saved._replace(snapshot=saved.snapshot.contiguous()).unflattened(*staged.k_idx.shape)
    return write_read_backward_cpu(dreadings, dM, final_memory, inputs, staged, saved, chunk_size, mode)


def _write_read_bwd_cpu(
    dreadings: Tensor | None, dfinal: Tensor | None, final_memory: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    inputs, saved = args[:7], Saved(*args[7:-4])
    chunk_size, mode, grad_bank_fp32, mask = args[-4:]
    _check_write_read_bwd(dreadings, dfinal, final_memory, inputs, saved, chunk_size, mode)
    outs = empty_call_gradients(final_memory, inputs, mask)
    dM = bank_gradient(dfinal, final_memory, grad_bank_fp32)
    grads = backward_cpu(dreadings, dM, final_memory, inputs, saved, chunk_size, mode)
    record_backward("write_read_bwd", final_memory, inputs, chunk_size, mode)
    return tuple(out.copy_(grad) if wanted else out for out, grad, wanted in zip(outs, (dM, *grads), mask, strict=True))


def _write_read_bwd_fake(
    dreadings: Tensor | None, dfinal: Tensor | None, final_memory: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    inputs, saved = args[:7], Saved(*args[7:-4])
    chunk_size, mode, _, mask = args[-4:]
    _check_write_read_bwd(dreadings, dfinal, final_memory, inputs, saved, chunk_size, mode)
    return empty_call_gradients(final_memory, inputs, mask)


write_read_bwd_op = register(
    f"write_read_bwd(Tensor? dreadings, Tensor? dfinal, Tensor final_memory, {INPUTS}, "
    f"{', '.join(f'Tensor {name}' for name in Saved._fields)}, "
    "int chunk_size, str snapshot_quant, bool grad_bank_fp32, bool[] mask)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_write_read_bwd_cpu,
    fake=_write_read_bwd_fake,
)


def _setup_write_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], *inputs[1:8], *output[2:])
    ctx.settings = inputs[8:]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _write_read_backward(ctx: Any, dreadings: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Any, ...]:
    if dreadings is None and dfinal is None:
        return (None,) * 11
    mask = [ctx.needs_input_grad[i] for i in (0, 2, 3, 4, 5, 7)]
    grads = write_read_bwd_op(dreadings, dfinal, *ctx.saved_tensors, *ctx.settings, mask)
    dmemory, dk_val, dv, dbeta, dg, dq_val = wanted_gradients(grads, mask)
    return dmemory, None, dk_val, dv, dbeta, dg, None, dq_val, None, None, None


write_read_op = register(
    f"write_read(Tensor memory, {INPUTS}, int chunk_size) -> (Tensor, Tensor)",
    cpu=_write_read_cpu,
    cuda=_write_read_cuda,
    fake=_write_read_fake,
)

write_read_save_op = register(
    f"write_read_save(Tensor memory, {INPUTS}, int chunk_size, str snapshot_quant, bool grad_bank_fp32)"
    f" -> ({', '.join(['Tensor'] * (2 + len(Saved._fields)))})",
    cpu=_write_read_save_cpu,
    fake=_write_read_save_fake,
    setup_context=_setup_write_read,
    backward=_write_read_backward,
)

write_read_in_place_op = register(
    f"write_read_(Tensor(a!) memory, {INPUTS}, int chunk_size) -> Tensor",
    cpu=_write_read_in_place_cpu,
    cuda=_write_read_in_place_cuda,
    fake=_write_read_in_place_fake,
)
