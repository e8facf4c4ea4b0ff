"""What DecodeGraph refuses, and what fails in its step or its capture: everything is usable as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdm_compile import SDMState
from sdm_compile.graphs import CaptureError, DecodeGraph
from sdm_compile.lm import LMState
from tests.graph_models import DEVICES, Sums, add, integers, make_model, make_sums, random_tokens, tensors_of
from tests.harness import assert_same_bits


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_calls(device: str) -> None:
    state = make_sums(device)
    step = DecodeGraph(add, state, integers(2, 3, device=device), batch_sizes=(1, 2))
    before, x = state.total.clone(), integers(2, 3, device=device)
    ids = torch.tensor([0, 1], device=device)
    for error, message, inputs, entries in [
        (ValueError, "got 2 inputs; expected 1", (x, x), None),
        (TypeError, "input 0 is a list; expected a tensor", ([1.0],), None),
        (ValueError, r"input 0 has shape \[2, 4\], torch.float32, .*; expected \[2, 3\]", (x.new_zeros(2, 4),), None),
        (ValueError, r"input 0 has shape \[2, 3\], torch.float64, .*; expected .* torch.float32", (x.double(),), None),
        (ValueError, r"on meta; expected \[2, 3\], torch.float32, on ", (x.to("meta"),), None),
        (ValueError, r"input 0 has shape \[\]", (x.sum(),), None),
        (ValueError, "a batch of 3, for which there is no graph .captured sizes: 1, 2.", (x.new_zeros(3, 3),), None),
        (ValueError, "a batch of 0, for which there is no graph", (x[:0],), None),
        (ValueError, r"entries have shape \[1\], torch.int64, .*; expected \[2\]", (x,), ids[:1]),
        (ValueError, "entries have shape .* torch.int32, on .*; expected .* torch.int64", (x,), ids.int()),
        (ValueError, "entries have shape .*, on meta; expected", (x,), ids.to("meta")),
        (TypeError, "entries is a list; expected an int64 tensor", (x,), [0, 1]),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            step(*inputs, entries=entries)
        assert torch.equal(state.total, before)
    with pytest.raises(ValueError, match=r"entries were given, but nothing in the state has a method `at\(entries\)`"):
        DecodeGraph(lambda x, state: x, None, x)(x, entries=ids)
    with pytest.raises(ValueError, match=r"entries were given, but .*, or not pooled"):
        DecodeGraph(lambda x, state: state.total[:2] + x, state, x, pooled=False)(x, entries=ids)
    with pytest.raises(ValueError, match=r"input 1 has shape \[1, 3\].*; expected \[2, 3\]"):
        DecodeGraph(lambda x, y, state: x, None, x, x)(x, x[:1])
    assert torch.equal(step(x)["sums"], state.total[:2])


def test_wrong_constructions() -> None:
    x, state = torch.zeros(2, 3), {"h": torch.zeros(2, 3)}

    def unused(*args: Any) -> None:
        raise NotImplementedError

    for error, message, arguments, options in [
        (ValueError, "at least one input", (None,), {}),
        (TypeError, "example input 1 is a int", (None, x, 3), {}),
        (TypeError, "mutates 0 is a str", (None, x), {"mutates": ["weight"]}),
        (ValueError, r"example input 1 has shape \[3, 1\] .* it has shape \[2, 3\]", (None, x, torch.zeros(3, 1)), {}),
        (ValueError, r"example input 0 has shape \[\]", (None, torch.zeros(())), {}),
        (ValueError, r"example input 0 has shape \[0, 3\]", (None, x[:0]), {}),
        (ValueError, r"batch_sizes are \(\); expected at least one int", (None, x), {"batch_sizes": ()}),
        (ValueError, r"batch_sizes are \[0\]; expected", (None, x), {"batch_sizes": [0]}),
        (TypeError, r"batch_sizes is 8; expected ints, such as \(1, 2\)", (None, x), {"batch_sizes": 8}),
        (ValueError, r"batch_sizes are \(1, 2\); .*be padded: .* example, 2", (state, x), {"batch_sizes": (1, 2)}),
        (ValueError, "not pooled. and cannot be", (Sums(x), x), {"batch_sizes": (1, 2), "pooled": False}),
        (ValueError, r"is one of chosen entries.*state\.at\(None\)", (SDMState(x, torch.tensor([0, 1])), x), {}),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            DecodeGraph(unused, *arguments, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_failing_step_leaves_the_state(device: str) -> None:
    state, calls = {"h": torch.zeros(2, device=device)}, []

    def call(x: Tensor, state: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        state["h"].add_(x)
        if failing:
            raise KeyError("fn's own")
        return state["h"] * 2

    failing = True
    torch.manual_seed(2)
    with pytest.raises(KeyError, match="fn's own"):
        DecodeGraph(call, state, torch.ones(2, device=device))
    assert calls == [1] and state["h"].tolist() == [0, 0]
    failing = False
    step = DecodeGraph(call, state, torch.ones(2, device=device))
    assert step(torch.full((2,), 3.0, device=device)).tolist() == [6, 6]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_replaces_its_state_is_refused(device: str) -> None:
    """Replays would start from the same tensor each time."""
    kept = torch.zeros(2, device=device)
    state = {"h": kept}

    def call(x: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["h"] = state["h"] + x
        return state["h"]

    with pytest.raises(ValueError, match=r"fn put another tensor into the state; .* copy_\(\)"):
        DecodeGraph(call, state, torch.ones(2, device=device))
    assert state["h"] is kept and kept.tolist() == [0, 0]


@pytest.mark.gpu
def test_a_mutated_buffer_that_was_replaced() -> None:
    norm = nn.BatchNorm1d(3).cuda()
    step = DecodeGraph(lambda x, state: norm(x), None, torch.randn(4, 3, device="cuda"), mutates=norm.buffers())
    step(torch.randn(4, 3, device="cuda"))
    norm.running_mean = torch.zeros(3, device="cuda")
    with pytest.raises(ValueError, match=r"norm\.running_mean of the module was replaced, and is in `mutates`"):
        step(torch.randn(4, 3, device="cuda"))


@pytest.mark.gpu
def test_a_failed_capture_leaves_model_and_state() -> None:
    model = make_model("cuda")
    state, plain = model.init_state(2), model.init_state(2)
    before = tensors_of([state, list(model.parameters())])

    def waits(tokens: Tensor, state: LMState) -> Any:
        logits, state = model(tokens, state)
        if logits.sum().item() > 0:
            logits = -logits
        return logits, state

    tokens = random_tokens(2, "cuda")
    torch.cuda.manual_seed(3)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(3)
    with pytest.raises(CaptureError, match=r"cannot be captured into a CUDA graph: .*\.item\(\)") as raised:
        DecodeGraph(waits, state, tokens, batch_sizes=(1, 2))
    assert "capturing" in str(raised.value.__cause__)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert_same_bits(tensors_of([state, list(model.parameters())]), before)
    step = DecodeGraph(model, state, random_tokens(2, "cuda"))
    for _ in range(3):
        tokens = random_tokens(2, "cuda")
        with torch.no_grad():
            logits, _ = model(tokens, plain)
        assert torch.equal(step(tokens)[0], logits)


@pytest.mark.gpu
def test_a_capture_that_fails_later_can_be_tried_again() -> None:
    module, waiting = nn.Linear(3, 3).cuda(), False

    def call(x: Tensor, state: dict[str, Tensor]) -> Tensor:
        y = module(x)
        if waiting:
            y.sum().item()
        return state["h"].add_(y)

    state = {"h": torch.zeros(2, 3, device="cuda")}
    step = DecodeGraph(call, state, torch.zeros(2, 3, device="cuda"))
    module.weight.data = torch.ones(3, 3, device="cuda")
    module.bias.data.zero_()
    waiting = True
    for _ in range(2):
        with pytest.raises(CaptureError):
            step(torch.ones(2, 3, device="cuda"))
        assert state["h"].tolist() == [[0.0] * 3] * 2
    waiting = False
    assert step(torch.ones(2, 3, device="cuda")).tolist() == [[3.0] * 3] * 2


@pytest.mark.gpu
def test_refused_while_capturing() -> None:
    state, x = make_sums("cuda"), integers(2, 3, device="cuda")
    step = DecodeGraph(add, state, x)
    graph, total = torch.cuda.CUDAGraph(), state.total.clone()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(CaptureError, match="cannot be made or called while the current stream is being captured"):
            step(x)
        with pytest.raises(CaptureError, match="while the current stream is being captured"):
            DecodeGraph(add, state, x)
    graph.replay()
    assert torch.equal(y, x + 1) and torch.equal(state.total, total)
    step(x)
    total[:2] += x
    assert torch.equal(state.total, total)
