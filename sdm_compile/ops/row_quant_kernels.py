"""Triton kernels of the snapshot's row formats: rows [n, D] to a mode's payload and scales, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall
from .snapshot import SCALED_MODES
from .snapshot_tiles import (
    addressable,
    convert,
    load_quantized,
    load_tile,
    magnitude,
    row_scale,
    store_quantized,
    store_tile,
)


@triton.jit
def _quantize_kernel(
    p_rows,
    p_payload,
    p_scales,
    n,
    D,
    DP,
    MODE: tl.constexpr,
    TOP: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """R rows, B columns after B columns. TOP: the mode's largest code, None without scales."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    m_rows = rows < n
    first = load_tile(p_rows, rows, m_rows, 0, D, B)
    scale = None
    if TOP is not None:
        largest = magnitude(convert(first, tl.float32))
        for start in range(B, D, B):
            x = load_tile(p_rows, rows, m_rows, start, D, B)
            largest = tl.maximum(largest, magnitude(convert(x, tl.float32)))
        scale = row_scale(largest, TOP)
        tl.store(p_scales + rows, scale, mask=m_rows)
    store_quantized(p_payload, rows, m_rows, 0, first, scale, D, DP, MODE)
    for start in range(B, D, B):
        x = load_tile(p_rows, rows, m_rows, start, D, B)
        store_quantized(p_payload, rows, m_rows, start, x, scale, D, DP, MODE)


@triton.jit
def _dequantize_kernel(
    p_payload,
    p_scales,
    p_rows,
    n,
    D,
    DP,
    MODE: tl.constexpr,
    TOP: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """B columns of R rows."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    m_rows = rows < n
    start = tl.program_id(1) * B
    scale = None
    if TOP is not None:
        scale = tl.load(p_scales + rows, mask=m_rows, other=0.0)
    x = load_quantized(p_payload, rows, m_rows, start, scale, DP, B, MODE)
    store_tile(p_rows, rows, m_rows, start, convert(x, p_rows.dtype.element_ty), D)


@dataclass(frozen=True)
class RowQuantConfig:
    """Launch shape. Int4 rows of one column are launched as rows of two, the second one zero: on an H200, Triton 3.6
    gives wrong codes at one column, for a reason not found, and right ones from two on."""

    rows: int
    columns: int
    warps: int

    @staticmethod
    def from_shapes(width: int) -> RowQuantConfig:
        columns = min(1024, max(16, triton.next_power_of_2(width)))
        return RowQuantConfig(rows=2048 // columns, columns=columns, warps=4)

    def options(self, mode: str) -> dict[str, Any]:
        """Constants and options of a launch for rows in `mode`'s form."""
        top = SCALED_MODES.get(mode)
        return dict(MODE=mode, TOP=top, R=self.rows, B=self.columns, num_warps=self.warps, enable_fp_fusion=False)


def launch_quantize(
    rows: Tensor, payload: Tensor, scales: Tensor, mode: str, config: RowQuantConfig | None = None
) -> None:
    """Fills payload and scales, in `mode`'s form, from rows [n, D]; all contiguous. The config reaches no bit."""
    if mode == "int4" and rows.shape[1] == 1:  # as two: see `RowQuantConfig`
        launch_quantize(torch.nn.functional.pad(rows, (0, 1)), payload, scales, mode, config)
        payload.bitwise_and_(15).bitwise_or_(8 << 4)  # beside NaN, the zero was not coded as one
        return
    n, width = rows.shape
    if not n:
        return
    config = config or RowQuantConfig.from_shapes(width)
    KernelCall(
        _quantize_kernel,
        (triton.cdiv(n, config.rows),),
        (rows, addressable(payload), scales, n, width, payload.shape[1]),
        config.options(mode),
    ).launch()


def launch_dequantize(
    payload: Tensor, scales: Tensor, rows: Tensor, mode: str, config: RowQuantConfig | None = None
) -> None:
    """Fills rows [n, D] from payload and scales in `mode`'s form; all contiguous. The config reaches no bit."""
    if mode == "int4" and rows.shape[1] == 1:  # as two: see `RowQuantConfig`
        pairs = rows.new_empty((rows.shape[0], 2))
        launch_dequantize(payload, scales, pairs, mode, config)
        rows.copy_(pairs[:, :1])
        return
    n, width = rows.shape
    if not rows.numel():
        return
    config = config or RowQuantConfig.from_shapes(width)
    KernelCall(
        _dequantize_kernel,
        (triton.cdiv(n, config.rows), triton.cdiv(width, config.columns)),
        (addressable(payload), scales, rows, n, width, payload.shape[1]),
        config.options(mode),
    ).launch()
