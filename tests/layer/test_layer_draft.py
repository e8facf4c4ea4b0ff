"""The layer's draft and commit: decoding token by token, up to the rounding of the projections."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sdm_compile import SDMState, SparseDeltaMemory, SparseDeltaMemoryConfig, UnsupportedConfigurationError
from tests.cases import LAYER_SETTINGS
from tests.harness import assert_close, assert_same_bits

SHAPE: dict[str, Any] = {"dim": 12, "num_heads": 2, "slots_per_head": 16, "num_writes": 3, "num_reads": 4}
DRAFTED = 4


def make_layer(dtype: torch.dtype = torch.float64, **settings: Any) -> SparseDeltaMemory:
    torch.manual_seed(0)
    return SparseDeltaMemory(SparseDeltaMemoryConfig(**{**SHAPE, **settings})).to(dtype).eval()


def decode_(layer: SparseDeltaMemory, x: Tensor, state: SDMState, counts: Tensor) -> Tensor:
    """Each sequence's first `counts` tokens, one by one, in place; y [B, T, dim] is zero for the others."""
    y = torch.zeros_like(x)
    banks = state.bank.view(x.shape[0], -1, state.bank.shape[1])
    for b, count in enumerate(counts.tolist()):
        for t in range(count):
            y[b, t : t + 1], _ = layer(x[b : b + 1, t : t + 1], SDMState(banks[b]))
    return y


@pytest.mark.parametrize("settings", LAYER_SETTINGS)
@pytest.mark.parametrize("counts", [(0, 0, 0), (2, 2, 2), (4, 4, 4), (1, 4, 0)], ids=str)
@torch.no_grad()
def test_it_is_decoding(settings: str, counts: tuple[int, ...]) -> None:
    layer = make_layer(**LAYER_SETTINGS[settings])
    state = layer.init_state(3)
    layer(torch.randn(3, 20, 12, dtype=torch.float64), state)
    kept, sequential = copy.deepcopy(state), copy.deepcopy(state)
    x, more = torch.randn(2, 3, DRAFTED, 12, dtype=torch.float64)
    y, pending = layer.draft(x, state)
    assert_same_bits(state.bank, kept.bank)
    torch.testing.assert_close(y, decode_(layer, x, kept, torch.full((3,), DRAFTED)), rtol=1e-12, atol=1e-12)

    layer.commit_(state, pending, torch.tensor(counts))
    decode_(layer, x, sequential, torch.tensor(counts))
    torch.testing.assert_close(state.bank, sequential.bank, rtol=1e-12, atol=1e-12)
    for t in range(DRAFTED):
        got, expected = (layer(more[:, t : t + 1], s)[0] for s in (state, sequential))
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_a_pool_is_committed_to_by_the_drafts_entries(compiled: bool) -> None:
    """Whatever entries the state has by then: none, the draft's, or the next step's in the same tensor."""
    layer = make_layer()
    commit_ = torch.compile(layer.commit_, fullgraph=True, backend="aot_eager") if compiled else layer.commit_
    pool, alone = layer.init_state(5), layer.init_state(2)
    entries, counts = torch.tensor([3, -1, 1]), torch.tensor([2, 4, 3])
    for committed_to in (lambda: pool, lambda: pool.at(entries), lambda: pool.at(torch.tensor([0]))):
        x = torch.randn(3, DRAFTED, 12, dtype=torch.float64)
        entries.copy_(torch.tensor([3, -1, 1]))
        y, pending = layer.draft(x, pool.at(entries))
        entries.copy_(torch.tensor([0, 2, 4]))
        commit_(committed_to(), pending, counts)
        expected, other = layer.draft(x[[0, 2]], alone)
        layer.commit_(alone, other, counts[[0, 2]])
        torch.testing.assert_close(y[[0, 2]], expected, rtol=1e-12, atol=1e-12)
        parts = pool.bank.unflatten(0, (5, -1))
        torch.testing.assert_close(parts[[3, 1]].flatten(0, 1), alone.bank, rtol=1e-12, atol=1e-12)
        assert_same_bits(parts[[0, 2, 4]].flatten(0, 1), layer.init_state(3).bank)


@torch.no_grad()
def test_a_float32_bank_under_autocast() -> None:
    layer = make_layer(torch.float32, output_gate=True)
    state = layer.init_state(2)
    x, counts = torch.randn(2, DRAFTED, 12), torch.tensor([3, 1])
    with torch.autocast("cpu", torch.bfloat16):
        y, pending = layer.draft(x, state)
        assert y.dtype == torch.bfloat16 and pending.new_rows.dtype == torch.float32
        expected, _ = layer(x, layer.init_state(2, torch.float32))
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        layer.commit_(state, pending, counts)
        sequential = layer.init_state(2)
        decode_(layer, x, sequential, counts)
    assert_close(state.bank, sequential.bank, torch.bfloat16)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled(mode: Callable[[], AbstractContextManager[object]]) -> None:
    layer = make_layer(torch.float32, normalize_readings=True, output_gate=True)
    counters = [CompileCounterWithBackend("aot_eager") for _ in range(2)]
    draft = torch.compile(layer.draft, fullgraph=True, backend=counters[0])
    commit_ = torch.compile(layer.commit_, fullgraph=True, backend=counters[1])
    state, other = layer.init_state(3).detach(), layer.init_state(3).detach()
    with mode():
        for i in range(5):
            x, counts = torch.randn(3, DRAFTED, 12), torch.tensor([i, DRAFTED - i, 9])
            (y, pending), (expected, expected_pending) = draft(x, state), layer.draft(x, other)
            commit_(state, pending, counts)
            layer.commit_(other, expected_pending, counts)
            torch.testing.assert_close((y, state.bank), (expected, other.bank), rtol=1e-6, atol=1e-6)
    assert [c.frame_count for c in counters] == [1, 1]


@torch.no_grad()
def test_errors_come_before_anything_is_written() -> None:
    layer = make_layer()
    state, x = layer.init_state(2), torch.randn(2, DRAFTED, 12, dtype=torch.float64)
    _, pending = layer.draft(x, state)
    kept, counts = state.bank.clone(), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"x has shape \(2, 12\); expected \[B, T, dim\]"):
        layer.draft(x[:, 0], state)
    with pytest.raises(ValueError, match="the state's bank has shape"):
        layer.draft(x[:1], state)
    with pytest.raises(UnsupportedConfigurationError, match="supported are 0 to 64"):
        layer.draft(torch.randn(2, 65, 12, dtype=torch.float64), state)
    for accepted, message in (
        (torch.ones(4, dtype=torch.int64), r"accepted has shape \(4,\); expected \[B\] = \(2,\)"),
        (torch.ones(2, 1, dtype=torch.int64), r"accepted has shape \(2, 1\)"),
        (torch.ones(2), "accepted has dtype torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.commit_(state, pending, accepted)
    with pytest.raises(TypeError, match="accepted is a int; expected an int32 or int64 tensor"):
        layer.commit_(state, pending, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state is a Tensor; expected an SDMState"):
        layer.draft(x, state.bank)  # type: ignore[arg-type]
    for bank in (state.bank[1:], state.bank[:, 1:], state.bank[0]):
        with pytest.raises(ValueError, match=r"the state's bank has shape .*; expected \(capacity \* 32, 6\)"):
            layer.commit_(SDMState(bank), pending, counts)
    for batch in (1, 2, 3):
        with pytest.raises(ValueError, match="is not the bank of the draft"):
            layer.commit_(layer.init_state(batch), pending, counts)
    assert_same_bits(state.bank, kept)
    layer(x[:, :1], state)
    kept = state.bank.clone()
    with pytest.raises(RuntimeError, match="written to since the draft"):
        layer.commit_(state, pending, counts)
    assert_same_bits(state.bank, kept)


def test_no_commit_to_what_requires_a_gradient() -> None:
    layer = make_layer()
    state, x = layer.init_state(2), torch.randn(2, DRAFTED, 12, dtype=torch.float64)
    _, pending = layer.draft(x, state)
    kept, counts = state.bank.detach().clone(), torch.tensor([1, 2])
    with pytest.raises(RuntimeError, match=r"the state's bank requires a gradient.*torch\.no_grad\(\)"):
        layer.commit_(state, pending, counts)
    assert_same_bits(state.bank.detach(), kept)
    layer.commit_(state.detach(), pending, counts)
    assert not torch.equal(state.bank.detach(), kept)


def test_a_bank_too_small_for_an_unmarked_draft() -> None:
    """A draft that was traced or captured does not know its bank: the number of its sequences says enough."""
    layer = make_layer()
    x, counts = torch.randn(2, DRAFTED, 12, dtype=torch.float64), torch.tensor([1, 2])
    with torch.no_grad():
        _, pending = layer.draft(x, layer.init_state(2))
        pending.mark = None
        with pytest.raises(ValueError, match="with a capacity of at least 2"):
            layer.commit_(layer.init_state(1), pending, counts)
