"""The row formats' kernels against the CPU kernels, bit for bit: in Triton's interpreter, and on a GPU.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdm_compile.ops import row_quant
from sdm_compile.ops.snapshot import SNAPSHOT_MODES, dequantize_rows, empty_rows, empty_snapshot, quantize_rows
from tests.harness import LAYOUTS, laid_out
from tests.interpreted import in_the_interpreter, run_interpreted

triton = pytest.importorskip("triton")
from sdm_compile.ops.row_quant_kernels import RowQuantConfig, launch_dequantize, launch_quantize  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
SMALL_BLOCKS = RowQuantConfig(rows=4, columns=64, warps=1)
FINEST = 2.0**-149  # the smallest float32 above zero
every_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
every_mode = pytest.mark.parametrize("mode", SNAPSHOT_MODES)
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_the_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


def assert_bits(got: Tensor, expected: Tensor) -> None:
    """Also of zeros; of NaNs that they are where expected."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    codes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    got, expected = got.cpu(), expected.cpu()
    off = got.view(codes) != expected.view(codes)
    if got.is_floating_point():
        off &= ~(got.float().isnan() & expected.float().isnan())
    assert not off.any(), f"{int(off.sum())} off: {got[off][:8]}, expected {expected[off][:8]}"


def assert_row_quant(rows: Tensor, mode: str, device: str, config: RowQuantConfig | None = None) -> None:
    """Payload, scales, and the rows that they stand for in both dtypes of a bank."""
    payload, scales = (x.to(device) for x in empty_snapshot(len(rows), rows, mode))
    launch_quantize(rows.to(device), payload, scales, mode, config)
    expected = quantize_rows(rows, mode)
    assert_bits(payload, expected[0])
    assert_bits(scales, expected[1])
    for dtype in (F32, BF16):
        assert_rows(*expected, mode, rows.shape[1], dtype, device, config)


def assert_rows(
    payload: Tensor,
    scales: Tensor,
    mode: str,
    width: int,
    dtype: torch.dtype,
    device: str,
    config: RowQuantConfig | None = None,
) -> None:
    got = empty_rows(payload, width, dtype).to(device)
    launch_dequantize(payload.to(device), scales.to(device), got, mode, config)
    assert_bits(got, dequantize_rows(payload, scales, mode, width, dtype))


def around(x: Tensor) -> Tensor:
    """x, and the next float32 on either side, with both signs."""
    near = torch.cat([x, torch.nextafter(x, torch.tensor(INF)), torch.nextafter(x, torch.tensor(-INF))])
    return torch.cat([near, -near])


def rows_with(top: float, values: Tensor) -> Tensor:
    """The values in rows whose largest magnitude is `top`: the first column, of 31."""
    values = torch.cat([values, torch.zeros(-len(values) % 30)]).view(-1, 30)
    return torch.cat([torch.full((len(values), 1), top), values], 1)


def hard_rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    fp8 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 .. 448
    powers = 2.0 ** torch.arange(-149.0, 128)
    return {
        "fp8 codes": rows_with(448.0, around(fp8).clamp(-448, 448)),
        "fp8 ties": rows_with(448.0, around((fp8[1:] + fp8[:-1]) / 2)),
        "fp8 subnormals": rows_with(448.0, around(torch.arange(33) * 2.0**-11)),
        "int4 ties": rows_with(7.0, around(torch.arange(14) / 2)),
        "no power of two": rows_with(3.7, torch.linspace(-3.7, 3.7, 300)),
        "powers": around(powers)[:, None],
        "powers beside a larger one": rows_with(2.0**127, around(powers[:-1])),
        "bfloat16 ties": rows_with(2.0, around(1 + torch.arange(64) / 256)),
        "subnormal": torch.randint(-30, 31, (60, 5), generator=generator) * FINEST,
        "subnormal scales": torch.randint(-2000, 2001, (60, 5), generator=generator) * FINEST,
        "largest": rows_with(torch.finfo(F32).max, around(torch.finfo(F32).max / torch.arange(1, 450))),
        "zeros": torch.tensor([[0.0, -0.0, 0.0], [0.0, 0.0, 0.0], [-0.0, -0.0, -0.0], [-0.0, 1.0, -1e-30]]),
        "random": torch.randn(90, 9, generator=generator) * 10.0 ** torch.arange(-45, 45)[:, None],
    }


@every_device
@every_dtype
@every_mode
@pytest.mark.parametrize("name", hard_rows())
def test_hard_values(name: str, mode: str, dtype: torch.dtype, device: str) -> None:
    rows = hard_rows()[name].to(dtype).nan_to_num()  # the largest float32 rounds to infinity
    assert_row_quant(rows, mode, device)


@every_device
@every_dtype
@every_mode
@pytest.mark.parametrize("width", [1, 2, 5, 63, 64, 65, 300])
def test_widths_and_blocks(width: int, mode: str, dtype: torch.dtype, device: str) -> None:
    """Rows of one block and of several; the largest value in each block in turn, in the last column too."""
    rows = torch.randn(7, width, generator=torch.Generator().manual_seed(width))
    for r in range(7):
        rows[r, -1 - r * width // 7] *= 100
    rows[3] = 0
    for config in (None, SMALL_BLOCKS):
        assert_row_quant(rows.to(dtype), mode, device, config)


@every_device
@every_mode
def test_no_rows_and_many_columns(mode: str, device: str) -> None:
    assert_row_quant(torch.empty(0, 5), mode, device)
    assert_row_quant(torch.randn(3, 16385), mode, device)


@every_device
@every_dtype
@pytest.mark.parametrize("scale", [0.0, FINEST, 300 * FINEST, 2.0**-126, 0.3, 1.0, -1.7, 7e35, INF, NAN])
def test_every_code_and_any_scale(scale: float, dtype: torch.dtype, device: str) -> None:
    codes, scales = torch.arange(256).to(torch.uint8)[None], torch.tensor([scale])
    assert_rows(codes.view(torch.float8_e4m3fn), scales, "fp8", 256, dtype, device)
    assert_rows(codes, scales, "int4", 511, dtype, device)


@every_device
@every_dtype
@every_mode
def test_nan_and_infinity_are_as_on_the_cpu(mode: str, dtype: torch.dtype, device: str) -> None:
    rows = torch.ones(8, 41)
    rows[0, 3], rows[1, 40], rows[2, 0], rows[3, :2] = NAN, INF, -INF, torch.tensor([INF, NAN])
    rows[4:, 7] = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32).view(F32)  # NaNs
    assert_row_quant(rows.to(dtype), mode, device, SMALL_BLOCKS)
    assert_row_quant(torch.tensor([[NAN], [INF], [1.0]]).to(dtype), mode, device)
    if mode == "none":
        patterns = torch.tensor([[0x7FC1, -1, 0x7F81, 0x7FFF]], dtype=torch.int16).view(BF16)
        kept = torch.empty_like(patterns, device=device)
        launch_quantize(patterns.to(device), kept, torch.empty(0, device=device), mode)
        assert torch.equal(kept.cpu().view(torch.int16), patterns.view(torch.int16))


@every_device
@every_mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, mode: str, device: str) -> None:
    rows = laid_out(torch.randn(6, 5), layout)
    got = row_quant._snapshot_quantize_cuda(rows.to(device), mode)
    expected = quantize_rows(rows, mode)
    for x, y in zip(got, expected, strict=True):
        assert_bits(x, y)
    payload, scales = (laid_out(x.to(device), "sliced") for x in expected)
    back = row_quant._snapshot_dequantize_cuda(payload, scales, mode, 5, F32)
    assert_bits(back, dequantize_rows(*expected, mode, 5, F32))


@every_device
@every_dtype
@every_mode
def test_nothing_outside_is_touched(mode: str, dtype: torch.dtype, device: str) -> None:
    """NaN before and behind the rows; what is written starts at an odd element, with ones before and behind."""
    rows = torch.full((9, 5), NAN, dtype=dtype, device=device)
    rows[1:-1] = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    expected = quantize_rows(rows[1:-1].cpu(), mode)
    fenced = [torch.ones(len(x) + 2, *x.shape[1:], device=device).to(x.dtype) for x in expected]
    inner = [x[1:-1] for x in fenced]
    launch_quantize(rows[1:-1], *inner, mode, SMALL_BLOCKS)
    back = torch.ones(9, 5, dtype=dtype, device=device)
    launch_dequantize(*inner, back[1:-1], mode, SMALL_BLOCKS)
    for x, y in zip(inner, expected, strict=True):
        assert_bits(x, y)
    assert_bits(back[1:-1], dequantize_rows(*expected, mode, 5, dtype))
    for x in (*fenced, back):
        assert (x[[0, -1]].float() == 1).all()
