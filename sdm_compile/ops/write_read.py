"""The write/read: T tokens of P streams written to and read from a bank, in chunks (SPEC sections 1 to 4).

The public functions choose between the ops of `write_read_ops` and `write_read_recompute`, each one node of a graph
however long the sequence; `trace_steps=True` runs the same loop over the stage ops instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import UnsupportedConfigurationError
from .decay_write import decay_write
from .layout import StepGroups
from .snapshot import CALL_MODES, RECOMPUTE, check_mode
from .staging import stage_inputs, unstage_readings
from .step_loop import couple, run_steps
from .write_read_ops import check_write_read, write_read_in_place_op, write_read_op, write_read_save_op
from .write_read_recompute import write_read_recompute_op
from .write_read_routes import Inputs


def _write_read_composite(
    memory: Tensor, inputs: Inputs, chunk_size: int, snapshot_quant: str, grad_bank_fp32: bool
) -> tuple[Tensor, Tensor]:
    """The whole loop as one op: one of the saving ones where a gradient is wanted."""
    check_mode("snapshot_quant", snapshot_quant, memory.dtype, CALL_MODES)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (memory, *inputs)):
        if snapshot_quant == RECOMPUTE:
            readings, final, _ = write_read_recompute_op(memory, *inputs, chunk_size, grad_bank_fp32)
            return readings, final
        readings, final, *_ = write_read_save_op(memory, *inputs, chunk_size, snapshot_quant, grad_bank_fp32)
        return readings, final
    return write_read_op(memory, *inputs, chunk_size)


def _write_read_traced(memory: Tensor, inputs: Inputs, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The step loop over the registered stage ops, in traceable Python."""
    check_write_read(memory, inputs, chunk_size)
    tokens = inputs[0].shape[1]
    if not tokens:  # no step, so no stage that would make the outputs depend on the inputs
        return _write_read_composite(memory, inputs, chunk_size, "none", False)
    staged = stage_inputs(*inputs, num_slots=memory.shape[0], dtype=memory.dtype, chunk_size=chunk_size)

    def write(step: int, bank: Tensor, delta: Tensor, groups: StepGroups) -> Tensor:
        return decay_write(bank, delta, *groups)

    bank, readings, _ = run_steps(memory, staged, couple(staged), write)
    return unstage_readings(readings, tokens), bank


def sdm_write_read(
    memory: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    *,
    chunk_size: int = 64,
    snapshot_quant: str = "none",
    grad_bank_fp32: bool = False,
    trace_steps: bool = False,
) -> tuple[Tensor, Tensor]:
    """Writes and reads T tokens of P streams. Equivalent code: `reference.write_read`, a loop over tokens.

    Args:
        memory: [num_slots, D] bank, bfloat16 or float32 (float64 on the CPU); left as it was.
        k_idx: [P, T, W] int32 or int64 bank rows, distinct within a token; no two streams share a row; negative means
            no slot.
        k_val: [P, T, W] write weights. v: [P, T, D] values. beta: [P, T, 1] write strengths.
        g: [P, T, 1] log-decay per token, or [P, T, W] per write; -inf erases.
        q_idx, q_val: [P, T, R] bank rows to read, and weights. W and R are 1 to 256.
        chunk_size: tokens per chunk, 1 to 256: speed, memory and rounding, not meaning.
        snapshot_quant: in which form a training call keeps rows for its backward: "none", "bf16", "fp8" or "int4",
            which change gradients by rounding, never a forward value; or "recompute": a few whole banks, from which the
            backward runs the forward again. Its gradients are those of "none"; a long sequence then needs far less
            memory.
        grad_bank_fp32: accumulate a bfloat16 bank's gradient in float32, rounded once at the end.
        trace_steps: run the step loop over the stage ops, so that a compiler sees every stage of every step as a node.
            Requires snapshot_quant="none" and grad_bank_fp32=False.
    Returns:
        readings: [P, T, D] and the final bank [num_slots, D], the bank's dtype, fresh memory, both differentiable with
        respect to every float input, in each one's own dtype.
    Raises:
        ValueError: shapes, devices or settings disagree. UnsupportedConfigurationError: a dtype, width or chunk size
        outside the supported range. IndexError: an id at or above num_slots (CPU).
    Note: no synchronisation on a GPU; forward-mode AD and double backward raise. A training call keeps
        `memory` (on a GPU) or the final bank for its backward: change neither in place before that has run. SPEC
        sections 1 to 4.
    """
    inputs = (k_idx, k_val, v, beta, g, q_idx, q_val)
    if trace_steps:
        if snapshot_quant != "none" or grad_bank_fp32:
            raise UnsupportedConfigurationError(
                "trace_steps=True keeps every step's bank as it is: "
                f"snapshot_quant is {snapshot_quant!r} and grad_bank_fp32 is {grad_bank_fp32}; "
                "use 'none' and False, or trace_steps=False"
            )
        return _write_read_traced(memory, inputs, chunk_size)
    return _write_read_composite(memory, inputs, chunk_size, snapshot_quant, grad_bank_fp32)


def sdm_write_read_(
    memory: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    *,
    chunk_size: int = 64,
) -> Tensor:
    """`sdm_write_read` for inference: advances `memory` in place and returns the readings alone.

    Args:
        memory: [num_slots, D], contiguous. The others as in `sdm_write_read`.
    Returns:
        readings: [P, T, D], the bank's dtype, fresh memory.
    Raises:
        As `sdm_write_read`; ValueError also for a bank that is not contiguous; RuntimeError where grad mode is on and a
        float input requires a gradient. Nothing has been written then.
    Note: mutates `memory` alone. SPEC sections 1 and 2.
    """
    return write_read_in_place_op(memory, k_idx, k_val, v, beta, g, q_idx, q_val, chunk_size)
