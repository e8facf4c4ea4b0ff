"""Phase 1: sums that a difference of cumulative sums would lose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sdm_compile import reference
from sdm_compile.ops.phase1 import phase1, phase1_bwd_op
from tests.harness import normal_like


def one_slot(gates: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """One chunk whose tokens all write slot 3 and then read it, with weight 1."""
    tokens = len(gates)
    ids = torch.full((1, 1, tokens, 1), 3, dtype=torch.int32)
    ones = torch.ones(1, 1, tokens, 1, dtype=dtype)
    return ids, ones, gates.view(1, 1, tokens, 1).to(dtype), ids, ones


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("huge", [-1e30, -math.inf])
def test_small_gates_after_a_huge_one_are_not_lost(huge: float, dtype: torch.dtype) -> None:
    gates = torch.tensor([-0.25, huge, -0.5, -0.125, 0.25])
    fields = phase1(*one_slot(gates, dtype))
    # exp of the gates of tokens m with j < m <= i, for every pair (i, j)
    pairs = torch.tensor([[gates[j + 1 : i + 1].sum() for j in range(5)] for i in range(5)], dtype=dtype).exp()
    torch.testing.assert_close(fields.A[0, 0], pairs.tril(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(fields.QK[0, 0], pairs.tril(), rtol=1e-6, atol=0)
    zero = pairs.new_zeros(())
    start = gates[0].exp().to(dtype)
    torch.testing.assert_close(fields.k_eff.flatten(), torch.stack([start, *[zero] * 4]), rtol=1e-6, atol=0)
    torch.testing.assert_close(fields.q_w.flatten(), torch.stack([start, *[zero] * 4]), rtol=1e-6, atol=0)
    later = torch.tensor([0, -0.375, 0.125, 0.25, 0], dtype=dtype).exp()
    later[0] = 0
    torch.testing.assert_close(fields.write_w.flatten(), later, rtol=1e-6, atol=0)
    assert fields.group_decay.flatten().tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("huge", [-1e30, -math.inf])
def test_gradients_past_an_erasing_gate(huge: float) -> None:
    """No gradient is lost or becomes NaN; the erasing gate's own is zero up to the rounding of the sums."""
    gates = torch.tensor([-0.25, huge, -0.5, -0.125, 0.25])
    inputs = one_slot(gates, torch.float64)
    fields = phase1(*inputs)
    grads = [normal_like(x, seed) for seed, x in enumerate(fields[:6])]
    dk_val, dg, dq_val = phase1_bwd_op(*grads, *inputs)

    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in one_slot(gates.clamp_min(-80), torch.float64)]
    expected = torch.autograd.grad(reference.phase1(*leaves)[:6], [leaves[i] for i in (1, 2, 4)], grads)
    for got, want in zip((dk_val, dg, dq_val), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert abs(dg[0, 0, 1, 0]) < 1e-14


def test_long_groups_keep_short_sums_exact() -> None:
    """A slot written by 256 tokens, the gates of the first half adding up to -1280, which float32 resolves to 1e-4."""
    gates = torch.cat([torch.full((128,), -10.0), torch.linspace(-0.011, -0.003, 128)])
    fields = phase1(*one_slot(gates, torch.float32))
    sums = gates[128:].double().cumsum(0)
    expected = (sums[:, None] - sums).exp().float()
    torch.testing.assert_close(fields.A[0, 0, 128:, 128:], expected.tril(-1), rtol=2e-6, atol=0)
    torch.testing.assert_close(fields.QK[0, 0, 128:, 128:], expected.tril(), rtol=2e-6, atol=0)


def test_equal_ids_of_different_chunks_do_not_meet() -> None:
    """Two steps and two streams write and read the same ids: every chunk is what it is alone."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(2, 2, 6, 8, generator=generator).argsort(-1)[..., :3].int()
    q_idx = torch.randint(-1, 8, (2, 2, 6, 2), generator=generator).int()
    k_val, g, q_val = torch.rand(2, 2, 6, 3), -torch.rand(2, 2, 6, 3), torch.rand(2, 2, 6, 2)
    together = phase1(ids, k_val, g, q_idx, q_val)
    for s in range(2):
        for p in range(2):
            alone = phase1(*(x[s : s + 1, p : p + 1] for x in (ids, k_val, g, q_idx, q_val)))
            for a, b in zip(alone, together, strict=True):
                assert torch.equal(a[0, 0], b[s, p])


def test_staged_ids_are_int32() -> None:
    k_idx, k_val, g, q_idx, q_val = one_slot(torch.zeros(2), torch.float32)
    with pytest.raises(ValueError, match=r"k_idx has dtype torch\.int64"):
        phase1(k_idx.long(), k_val, g, q_idx, q_val)
    with pytest.raises(ValueError, match=r"q_idx has dtype torch\.int64"):
        phase1(k_idx, k_val, g, q_idx.long(), q_val)
    with pytest.raises(ValueError, match=r"g has dtype torch.float64; with torch.float32 weights it is torch.float32"):
        phase1(k_idx, k_val, g.double(), q_idx, q_val)
