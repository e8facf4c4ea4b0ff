"""The snapshot's row formats: their bytes, how far they may be off, and their edges."""

from __future__ import annotations

import pytest
import torch

from sdm_compile import UnsupportedConfigurationError
from sdm_compile.ops.row_quant import snapshot_dequantize, snapshot_quantize
from tests.harness import DTYPES, assert_same_bits

WIDE_RANGE = 10.0 ** torch.arange(-30, 31, 4)[:, None]  # magnitudes of rows


def rows(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(len(WIDE_RANGE), width, generator=torch.Generator().manual_seed(0)) * WIDE_RANGE).to(dtype)


def round_trip(x: torch.Tensor, mode: str) -> torch.Tensor:
    return snapshot_dequantize(*snapshot_quantize(x, mode), mode, x.shape[1], x.dtype)


@pytest.mark.parametrize("width", [1, 8, 33])
def test_int4_is_off_by_half_a_code_at_most(width: int) -> None:
    x = rows(width)
    error = (round_trip(x, "int4") - x).abs()
    assert (error <= 0.5001 / 7 * x.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("width", [1, 8, 33])
def test_fp8_is_off_by_half_a_unit_at_most(width: int) -> None:
    """Three bits behind the point, down to 2**-6 of a largest value of 448; equal steps of 2**-9 below."""
    x = rows(width)
    scale = x.abs().amax(-1, keepdim=True) / 448
    error = (round_trip(x, "fp8") - x).abs()
    assert (error <= 1.0001 * torch.maximum(x.abs() / 16, scale * 2**-10)).all()


@pytest.mark.parametrize("mode", ["fp8", "int4"])
def test_the_largest_value_of_a_row_comes_back(mode: str) -> None:
    x = rows(9)
    place = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(round_trip(x, mode).gather(-1, place), x.gather(-1, place), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_rows_stay_zero(mode: str, dtype: torch.dtype) -> None:
    """Also beside others, and where a row is so small that its scale underflows."""
    x = torch.zeros(3, 5, dtype=dtype)
    x[1] = 1
    assert_same_bits(round_trip(x, mode), x)
    tiny = torch.full((1, 5), 1e-45)
    assert round_trip(tiny, mode).abs().max() <= 1e-45


def test_int4_bytes() -> None:
    """Two columns per byte, low nibble first, code 8 is zero; an odd last column has 8 beside it."""
    payload, scales = snapshot_quantize(torch.tensor([[7.0, -7.0, 0.0], [0.5, 1.0, -3.5]]), "int4")
    assert payload.tolist() == [[15 + 16 * 1, 8 + 16 * 8], [9 + 16 * 10, 1 + 16 * 8]]
    assert scales.tolist() == [1.0, 0.5]


def test_integers_up_to_7_are_exact_in_every_mode() -> None:
    x = torch.randint(-7, 8, (40, 11), generator=torch.Generator().manual_seed(0)).float()
    x[:, 4] = 7
    for mode in ("none", "bf16", "fp8", "int4"):
        assert_same_bits(round_trip(x, mode), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_none_keeps_every_bit(dtype: torch.dtype) -> None:
    x = rows(6, dtype)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    payload, scales = snapshot_quantize(x, "none")
    assert payload.dtype == dtype and scales.numel() == 0
    assert_same_bits(payload, x)
    assert torch.equal(payload.signbit(), x.signbit())


def test_bf16_of_a_bfloat16_bank_is_none() -> None:
    x = rows(6, torch.bfloat16)
    assert_same_bits(snapshot_quantize(x, "bf16"), snapshot_quantize(x, "none"))


def test_a_float64_bank_is_stored_as_it_is_or_not_at_all() -> None:
    for mode in ("bf16", "fp8", "int4"):
        with pytest.raises(UnsupportedConfigurationError, match=f"mode is '{mode}' with a float64 bank"):
            snapshot_quantize(rows(4).double(), mode)
        with pytest.raises(UnsupportedConfigurationError, match=f"mode is '{mode}' with a float64 bank"):
            snapshot_dequantize(*snapshot_quantize(rows(4), mode), mode, 4, torch.float64)


def test_a_payload_of_another_form_is_refused() -> None:
    payload, scales = snapshot_quantize(rows(5), "int4")
    with pytest.raises(ValueError, match=r"payload has shape \(16, 3\); expected .* \(16, 4\)"):
        snapshot_dequantize(payload, scales, "int4", 7, torch.float32)
    with pytest.raises(ValueError, match=r"payload has dtype torch\.int8; mode 'int4'"):
        snapshot_dequantize(payload.view(torch.int8), scales, "int4", 5, torch.float32)
    with pytest.raises(ValueError, match=r"scales has shape \(15,\); expected .* \(16,\)"):
        snapshot_dequantize(payload, scales[1:], "int4", 5, torch.float32)
    with pytest.raises(ValueError, match=r"scales has dtype torch\.float64"):
        snapshot_dequantize(payload, scales.double(), "int4", 5, torch.float32)
    with pytest.raises(ValueError, match="mode is 'int8'; choose one of 'none', 'bf16', 'fp8', 'int4'"):
        snapshot_quantize(rows(5), "int8")
