"""The dual matmul: where it rounds."""

from __future__ import annotations

import torch

from sdm_compile.ops.dual_matmul import dual_matmul, dual_matmul_bwd_op


def test_bfloat16_readings_are_rounded_once() -> None:
    """256 - (-1) is 257 and 257 + 1 is 258; with any step of it in bfloat16, the sum is 256 or 260."""
    one = torch.ones(1, 1, 1)
    delta, readings = dual_matmul(one, one, one.bfloat16() * 256, one, -one, one)
    assert (delta.dtype, delta.item()) == (torch.float32, 257)
    assert (readings.dtype, readings.item()) == (torch.bfloat16, 258)


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    """dv is X^T ddelta + QX^T dreadings = 257 + 1; dbeta, in float32, is (v - retrieved) times that."""
    one = torch.ones(1, 1, 1)
    v = one.bfloat16() * 2
    grads = dual_matmul_bwd_op(one * 257, one.bfloat16(), one, one, v, one, one, [True] * 6)
    assert [x.item() for x in grads] == [257, 1, 258, 258, -258, 1]
    assert [x.dtype for x in grads] == [torch.float32, torch.float32, torch.bfloat16, *[torch.float32] * 3]
