"""Quantizing snapshot rows: bank rows [n, D] to a snapshot mode's payload and scales, and back.

Ops: `snapshot_quantize` and `snapshot_dequantize`; the modes are `snapshot`'s. Neither has a derivative: they change
what a training call saves, never a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_devices, check_float, check_rank
from .layout import empty
from .registry import register
from .snapshot import check_mode, check_snapshot, dequantize_rows, empty_rows, empty_snapshot, quantize_rows


def _check_quantize(rows: Tensor, mode: str) -> None:
    check_rank("rows", rows, "[n, D]")
    check_float("rows", rows)
    check_mode("mode", mode, rows.dtype)


def _snapshot_quantize_cpu(rows: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    _check_quantize(rows, mode)
    return quantize_rows(rows, mode)


def _snapshot_quantize_cuda(rows: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    from .row_quant_kernels import launch_quantize

    _check_quantize(rows, mode)
    payload, scales = empty_snapshot(rows.shape[0], rows, mode)
    launch_quantize(rows.contiguous(), payload, scales, mode)
    return payload, scales


def _snapshot_quantize_fake(rows: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    _check_quantize(rows, mode)
    return empty_snapshot(rows.shape[0], rows, mode)


snapshot_quantize_op = register(
    "snapshot_quantize(Tensor rows, str mode) -> (Tensor, Tensor)",
    cpu=_snapshot_quantize_cpu,
    cuda=_snapshot_quantize_cuda,
    fake=_snapshot_quantize_fake,
)


def _check_dequantize(payload: Tensor, scales: Tensor, mode: str, width: int, dtype: torch.dtype) -> None:
    check_rank("payload", payload, "[n, D]")
    check_float("rows", empty((0,), payload, dtype))
    check_mode("mode", mode, dtype)
    check_snapshot("payload", payload, scales, payload.shape[0], empty((0, width), payload, dtype), mode)
    check_devices(payload=payload, scales=scales)


def _snapshot_dequantize_cpu(payload: Tensor, scales: Tensor, mode: str, width: int, dtype: torch.dtype) -> Tensor:
    _check_dequantize(payload, scales, mode, width, dtype)
    return dequantize_rows(payload, scales, mode, width, dtype)


def _snapshot_dequantize_cuda(payload: Tensor, scales: Tensor, mode: str, width: int, dtype: torch.dtype) -> Tensor:
    from .row_quant_kernels import launch_dequantize

    _check_dequantize(payload, scales, mode, width, dtype)
    rows = empty_rows(payload, width, dtype)
    launch_dequantize(payload.contiguous(), scales.contiguous(), rows, mode)
    return rows


def _snapshot_dequantize_fake(payload: Tensor, scales: Tensor, mode: str, width: int, dtype: torch.dtype) -> Tensor:
    _check_dequantize(payload, scales, mode, width, dtype)
    return empty_rows(payload, width, dtype)


snapshot_dequantize_op = register(
    "snapshot_dequantize(Tensor payload, Tensor scales, str mode, SymInt width, ScalarType dtype) -> Tensor",
    cpu=_snapshot_dequantize_cpu,
    cuda=_snapshot_dequantize_cuda,
    fake=_snapshot_dequantize_fake,
)


def snapshot_quantize(rows: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Bank rows as a snapshot mode stores them.

    Args:
        rows: [n, D] bfloat16 or float32 (float64 with "none").
        mode: "none", "bf16", "fp8" or "int4".
    Returns:
        payload: [n, D] in the mode's dtype ([n, ceil(D / 2)] uint8 for int4); scales: [n] float32, or [0].
    Raises:
        ValueError: an unknown mode. UnsupportedConfigurationError: float16, or a lossy mode on float64.
    Note: SPEC section 4. No derivative.
    """
    return snapshot_quantize_op(rows, mode)


def snapshot_dequantize(payload: Tensor, scales: Tensor, mode: str, width: int, dtype: torch.dtype) -> Tensor:
    """The rows [n, width] in `dtype` that a snapshot stands for: the inverse of `snapshot_quantize` up to rounding.

    Args:
        payload, scales: as `snapshot_quantize` returned them. width: D. dtype: the bank's.
    Returns:
        rows: [n, width], fresh memory.
    Raises:
        ValueError: payload or scales do not fit the mode and width.
    Note: SPEC section 4. No derivative.
    """
    return snapshot_dequantize_op(payload, scales, mode, width, dtype)
