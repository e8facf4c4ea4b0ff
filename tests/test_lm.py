"""The language model: its values, its states, its drafts and its refusals."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from sdm_compile import SDMState
from sdm_compile.lm import CausalConv, LanguageModel, LMConfig, LMPending, LMState
from tests.lm_models import CONFIG, make_model


@pytest.fixture
def model() -> LanguageModel:
    return make_model()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(1))


def test_new_model_predicts_nearly_uniformly(tokens: torch.Tensor) -> None:
    logits, _ = LanguageModel(LMConfig(dim=64))(tokens)
    bits = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / math.log(2)
    assert abs(bits.item() - 8) < 0.1


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution(width: int) -> None:
    conv = CausalConv(5, width)
    torch.nn.init.normal_(conv.weight)
    x = torch.randn(3, 7, 5)
    y, tail = conv(x, torch.zeros(3, width - 1, 5))
    expected = F.conv1d(F.pad(x.mT, (width - 1, 0)), conv.weight.T[:, None], groups=5).mT
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(tail, x[:, 7 - (width - 1) :], rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [(13,), (5, 8), (1,) * 13, (0, 1, 12), (2, 2, 9)])
@pytest.mark.parametrize("grad", [True, False])
def test_segments_equal_the_whole(
    model: LanguageModel, tokens: torch.Tensor, lengths: tuple[int, ...], grad: bool
) -> None:
    whole, _ = model(tokens)
    with torch.set_grad_enabled(grad):
        state, parts = model.init_state(2), []
        for segment in tokens.split(lengths, dim=1):
            logits, state = model(segment, state)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_without_grad_mode_the_state_is_advanced_in_place(model: LanguageModel, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        state = model.init_state(2)
        before = [leaf.data_ptr() for leaf in pytree.tree_leaves(state)]
        start = [leaf.clone() for leaf in pytree.tree_leaves(state)]
        _, after = model(tokens, state)
    assert after is state
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves(state)] == before
    assert not any(torch.equal(a, b) for a, b in zip(start, pytree.tree_leaves(state), strict=True))


def test_with_grad_mode_the_state_is_left_and_carries_gradient(model: LanguageModel, tokens: torch.Tensor) -> None:
    _, state = model(tokens[:, :6])
    kept = [leaf.detach().clone() for leaf in pytree.tree_leaves(state)]
    logits, after = model(tokens[:, 6:], state)
    assert after is not state
    for leaf, value in zip(pytree.tree_leaves(state), kept, strict=True):
        torch.testing.assert_close(leaf.detach(), value, rtol=0, atol=0)
    weight = torch.randn_like(logits)
    (logits * weight).sum().backward()
    cut = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    whole, _ = model(tokens)
    (whole[:, 6:] * weight).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(cut[name], parameter.grad, msg=name)


def test_state_is_a_pytree(model: LanguageModel) -> None:
    leaves, spec = pytree.tree_flatten(model.init_state(3))
    assert [leaf.shape for leaf in leaves] == 2 * [(3 * 2 * 16, 6)] + 2 * [(3, 2, 12)]
    rebuilt = pytree.tree_unflatten([leaf + 1 for leaf in leaves], spec)
    assert isinstance(rebuilt, LMState)
    assert torch.equal(rebuilt.tails[1], leaves[3] + 1)


def test_state_made_in_inference_mode_is_ordinary(model: LanguageModel) -> None:
    with torch.inference_mode():
        state = model.init_state(1)
    assert not any(leaf.is_inference() for leaf in pytree.tree_leaves(state))


def test_state_can_be_saved(model: LanguageModel, tokens: torch.Tensor, tmp_path: Path) -> None:
    _, state = model(tokens)
    torch.save(pytree.tree_map(torch.detach, state), tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    assert isinstance(loaded, LMState)
    torch.testing.assert_close(model(tokens, loaded)[0], model(tokens, state)[0], rtol=0, atol=0)


def test_wrong_state_is_refused_before_it_is_advanced(model: LanguageModel, tokens: torch.Tensor) -> None:
    state, other = model.init_state(2), model.init_state(1)
    kept = [leaf.detach().clone() for leaf in pytree.tree_leaves(state)]
    wrong = [
        LMState(state.memories[:1], state.tails[:1]),
        LMState([state.memories[0], other.memories[1]], state.tails),
        LMState(state.memories, [state.tails[0], other.tails[1]]),
    ]
    for bad, message in zip(wrong, ("of 1 blocks; the model has 2", "bank has shape", "a tail"), strict=True):
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            model(tokens, bad)
    for leaf, value in zip(pytree.tree_leaves(state), kept, strict=True):
        torch.testing.assert_close(leaf.detach(), value, rtol=0, atol=0)


def inference_copy(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


UNWRITABLE = {
    "float64": lambda x: x.double(),
    "one row for all": lambda x: x[:1].expand_as(x),
    "made in inference mode": inference_copy,
    "sparse": lambda x: x.to_sparse(),
    "on meta": lambda x: x.to("meta"),
    "columns first": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "float16": lambda x: x.half(),
    "no tensor": lambda x: x.tolist(),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("what", "part", "how"),
    [
        *itertools.product(("step", "prompt", "commit"), ("bank",), sorted({*UNWRITABLE} - {"float64"})),
        *itertools.product(("step", "prompt"), ("tail",), sorted({*UNWRITABLE} - {"columns first", "float16"})),
        *itertools.product(("commit",), ("tail",), sorted({*UNWRITABLE} - {"columns first", "float16", "float64"})),
    ],
)
def test_what_the_second_block_cannot_take_leaves_the_first_one_alone(
    what: str, part: str, how: str, tokens: torch.Tensor
) -> None:
    model = LanguageModel(CONFIG)
    state = model.init_state(2)
    pending = model.draft(tokens[:, :4], state)[1]
    if part == "bank":
        state.memories[1].bank = UNWRITABLE[how](state.memories[1].bank)
        pending.memories[1].mark = None  # by which the commit would know that it is another bank
    else:
        state.tails[1] = UNWRITABLE[how](state.tails[1])
    kept = [state.memories[0].bank.clone(), state.tails[0].clone()]
    with pytest.raises(
        (ValueError, TypeError, RuntimeError),
        match="the state's bank|new_rows has" if part == "bank" else "a tail of the state",
    ):
        if what == "commit":
            model.commit_(state, pending, torch.tensor([1, 2]))
        else:
            model(tokens[:, : 1 if what == "step" else 4], state)
    for leaf, before in zip((state.memories[0].bank, state.tails[0]), kept, strict=True):
        torch.testing.assert_close(leaf, before, rtol=0, atol=0)


@torch.no_grad()
def test_a_draft_writes_nothing_and_takes_what_cannot_be_written(tokens: torch.Tensor) -> None:
    model = make_model()
    state = model.init_state(2)
    expected, _ = model.draft(tokens[:, :4], state)
    with torch.inference_mode():
        memories = [memory.clone() for memory in state.memories]
    one = LMState(memories, [tail[:1].expand_as(tail) for tail in state.tails])  # all of them zeros
    torch.testing.assert_close(model.draft(tokens[:, :4], one)[0], expected, rtol=0, atol=0)


@torch.no_grad()
def test_a_narrower_state_is_advanced(tokens: torch.Tensor) -> None:
    model = LanguageModel(CONFIG)
    state = model.init_state(2).to(torch.bfloat16)
    logits, after = model(tokens, state)
    assert after is state and logits.dtype == torch.float32
    assert {tail.dtype for tail in state.tails} == {torch.bfloat16} and state.tails[0].abs().sum() > 0


def decode_by_sequence(
    model: LanguageModel, tokens: torch.Tensor, state: LMState, counts: torch.Tensor
) -> torch.Tensor:
    """Logits [B, T, 256] of each sequence's first `counts` tokens, decoded one by one in place; zeros of the others."""
    parts = torch.zeros(*tokens.shape, 256, dtype=model.head.weight.dtype)
    for b, count in enumerate(counts.tolist()):
        memories = [SDMState(memory.bank.view(len(tokens), -1, memory.bank.shape[1])[b]) for memory in state.memories]
        own = LMState(memories, [tail[b : b + 1] for tail in state.tails])
        for t in range(count):
            logits, _ = model(tokens[b : b + 1, t : t + 1], own)
            parts[b, t] = logits[0, 0]
    return parts


@pytest.mark.parametrize("counts", [(0, 0, 0), (2, 2, 2), (4, 4, 4), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("width", [1, 3, 7])
@torch.no_grad()
def test_draft_and_commit_are_decoding(counts: tuple[int, ...], width: int) -> None:
    """In float32, through two layers, and then token by token; the convolution reaches back further than the draft."""
    torch.manual_seed(0)
    model = LanguageModel(replace(CONFIG, conv_width=width))
    tokens = torch.randint(256, (3, 19))
    state = model.init_state(3)
    model(tokens[:, :9], state)
    kept, sequential = copy.deepcopy(state), copy.deepcopy(state)
    logits, pending = model.draft(tokens[:, 9:13], state)
    for leaf, before in zip(pytree.tree_leaves(state), pytree.tree_leaves(kept), strict=True):
        torch.testing.assert_close(leaf, before, rtol=0, atol=0)
    whole = decode_by_sequence(model, tokens[:, 9:13], kept, torch.tensor([4, 4, 4]))
    torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-5)
    model.commit_(state, pending, torch.tensor(counts))
    decode_by_sequence(model, tokens[:, 9:13], sequential, torch.tensor(counts))
    for t in range(13, 19):
        for leaf, other in zip(pytree.tree_leaves(state), pytree.tree_leaves(sequential), strict=True):
            torch.testing.assert_close(leaf, other, rtol=1e-5, atol=1e-5)
        got, expected = (model(tokens[:, t : t + 1], s)[0] for s in (state, sequential))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_drafts_do_not_drift(model: LanguageModel) -> None:
    generator = torch.Generator().manual_seed(3)
    state, sequential = model.init_state(2), model.init_state(2)
    for _ in range(40):
        tokens = torch.randint(256, (2, 4), generator=generator)
        counts = torch.randint(5, (2,), generator=generator)
        logits, pending = model.draft(tokens, state)
        model.commit_(state, pending, counts)
        expected = decode_by_sequence(model, tokens, sequential, counts)
        for b, count in enumerate(counts.tolist()):
            torch.testing.assert_close(logits[b, :count], expected[b, :count], rtol=1e-11, atol=1e-11)
    for leaf, other in zip(pytree.tree_leaves(state), pytree.tree_leaves(sequential), strict=True):
        torch.testing.assert_close(leaf, other, rtol=1e-11, atol=1e-11)


def test_a_state_is_copied_cut_off_and_moved(model: LanguageModel, tokens: torch.Tensor) -> None:
    state = model.init_state(2)
    _, state = model(tokens, state.at(torch.tensor([1, 0])))
    others = state.detach(), state.clone(), state.to(torch.float32)
    for x, cut, copied, narrow in zip(*map(pytree.tree_leaves, (state, *others)), strict=True):
        wide = x.is_floating_point()
        assert x.requires_grad == copied.requires_grad == wide and not cut.requires_grad
        assert cut.data_ptr() == x.data_ptr() != copied.data_ptr()
        assert narrow.dtype == (torch.float32 if wide else torch.int64)
        for other in (cut, copied, narrow):
            torch.testing.assert_close(other, x, check_dtype=False)


@torch.no_grad()
def test_drafts_in_a_pool(model: LanguageModel, tokens: torch.Tensor) -> None:
    """As on a state of the batch alone; padding and what the batch does not use stay as they are."""
    alone, pool = model.init_state(2), model.init_state(5)
    chosen = pool.at(torch.tensor([3, -1, 1]))
    padded = torch.stack([tokens[0], tokens[0], tokens[1]])
    model(tokens[:, :7], alone)
    model(padded[:, :7], chosen)
    counts = torch.tensor([3, 1])
    expected, pending = model.draft(tokens[:, 7:11], alone)
    model.commit_(alone, pending, counts)
    got, pending = model.draft(padded[:, 7:11], chosen)
    assert chosen.entries is not None
    chosen.entries.copy_(torch.tensor([0, 2, 4]))  # the next step's: the commit goes by the draft's
    model.commit_(chosen, pending, torch.tensor([3, 4, 1]))
    torch.testing.assert_close(got[::2], expected, rtol=1e-11, atol=1e-11)
    fresh = model.init_state(1)
    for leaf, of_batch, initial in zip(*map(pytree.tree_leaves, (pool, alone, fresh)), strict=True):
        entries, sequences = leaf.unflatten(0, (5, -1)), of_batch.unflatten(0, (2, -1))
        torch.testing.assert_close(entries[[3, 1]], sequences, rtol=1e-11, atol=1e-11)
        for free in (0, 2, 4):
            torch.testing.assert_close(entries[free], initial, rtol=0, atol=0)


@torch.no_grad()
def test_a_commit_that_cannot_be_leaves_every_layer_alone(model: LanguageModel, tokens: torch.Tensor) -> None:
    state = model.init_state(2)
    _, pending = model.draft(tokens[:, :4], state)
    state.memories[1].bank.mul_(1)
    kept = [leaf.clone() for leaf in pytree.tree_leaves(state)]
    wrong = torch.tensor([1, 1, 1])
    for counts, error in ((torch.tensor([1, 2]), RuntimeError), (wrong, ValueError), (wrong[0], ValueError)):
        with pytest.raises(error):
            model.commit_(state, pending, counts)
    with pytest.raises(ValueError, match="bank has shape"):
        model.commit_(model.init_state(3), pending, torch.tensor([1, 2]))
    for leaf, before in zip(pytree.tree_leaves(state), kept, strict=True):
        torch.testing.assert_close(leaf, before, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pending: pending.windows.pop(), "pending has 2 memories and 1 windows; the model has 2 blocks"),
        (lambda pending: pending.windows.__setitem__(1, pending.windows[1][:, 1:]), "a window of pending has shape"),
        (lambda pending: pending.windows.__setitem__(1, pending.windows[1][1:]), "a window of pending has shape"),
        (lambda pending: pending.windows.__setitem__(1, pending.windows[1].to("meta")), "window is on meta"),
        (
            lambda pending: setattr(pending.memories[1], "new_rows", pending.memories[1].new_rows.bfloat16()),
            "new_rows has dtype",
        ),
    ],
)
def test_what_is_pending_fits_every_layer_before_any_is_written(
    spoil: Callable[[LMPending], Any], message: str, tokens: torch.Tensor
) -> None:
    model = LanguageModel(CONFIG)
    state = model.init_state(2)
    kept = [leaf.clone() for leaf in pytree.tree_leaves(state)]
    pending = model.draft(tokens[:, :4], state)[1]
    spoil(pending)
    with pytest.raises(ValueError, match=message):
        model.commit_(state, pending, torch.tensor([1, 2]))
    for leaf, before in zip(pytree.tree_leaves(state), kept, strict=True):
        torch.testing.assert_close(leaf, before, rtol=0, atol=0)


def test_a_commit_is_whole_whatever_the_mode(tokens: torch.Tensor) -> None:
    """Drafts made with grad mode on, of a model whose first layer is frozen; and a bank of inference mode's own."""
    model = LanguageModel(CONFIG)
    for p in (*model.embedding.parameters(), *next(iter(model.blocks)).parameters()):
        p.requires_grad_(False)
    with torch.no_grad():
        state, other = model.init_state(2), model.init_state(2)
        _, pending = model.draft(tokens[:, :4], other)
        model.commit_(other, pending, torch.tensor([3, 1]))
    _, pending = model.draft(tokens[:, :4], state)
    model.commit_(state, pending, torch.tensor([3, 1]))
    for leaf, expected in zip(pytree.tree_leaves(state), pytree.tree_leaves(other), strict=True):
        torch.testing.assert_close(leaf, expected, rtol=0, atol=0)
    with torch.inference_mode():
        state.memories[1] = state.memories[1].clone()
        _, pending = model.draft(tokens[:, 4:8], state)
    before = [leaf.clone() for leaf in pytree.tree_leaves(state)]
    with pytest.raises(RuntimeError, match=r"made under torch\.inference_mode"):
        model.commit_(state, pending, torch.tensor([3, 1]))
    for leaf, kept in zip(pytree.tree_leaves(state), before, strict=True):
        torch.testing.assert_close(leaf, kept, rtol=0, atol=0)


@torch.no_grad()
def test_draft_and_commit_compile(model: LanguageModel, tokens: torch.Tensor) -> None:
    draft = torch.compile(model.draft, fullgraph=True, backend="aot_eager")
    commit_ = torch.compile(model.commit_, fullgraph=True, backend="aot_eager")
    state, other = model.init_state(2), model.init_state(2)
    for start, counts in ((0, torch.tensor([4, 1])), (4, torch.tensor([0, 3])), (8, torch.tensor([2, 2]))):
        got, pending = draft(tokens[:, start : start + 4], state)
        expected, eager = model.draft(tokens[:, start : start + 4], other)
        commit_(state, pending, counts)
        model.commit_(other, eager, counts)
        torch.testing.assert_close(got, expected)
    for leaf, eager_leaf in zip(pytree.tree_leaves(state), pytree.tree_leaves(other), strict=True):
        torch.testing.assert_close(leaf, eager_leaf)


def test_meta_device(tokens: torch.Tensor) -> None:
    with torch.device("meta"):
        model = LanguageModel(CONFIG)
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(math.nan)
    model.init_weights()
    assert model(tokens)[0].isfinite().all()


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="num_layers must be an int of at least 1, got 0"):
        LMConfig(num_layers=0)


def test_compiled_whole(model: LanguageModel, tokens: torch.Tensor) -> None:
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for forward in (model, compiled):
        logits, _ = forward(tokens)
        (logits * torch.arange(256)).sum().backward()
        with torch.no_grad():
            state = model.init_state(2)
            steps = [forward(tokens[:, i : i + 1].contiguous(), state)[0].clone() for i in range(6)]
        results.append([logits.detach(), *steps, *pytree.tree_leaves(state)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    for (name, a), b in zip(model.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_a_refused_state_is_left_as_it_was() -> None:
    model = LanguageModel(LMConfig(dim=8, num_layers=2, hidden_dim=8, slots_per_head=16, num_writes=3, num_reads=3))
    with torch.no_grad():
        state = model.init_state(2)
        before = state.memories[0].bank.clone()
        for wrong in (state.tails[1][:, :1], state.tails[1][:1]):
            bad = LMState(state.memories, [state.tails[0], wrong])
            with pytest.raises(ValueError, match="tail"):
                model(torch.zeros(2, 5, dtype=torch.int64), bad)
        bad = LMState([state.memories[0], model.init_state(3).memories[1]], state.tails)
        with pytest.raises(ValueError, match="bank has shape"):
            model(torch.zeros(2, 5, dtype=torch.int64), bad)
    assert torch.equal(state.memories[0].bank, before)


@pytest.mark.parametrize("tokens", [torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3)])
@torch.no_grad()
def test_tokens_and_states_of_another_kind(model: LanguageModel, tokens: torch.Tensor) -> None:
    state = model.init_state(1)
    for call in (model, model.draft):
        with pytest.raises(ValueError, match=r"tokens has shape .*; expected int64 \[B, T\]"):
            call(tokens, state)
        with pytest.raises(TypeError, match="state is a dict; expected an LMState"):
            call(torch.zeros(1, 3, dtype=torch.int64), {"state": state})
    with pytest.raises(TypeError, match="pending is a int; expected an LMPending"):
        model.commit_(state, 1, torch.ones(1, dtype=torch.int64))  # type: ignore[arg-type]


# States with entries


def rows_of(state: LMState, entries: list[int]) -> LMState:
    """What those entries hold, as a state without entries, inside the autograd graph."""

    def rows(leaf: torch.Tensor, per_entry: int) -> torch.Tensor:
        return leaf.unflatten(0, (-1, per_entry))[entries].flatten(0, 1)

    memories = [SDMState(rows(memory.bank, 2 * 16)) for memory in state.memories]
    return LMState(memories, [rows(tail, 1) for tail in state.tails])


def random_pool(model: LanguageModel, capacity: int) -> LMState:
    return pytree.tree_map(lambda leaf: torch.randn_like(leaf).requires_grad_(), model.init_state(capacity))


def assert_equal_states(a: LMState, b: LMState, tolerance: float = 0) -> None:
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [0, 1, 2, 7])
@pytest.mark.parametrize("grad", [True, False])
def test_entries_choose_what_a_call_advances(model: LanguageModel, length: int, grad: bool) -> None:
    tokens = torch.randint(256, (3, length))
    pool = random_pool(model, 5)
    start = pytree.tree_map(lambda leaf: leaf.detach().clone(), pool)
    expected_logits, expected = model(tokens[[0, 2]], rows_of(pool, [4, 1]))
    state = pool.at(torch.tensor([4, -1, 1]))
    with torch.set_grad_enabled(grad):
        logits, after = model(tokens, state)
    assert (after is state) == (not grad) and after.entries is state.entries
    torch.testing.assert_close(logits[[0, 2]], expected_logits)
    assert_equal_states(rows_of(after, [4, 1]), expected, 1e-12)
    assert_equal_states(rows_of(after, [0, 2, 3]), rows_of(start, [0, 2, 3]))
    if grad:
        assert_equal_states(pool, start)


def test_padding_leaves_the_pool_alone_whatever_it_holds(model: LanguageModel, tokens: torch.Tensor) -> None:
    pool = pytree.tree_map(lambda leaf: torch.full_like(leaf, math.nan), model.init_state(3))
    with torch.no_grad():
        for segment in tokens.split([1, 4, 1, 7], dim=1):
            logits, _ = model(segment, pool.at(torch.tensor([-1, -5])))
            assert logits.isfinite().all()
    assert all(leaf.isnan().all() for leaf in pytree.tree_leaves(pool))


@pytest.mark.parametrize("cuts", [(4,), (1, 1, 2)])
def test_gradients_through_a_pool(model: LanguageModel, cuts: tuple[int, ...]) -> None:
    tokens = torch.randint(256, (3, 4))
    pool = random_pool(model, 4)
    leaves = [*pytree.tree_leaves(pool), *model.parameters()]
    weights = torch.randn(2, 4, 256, dtype=torch.float64)

    def loss(state: LMState, rows: list[int], chosen: list[int]) -> torch.Tensor:
        """Of the two sequences that are no padding, and of what they leave."""
        outs = []
        for segment in tokens[rows].split(cuts, dim=1):
            logits, state = model(segment, state)
            outs.append(logits[[row for row, entry in enumerate(chosen) if entry >= 0]])
        left = rows_of(state, [3, 0]) if state.entries is not None else state
        return (torch.cat(outs, 1) * weights).sum() + sum(leaf.square().sum() for leaf in pytree.tree_leaves(left))

    losses = [
        loss(pool.at(torch.tensor([3, -1, 0])), [0, 1, 2], [3, -1, 0]),
        loss(rows_of(pool, [3, 0]), [0, 2], [0, 1]),
    ]
    actual, expected = (torch.autograd.grad(one, leaves, allow_unused=True) for one in losses)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_no_sequences_on_a_pool(model: LanguageModel) -> None:
    pool = random_pool(model, 3)
    start = pytree.tree_map(lambda leaf: leaf.detach().clone(), pool)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            logits, after = model(torch.zeros(0, 5, dtype=torch.int64), pool.at(torch.zeros(0, dtype=torch.int64)))
        assert logits.shape == (0, 5, 256)
        assert_equal_states(after.at(None), start)


def test_wrong_entries_are_refused_before_anything_is_written(model: LanguageModel, tokens: torch.Tensor) -> None:
    pool, more = model.init_state(3), model.init_state(4)
    start = pytree.tree_map(lambda leaf: leaf.detach().clone(), pool)
    entries = torch.tensor([2, 0])
    wrong = [
        (pool.at(entries[:1]), ValueError, r"entries have shape \(1,\)"),
        (pool.at(entries.int()), ValueError, "entries have dtype torch.int32"),
        (pool.at(entries + 1), IndexError, "entries name entry 3 of a bank with room for 3;"),
        (LMState([m.at(entries) for m in pool.memories], pool.tails), ValueError, "give them to all: state.at"),
        (LMState(pool.memories, [pool.tails[0], more.tails[1]], entries), ValueError, r"expected \(3, 2, 12\)"),
        (LMState([pool.memories[0], more.memories[1]], pool.tails, entries), ValueError, r"expected \(4, 2, 12\)"),
    ]
    for state, error, message in wrong:
        for length in (1, 5):
            with torch.no_grad(), pytest.raises(error, match=message):
                model(tokens[:, :length], state)
    assert_equal_states(pool, start)


@pytest.mark.parametrize("grad", [True, False])
def test_other_entries_are_the_same_graph(model: LanguageModel, grad: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=False)
    with torch.set_grad_enabled(grad):
        pools = [pytree.tree_map(torch.detach, model.init_state(4)) for _ in range(2)]
        for entries in ([3, -1, 0], [1, 0, 3], [-1, -1, -1], [0, 1, 2]):
            tokens = torch.randint(256, (3, 1))
            results = []
            for i, forward in enumerate((model, compiled)):
                logits, after = forward(tokens, pools[i].at(torch.tensor(entries)))
                assert after.entries is not None and after.entries.tolist() == entries
                pools[i] = pytree.tree_map(torch.detach, after.at(None))
                results.append([logits, *pytree.tree_leaves(after)])
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_old_files_have_no_entries(model: LanguageModel, tmp_path: Path) -> None:
    state = pytree.tree_map(torch.detach, model.init_state(1))
    for part in (state, *state.memories):
        del part.__dict__["entries"]
    torch.save(state, tmp_path / "old")
    torch.save(model.init_state(2).at(torch.tensor([1])), tmp_path / "new")
    assert torch.load(tmp_path / "old", weights_only=True).entries is None
    assert torch.load(tmp_path / "new", weights_only=True).entries.tolist() == [1]
