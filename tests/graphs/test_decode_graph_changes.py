"""What a DecodeGraph relies on may change between its calls: it is captured again, goes on, or refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sdm_compile import SDMState
from sdm_compile.graphs import DecodeGraph
from sdm_compile.graphs import decode as decode_module
from sdm_compile.lm import LanguageModel
from tests.graph_models import DEVICES, make_model, random_tokens, tensors_of
from tests.harness import assert_same_bits


@pytest.fixture
def captures() -> Iterator[list[Any]]:
    """One element for each capture, or on the CPU, for each time that a step was made ready."""
    made: list[Any] = []
    make = decode_module._Step

    def counted(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    with mock.patch.object(decode_module, "_Step", counted):
        yield made


@pytest.mark.parametrize("device", DEVICES)
def test_a_moved_state_is_followed(device: str, captures: list[Any]) -> None:
    model = make_model(device)
    state, plain = model.init_state(2), model.init_state(2)
    step = DecodeGraph(model, state, random_tokens(2, device))

    def advance() -> None:
        tokens = random_tokens(2, device)
        with torch.no_grad():
            expected, _ = model(tokens, plain)
        assert torch.equal(step(tokens)[0], expected)
        assert_same_bits(tensors_of(state), tensors_of(plain))

    advance()
    assert len(captures) == 1
    kept = state.memories[1].bank
    state.memories[1].bank = kept.clone()
    before = kept.clone()
    advance()
    assert torch.equal(kept, before) and len(captures) == 2
    state.memories[0] = SDMState(state.memories[0].bank.clone())
    advance()
    state.tails[0] = state.tails[0].clone()
    advance()
    state.tails[1].data = state.tails[1].clone()
    advance()
    advance()
    assert len(captures) == 5


@pytest.mark.parametrize("device", DEVICES)
def test_another_form_of_the_state_is_refused(device: str) -> None:
    model = make_model(device)
    state = model.init_state(2)
    step = DecodeGraph(model, state, random_tokens(2, device))
    kept = state.memories[1]
    state.memories[1] = kept.to(torch.bfloat16)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"state\.memories\[1\]\.bank \[64, 8\] torch.float32 on .* became .*bfloat"
        ):
            step(random_tokens(2, device))
    state.memories[1] = model.init_state(3).memories[1]
    with pytest.raises(ValueError, match=r"became state\.memories\[1\]\.bank \[96, 8\].*: make a new DecodeGraph"):
        step(random_tokens(2, device))
    state.memories[1] = kept
    before = tensors_of(state)
    step(random_tokens(2, device))
    assert not torch.equal(tensors_of(state)[0], before[0])


def replace_parameter(model: LanguageModel) -> None:
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))


def move_parameter(model: LanguageModel) -> None:
    model.blocks[0].mlp.up.weight.data = torch.randn_like(model.blocks[0].mlp.up.weight)


def replace_module(model: LanguageModel) -> None:
    model.blocks[1].mlp_norm = nn.LayerNorm(16).to(model.head.weight.device)


def assign(model: LanguageModel) -> None:
    model.load_state_dict({name: x * 2 for name, x in model.state_dict().items()}, assign=True)


def write_parameter(model: LanguageModel) -> None:
    with torch.no_grad():
        model.head.weight.mul_(-1)


@pytest.mark.parametrize("change", [replace_parameter, move_parameter, replace_module, assign, write_parameter])
@pytest.mark.parametrize("device", DEVICES)
def test_a_changed_model_is_followed(device: str, change: Callable[[LanguageModel], None], captures: list[Any]) -> None:
    model = make_model(device)
    other = copy.deepcopy(model)
    state, plain = model.init_state(1), model.init_state(1)
    step = DecodeGraph(lambda tokens, state: model(tokens, state)[0], state, random_tokens(1, device))
    step(tokens := random_tokens(1, device))
    torch.manual_seed(1)
    change(model)
    torch.manual_seed(1)
    change(other)
    with torch.no_grad():
        model(tokens, plain)
        for tail, kept in zip(pytree.tree_leaves(plain), pytree.tree_leaves(state), strict=True):
            tail.copy_(kept)
    for _ in range(2):
        tokens = random_tokens(1, device)
        with torch.no_grad():
            expected, _ = other(tokens, plain)
        assert torch.equal(step(tokens), expected)
    assert len(captures) == (1 if device == "cpu" or change is write_parameter else 2)


@pytest.mark.parametrize("device", DEVICES)
def test_training_mode_is_followed(device: str) -> None:
    drop = nn.Dropout(0.5).to(device).train()
    step = DecodeGraph(lambda x, state: drop(x), None, torch.ones(64, 4, device=device))
    for training in (True, False, True):
        drop.train(training)
        y = step(torch.full((64, 4), 3.0, device=device))
        assert bool((y == 0).any()) == training and (y.max().item() == (6 if training else 3))


@pytest.mark.gpu
def test_the_settings_are_followed(captures: list[Any]) -> None:
    weight = torch.randn(512, 512, device="cuda")
    step = DecodeGraph(
        lambda x, state: torch.nn.functional.linear(x, weight), None, torch.randn(64, 512, device="cuda")
    )

    def check() -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(64, 512, device="cuda")
        expected, y = torch.nn.functional.linear(x, weight), step(x)
        assert y.dtype == expected.dtype and torch.equal(y, expected)
        return y.float().clone()

    first = check()
    check()
    assert len(captures) == 1
    old = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert not torch.equal(check(), first) and len(captures) == 2
    finally:
        torch.set_float32_matmul_precision(old)
    assert torch.equal(check(), first) and len(captures) == 3
    with torch.autocast("cuda", torch.bfloat16):
        assert not torch.equal(check(), first) and len(captures) == 4
    check()
    assert len(captures) == 5


def test_autocast_on_the_cpu() -> None:
    weight = torch.randn(8, 8)
    step = DecodeGraph(lambda x, state: torch.nn.functional.linear(x, weight), None, torch.randn(2, 8))
    for enabled in (False, True, False):
        x = torch.randn(2, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert torch.equal(step(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("modes", [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.enable_grad)])
def test_any_grad_mode(device: str, modes: tuple[Any, Any]) -> None:
    model = make_model(device)
    state, plain = model.init_state(2), model.init_state(2)
    with modes[0]():
        step = DecodeGraph(model, state, random_tokens(2, device))
    for mode in (*modes, nullcontext):
        tokens = random_tokens(2, device)
        with torch.no_grad():
            expected, _ = model(tokens, plain)
        with mode():
            logits, _ = step(tokens)
            assert torch.equal(logits, expected) and not logits.requires_grad


class Replay:
    """What stands for a CUDA graph whose replay writes to a tensor, unseen by PyTorch."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def replay(self) -> None:
        self.target.numpy()[:] += 1


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_replay_counts_as_a_write(mode: Any) -> None:
    """To those who look at a tensor's version: autograd, of what it saved, and the commit of an older draft."""
    state, count, scale = {"h": torch.zeros(2)}, torch.zeros(2), torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        state["inference"] = torch.zeros(2)
        step = DecodeGraph(lambda x, state: x, state, torch.zeros(2), mutates=[count])
    step(torch.ones(2))
    step._steps[2].graph = Replay(state["h"])  # type: ignore[assignment]
    products = [scale * state["h"], scale * count]
    with mode():
        step(torch.ones(2))
    assert state["h"].tolist() == [1, 1]
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_draft_from_before_a_step_is_refused(device: str) -> None:
    model = make_model(device)
    state = model.init_state(2)
    step = DecodeGraph(model, state, random_tokens(2, device))
    _, pending = model.draft(torch.randint(256, (2, 3), device=device), state)
    step(random_tokens(2, device))
    before = tensors_of(state)
    with pytest.raises(RuntimeError, match="written to since the draft"):
        model.commit_(state, pending, torch.tensor([1, 2], device=device))
    assert_same_bits(tensors_of(state), before)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_draft_from_before_a_construction_is_refused(device: str, pooled: bool) -> None:
    """And says so, as the state is as it was; one that is made again has the same logits, and is taken."""
    model = make_model(device)
    state, tokens = model.init_state(2), torch.randint(256, (2, 3), device=device)
    accepted = torch.tensor([1, 2], device=device)
    logits, pending = model.draft(tokens, state)
    before = tensors_of(state)
    DecodeGraph(model, state, random_tokens(2, device), pooled=pooled)
    with pytest.raises(RuntimeError, match="or a DecodeGraph that was made of its state: draft again"):
        model.commit_(state, pending, accepted)
    assert_same_bits(tensors_of(state), before)
    again, pending = model.draft(tokens, state)
    assert_same_bits(again, logits)
    model.commit_(state, pending, accepted)
    assert not torch.equal(tensors_of(state)[0], before[0])


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_draft_of_a_padded_batch_is_committed_whole(device: str) -> None:
    """What a pending holds is of the captured size: padding rows are committed nowhere."""
    model = make_model(device)
    state, plain = model.init_state(5), model.init_state(5)
    draft = DecodeGraph(model.draft, state, torch.randint(256, (4, 3), device=device), batch_sizes=(1, 4))
    for entries, accepted in (([4, 0, 2], [3, 0, 2]), ([1, 2], [1, 3])):
        tokens = torch.randint(256, (len(entries), 3), device=device)
        chosen = torch.tensor(entries, device=device)
        padding = 4 - len(entries)
        padded, counts = torch.cat([tokens, tokens.new_zeros(padding, 3)]), torch.tensor(accepted + [3] * padding)
        rows = torch.tensor(entries + [-1] * padding, device=device)
        logits, pending = draft(tokens, entries=chosen)
        expected, other = model.draft(padded, plain.at(rows))
        assert torch.equal(logits, expected[: len(entries)])
        model.commit_(state, pending, counts.to(device))
        model.commit_(plain, other, counts.to(device))
        assert_same_bits(tensors_of(state), tensors_of(plain))
