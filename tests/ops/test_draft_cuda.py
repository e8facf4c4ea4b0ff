"""Draft and commit on a GPU: the bits of decode steps, eager and captured, with nothing that waits for the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sdm_compile import last_dispatch, repeated_write_slots, sdm_commit_, sdm_decode_step, sdm_draft
from sdm_compile.lm import LanguageModel, LMConfig
from sdm_compile.ops.draft import MAX_TOKENS
from tests.cases import RAGGED, REUSE, SIGNED, TANGLED, Case, Inputs
from tests.harness import assert_same_bits

pytestmark = pytest.mark.gpu

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
DRAFTED, LATER = 4, 50
# Aligned, so that rows come in vectors; one stream to many, each with a launch shape of its own.
SERVED = Case("served", writes=64, reads=64, head_dim=1024, slots=300, spare_slots=0, signed=True)
CASES = [
    *(RAGGED, REUSE, SIGNED, TANGLED),
    replace(TANGLED, name="wide", writes=20, reads=9, slots=23, head_dim=72, streams=5),
    replace(TANGLED, name="widest", writes=256, reads=256, slots=300, head_dim=40),
    *(replace(SERVED, name=f"served, {n} streams", streams=n) for n in (1, 3, 16, 80)),
]


def on_gpu(inputs: Inputs) -> Inputs:
    return Inputs(*(x.cuda() for x in inputs))


def make(case: Case, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    return on_gpu(replace(case, tokens=tokens).make(dtype, seed))


def decode_(bank: Tensor, inputs: Inputs, counts: Tensor | None = None) -> Tensor:
    """Readings [P, T, D] of decode steps; the bank is advanced by each stream's first `counts` tokens (all of them)."""
    k_idx, tokens = inputs.k_idx, inputs.v.shape[1]
    if counts is not None:
        rejected = torch.arange(tokens, device="cuda").unsqueeze(-1) >= counts[:, None, None]
        k_idx = k_idx.masked_fill(rejected, -1)
    each = (k_idx, *inputs[2:])
    return torch.stack([sdm_decode_step(bank, *(x[:, t].contiguous() for x in each)) for t in range(tokens)], 1)


def counts_of(streams: int, tokens: int) -> list[Tensor]:
    """None, half and all of the tokens, and another number for each stream."""
    same = [torch.full((streams,), n, device="cuda") for n in (0, tokens // 2, tokens)]
    return [*same, (torch.arange(streams, device="cuda") * 3 + 1) % (tokens + 1)]


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bits_of_decode_steps(case: Case, dtype: torch.dtype) -> None:
    """Drafted, committed in part, and decoded fifty tokens further."""
    few, later = make(case, DRAFTED, dtype), make(case, LATER, dtype, seed=1)
    repeated_write_slots()
    expected = decode_(few.memory.clone(), few)
    repeats = repeated_write_slots()
    for counts in counts_of(case.streams, DRAFTED):
        bank, advanced = few.memory.clone(), few.memory.clone()
        readings, pending = sdm_draft(bank, *few[1:])
        assert repeated_write_slots() == repeats
        assert_same_bits((readings, bank), (expected, few.memory))
        sdm_commit_(bank, pending, counts.int())
        decode_(advanced, few, counts)
        assert_same_bits(bank, advanced)
        assert_same_bits((decode_(bank, later), bank), (decode_(advanced, later), advanced))
        repeated_write_slots()
    record = last_dispatch().decode
    assert record is not None and record.route == "triton"


@every_dtype
@pytest.mark.parametrize("tokens", [1, 2, 16, MAX_TOKENS])
def test_any_number_of_tokens(tokens: int, dtype: torch.dtype) -> None:
    """Slots that most tokens write and read."""
    inputs = make(replace(SERVED, streams=3, slots=70), tokens, dtype)
    expected = decode_(inputs.memory.clone(), inputs)
    for counts in counts_of(3, tokens):
        for _ in range(4):
            bank, advanced = inputs.memory.clone(), inputs.memory.clone()
            readings, pending = sdm_draft(bank, *inputs[1:])
            assert_same_bits((readings, bank), (expected, inputs.memory))
            sdm_commit_(bank, pending, counts)
        decode_(advanced, inputs, counts)
        assert_same_bits(bank, advanced)


@every_dtype
@pytest.mark.parametrize("case", [TANGLED, SERVED], ids=lambda c: c.name)
def test_captured_and_replayed_with_other_inputs_and_counts(case: Case, dtype: torch.dtype) -> None:
    """Two graphs, as the counts are known only between them; the first also serves several drafts of one commit."""
    static = make(case, DRAFTED, dtype)
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _, pending = sdm_draft(static.memory, *static[1:])
        sdm_commit_(static.memory, pending, counts)
    torch.cuda.current_stream().wait_stream(stream)
    pool = torch.cuda.graph_pool_handle()
    draft, commit = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(draft, pool=pool):
        readings, pending = sdm_draft(static.memory, *static[1:])
    with torch.cuda.graph(commit, pool=pool):
        sdm_commit_(static.memory, pending, counts)

    bank = static.memory.clone()
    for seed in range(1, 9):
        inputs = make(case, DRAFTED, dtype, seed)
        for x, y in zip(static[1:], inputs[1:], strict=True):
            x.copy_(y)
        counts.copy_(torch.tensor([seed % 6 - 1, (seed + 3) % 6]))
        draft.replay()
        assert_same_bits((readings, static.memory), (decode_(bank.clone(), inputs), bank))
        for x in static[1:]:
            x.zero_()  # what was drafted from is not needed any more
        commit.replay()
        decode_(bank, inputs, counts)
        assert_same_bits(static.memory, bank)


def test_nothing_waits_for_the_device() -> None:
    inputs = make(SERVED, DRAFTED, torch.bfloat16)
    counts = torch.tensor([1, 3], device="cuda")
    sdm_draft(*inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, pending = sdm_draft(*inputs)
        sdm_commit_(inputs.memory, pending, counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_memory_of_a_banks_size_is_taken() -> None:
    inputs = make(replace(SERVED, slots=40000, head_dim=64), DRAFTED, torch.float32)
    counts = torch.tensor([1, 3], device="cuda")
    sdm_draft(*inputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, pending = sdm_draft(*inputs)
    sdm_commit_(inputs.memory, pending, counts)
    assert torch.cuda.max_memory_allocated() - before < inputs.memory.nbytes / 10


def test_ids_beyond_the_bank_and_counts_beyond_the_draft_touch_nothing() -> None:
    inputs = make(RAGGED, DRAFTED, torch.float32)
    fence = torch.full((len(inputs.memory) + 64, inputs.memory.shape[1]), 7.0, device="cuda")
    bank = fence[32:-32].copy_(inputs.memory)
    wild = inputs._replace(
        k_idx=torch.where(inputs.k_idx == inputs.k_idx.max(), 2**40, inputs.k_idx),
        q_idx=torch.where(inputs.q_idx == inputs.q_idx.max(), len(bank), inputs.q_idx),
    )
    readings, pending = sdm_draft(bank, *wild[1:])
    sdm_commit_(bank, pending, torch.tensor([2**62, -(2**62)], device="cuda"))
    assert readings.isfinite().all()
    assert (fence[:32] == 7).all() and (fence[-32:] == 7).all()
    expected = inputs.memory.clone()
    decode_(expected, wild, torch.tensor([DRAFTED, 0], device="cuda"))
    assert_same_bits(bank, expected)


def test_a_bank_that_has_changed_is_noticed() -> None:
    inputs = make(RAGGED, DRAFTED, torch.float32)
    counts = torch.tensor([1, 2], device="cuda")
    _, pending = sdm_draft(*inputs)
    sdm_commit_(inputs.memory, pending, counts)
    with pytest.raises(RuntimeError, match="written to since the draft"):
        sdm_commit_(inputs.memory, pending, counts)


@pytest.mark.parametrize("way", ["eager", "captured", "compiled"])
@torch.no_grad()
def test_a_model_of_two_layers(way: str) -> None:
    """In float32: drafts and commits against decoding with the rejected tokens' work undone."""
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(dim=64, slots_per_head=64)).cuda()
    state, sequential = model.init_state(3), model.init_state(3)
    tokens, counts = torch.zeros(3, DRAFTED, dtype=torch.int64, device="cuda"), torch.zeros(3, device="cuda").int()
    draft: Callable[..., Any] = model.draft
    commit: Callable[..., Any] = model.commit_
    if way == "compiled":
        draft, commit = torch.compile(draft, fullgraph=True), torch.compile(commit, fullgraph=True)
    if way == "captured":
        kept = copy.deepcopy(state)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _, pending = model.draft(tokens, state)
            model.commit_(state, pending, counts)
        torch.cuda.current_stream().wait_stream(stream)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            logits, pending = model.draft(tokens, state)
        with torch.cuda.graph(second):
            model.commit_(state, pending, counts)
        for leaf, before in zip(pytree.tree_leaves(state), pytree.tree_leaves(kept), strict=True):
            leaf.copy_(before)
    for i in range(12):
        tokens.random_(256)
        counts.copy_(torch.tensor([i % 5, (i + 2) % 5, 4]))
        if way == "captured":
            first.replay()
            second.replay()
        else:
            logits, pending = draft(tokens, state)
            commit(state, pending, counts)
        for t in range(DRAFTED):
            before = [leaf.clone() for leaf in pytree.tree_leaves(sequential)]
            expected, _ = model(tokens[:, t : t + 1], sequential)
            for leaf, old in zip(pytree.tree_leaves(sequential), before, strict=True):
                per_sequence, old = leaf.view(3, -1), old.view(3, -1)
                per_sequence.copy_(torch.where((counts > t).unsqueeze(1), per_sequence, old))
            taken = counts > t
            torch.testing.assert_close(logits[taken, t], expected[taken, 0], rtol=1e-5, atol=1e-5)
        for leaf, other in zip(pytree.tree_leaves(state), pytree.tree_leaves(sequential), strict=True):
            torch.testing.assert_close(leaf, other, rtol=1e-5, atol=1e-5)
