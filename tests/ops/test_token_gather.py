"""The token gather in exact arithmetic, and what must not reach its sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.checks import accumulate_dtype
from sdm_compile.ops.token_gather import token_gather, token_gather_bwd_op
from tests.harness import DTYPES, assert_same_bits

P, C, W, R, D, SLOTS = 2, 5, 256, 3, 7, 60


def integers(*shape: int, low: int = -8, high: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def exact_step(dtype: torch.dtype) -> list[Tensor]:
    """Integers as rows, powers of two as weights: every sum is exact in float32. 256 writes share 60 slots."""
    accumulate = accumulate_dtype(dtype)
    return [
        integers(SLOTS, D, seed=1).to(dtype),
        integers(P, C, W, low=-3, high=SLOTS, seed=2).int(),
        2.0 ** integers(P, C, W, low=-3, high=4, seed=3).to(accumulate),
        integers(P, C, R, low=-3, high=SLOTS, seed=4).int(),
        2.0 ** integers(P, C, R, low=-3, high=4, seed=5).to(accumulate),
    ]


def one_hot(idx: Tensor, weights: Tensor) -> Tensor:
    """[P, C, SLOTS]: the weight that each slot has in each sum."""
    return (weights.unsqueeze(-1) * (idx.unsqueeze(-1) == torch.arange(SLOTS))).sum(-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_sums(dtype: torch.dtype) -> None:
    bank, k_idx, k_eff, q_idx, q_w = exact_step(dtype)
    rows = bank.to(accumulate_dtype(dtype))
    expected = [one_hot(k_idx, k_eff) @ rows, one_hot(q_idx, q_w) @ rows]
    assert_same_bits(token_gather(bank, k_idx, k_eff, q_idx, q_w), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_gradients(dtype: torch.dtype) -> None:
    """One row's gradient adds up many entries, of both sides and of both streams, and is rounded once."""
    bank, k_idx, k_eff, q_idx, q_w = exact_step(dtype)
    accumulate = accumulate_dtype(dtype)
    grads = [integers(P, C, D, seed=6).to(accumulate), integers(P, C, D, seed=7).to(accumulate)]
    dbank, dk_eff, dq_w = token_gather_bwd_op(*grads, bank, k_idx, k_eff, q_idx, q_w, [True] * 3)
    sides = ((k_idx, k_eff, grads[0]), (q_idx, q_w, grads[1]))
    sums = sum(torch.einsum("pcs,pcd->sd", one_hot(idx, weights), grad) for idx, weights, grad in sides)
    assert_same_bits(dbank, sums.to(dtype))
    dots = [torch.einsum("sd,pcd->pcs", bank.to(accumulate), g) for g in grads]
    for got, idx, dot in ((dk_eff, k_idx, dots[0]), (dq_w, q_idx, dots[1])):
        assert_same_bits(got, dot.gather(-1, idx.clamp_min(0).long()).masked_fill(idx < 0, 0))


def test_bfloat16_rows_are_summed_in_float32() -> None:
    bank = torch.tensor([[256.0], [1.0], [0.5]], dtype=torch.bfloat16)
    ids = torch.tensor([[[0, 1, 2]]], dtype=torch.int32)
    retrieved, inter = token_gather(bank, ids, torch.ones(1, 1, 3), ids, torch.tensor([[[1.0, 2.0, -1.0]]]))
    assert (retrieved.item(), inter.item()) == (257.5, 257.5)  # in bfloat16, 256 + 1 is 256


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_slot_reaches_nothing(dtype: torch.dtype) -> None:
    """Neither through its weight nor through a row of the bank."""
    bank = torch.full((3, 2), math.nan, dtype=dtype)
    bank[1] = 1
    ids = torch.tensor([[[1, -1, -7], [-1, -2, -3]]], dtype=torch.int32)
    weights = torch.tensor([[[2.0, math.nan, math.inf], [math.nan] * 3]], dtype=accumulate_dtype(dtype))
    expected = torch.tensor([[[2.0, 2.0], [0.0, 0.0]]], dtype=accumulate_dtype(dtype))
    assert_same_bits(token_gather(bank, ids, weights, ids, weights), [expected, expected])
    grad = torch.tensor([[[1.0, 1.0], [math.nan, math.nan]]], dtype=accumulate_dtype(dtype))
    dbank, dk_eff, dq_w = token_gather_bwd_op(grad, grad, bank, ids, weights, ids, weights, [True] * 3)
    assert dbank.tolist() == [[0, 0], [4, 4], [0, 0]]
    assert dk_eff.tolist() == dq_w.tolist() == [[[2, 0, 0], [0, 0, 0]]]


def test_ids_beyond_the_bank_raise() -> None:
    bank, k_idx, k_eff, q_idx, q_w = exact_step(torch.float32)
    for name, ids in (("k_idx", k_idx), ("q_idx", q_idx)):
        ids[1, 2, 0] = SLOTS
        with pytest.raises(IndexError, match=f"{name} holds slot id {SLOTS}, but memory has {SLOTS} rows"):
            token_gather(bank, k_idx, k_eff, q_idx, q_w)
        ids[1, 2, 0] = 0
