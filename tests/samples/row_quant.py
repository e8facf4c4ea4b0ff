"""Samples of the snapshot's row formats: bank rows, among them zeros, and what they become."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm_compile import reference
from tests.harness import OpCase, Sample

LOSSY_DTYPES = (torch.float32, torch.bfloat16)  # banks that can be stored with rounding
_SHAPES = {"ragged": (7, 5), "other sizes": (6, 8), "one": (1, 1), "no rows": (0, 5)}


def empty_rows(rows: int, bank: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Zeroed room for so many rows of a bank, in a mode's form: payload and scales."""
    width = bank.shape[1]
    shape, dtype = {
        "none": (width, bank.dtype),
        "bf16": (width, torch.bfloat16),
        "fp8": (width, torch.float8_e4m3fn),
        "int4": (-(-width // 2), torch.uint8),
    }[mode]
    return torch.zeros(rows, shape, dtype=dtype), torch.zeros(rows if mode in ("fp8", "int4") else 0)


def rows_of(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Rows of many magnitudes; the second one is zero."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64)
    rows *= 10.0 ** torch.randint(-4, 5, (shape[0], 1), generator=generator)
    rows[1:2] = 0
    return rows.to(dtype)


def _dequantize_args(shape: tuple[int, int], mode: str, dtype: torch.dtype) -> list[Any]:
    return [*reference.snapshot_quantize(rows_of(shape, dtype), mode), mode, shape[1], dtype]


def _samples(make: Any) -> list[Sample]:
    lossy = [(name, shape, mode) for mode in ("int4", "fp8", "bf16") for name, shape in _SHAPES.items()]
    return [
        *(
            Sample(f"{name}, {mode}", lambda dtype, s=shape, mode=mode: make(s, mode, dtype), LOSSY_DTYPES)
            for name, shape, mode in lossy
        ),
        *(
            Sample(f"{name}, none", lambda dtype, s=shape: make(s, "none", dtype))
            for name, shape in _SHAPES.items()
        ),
    ]


CASES = [
    OpCase(
        "snapshot_quantize",
        _samples(lambda shape, mode, dtype: [rows_of(shape, dtype), mode]),
        reference.snapshot_quantize,
    ),
    OpCase("snapshot_dequantize", _samples(_dequantize_args), reference.snapshot_dequantize),
]
