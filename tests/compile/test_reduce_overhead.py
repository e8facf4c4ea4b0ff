"""The layer under `torch.compile(mode="reduce-overhead")`: the recipes of the README, with every call in a CUDA graph.

On the CPU the mode is plain Inductor, so that there only the values are checked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdm_compile import SDMState, SparseDeltaMemory, SparseDeltaMemoryConfig
from sdm_compile.lm import LanguageModel, LMConfig, LMState
from sdm_compile.machine import why_not_compile
from sdm_compile.ops import repeats

pytestmark = pytest.mark.skipif(why_not_compile() is not None, reason=str(why_not_compile()))
BATCH, DIM = 2, 12


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A call that is not put into a graph is an error. No test finds what an earlier call of the process has kept."""
    monkeypatch.setattr(repeats, "_counts", {})
    if request.param == "cuda":
        from sdm_compile.ops.launch import free_captured_loops

        free_captured_loops()
    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
        yield request.param


def make_layer(device: str) -> SparseDeltaMemory:
    torch.manual_seed(0)
    config = SparseDeltaMemoryConfig(
        dim=DIM, num_heads=2, slots_per_head=16, num_writes=3, num_reads=4, chunk_size=8, output_gate=True
    )
    return SparseDeltaMemory(config).to(device)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, mode="reduce-overhead", fullgraph=True, dynamic=False)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Decoder(nn.Module):
    """Holds the state, whose bank then is always at the same address."""

    def __init__(self, layer: SparseDeltaMemory) -> None:
        super().__init__()
        self.layer = layer
        with torch.no_grad():
            self.register_buffer("bank", layer.init_state(BATCH).bank, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, SDMState(self.bank))[0]


class AttributeDecoder(Decoder):
    def __init__(self, layer: SparseDeltaMemory) -> None:
        super().__init__(layer)
        bank = self.bank
        del self.bank
        self.bank = bank


@pytest.mark.parametrize("kind", [Decoder, AttributeDecoder])
@torch.no_grad()
def test_decode(device: str, kind: type[Decoder]) -> None:
    decoder = kind(make_layer(device)).eval()
    plain = copy.deepcopy(decoder)
    function, address = compiled(decoder), decoder.bank.data_ptr()
    for tokens in (9, 9, 9, *[1] * 10, 9, 1):
        x = torch.randn(BATCH, tokens, DIM, device=device)
        assert_same([function(x).clone(), decoder.bank], [plain(x), plain.bank])
    with torch.no_grad():  # another sequence
        for each in (decoder, plain):
            each.bank.copy_(each.layer.init_state(BATCH).bank)
    x = torch.randn(BATCH, 1, DIM, device=device)
    assert_same([function(x).clone(), decoder.bank], [plain(x), plain.bank])
    assert decoder.bank.data_ptr() == address


@torch.no_grad()
def test_decode_after_a_prompt_that_made_the_state(device: str) -> None:
    """What a call without a state returned is copied to where the decoder holds its own."""
    layer = make_layer(device).eval()
    decoder = Decoder(layer)
    prefill, function = compiled(layer), compiled(decoder)
    for _ in range(3):
        prompt, x = torch.randn(BATCH, 9, DIM, device=device), torch.randn(BATCH, 5, DIM, device=device)
        y, state = prefill(prompt)
        decoder.bank.copy_(state.bank)
        got = [y.clone(), *(function(token).clone() for token in x.split(1, 1)), decoder.bank]
        y, state = layer(prompt)
        assert_same(got, [y, *(layer(token, state)[0] for token in x.split(1, 1)), state.bank])


def train(
    module: nn.Module, step: Callable[[Tensor], Tensor], number: int, device: str, shape: tuple[int, ...]
) -> list[Tensor]:
    """The losses of some steps, and what they made of the parameters."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(number):
        loss = step(torch.randn(shape, generator=generator).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [*losses, *(p.detach() for p in module.parameters())]


class Regression(nn.Module):
    def __init__(self, layer: SparseDeltaMemory) -> None:
        super().__init__()
        self.layer = layer
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(self.norm(x))
        return (y[:, 1:] - x[:, :-1]).square().mean()


def test_training(device: str) -> None:
    models = [Regression(make_layer(device)).to(device) for _ in range(2)]
    got, expected = (
        train(model, step, 6, device, (BATCH, 19, DIM))
        for model, step in zip(models, (compiled(models[0]), models[1]), strict=True)
    )
    assert_same(got, expected)


@pytest.mark.parametrize("carried", [False, True], ids=["within a step", "from step to step"])
def test_a_returned_state_is_fed_to_the_next_call(device: str, carried: bool) -> None:
    """Segments of a sequence chain, with gradients, up to the backward; what goes on after it is a copy."""

    def step_of(layer: SparseDeltaMemory, function: Any) -> Callable[[Tensor], Tensor]:
        state = layer.init_state(BATCH).detach()

        def step(x: Tensor) -> Tensor:
            nonlocal state
            torch.compiler.cudagraph_mark_step_begin()
            y1, after = function(x[:, :9], state)
            y2, after = function(x[:, 9:], after)
            if carried:
                state = after.detach().clone()
            return (y1 - x[:, :9]).square().mean() + (y2 - x[:, 9:]).square().mean()

        return step

    layers = [make_layer(device) for _ in range(2)]
    got, expected = (
        train(layer, step_of(layer, function), 6, device, (BATCH, 18, DIM))
        for layer, function in zip(layers, (compiled(layers[0]), layers[1]), strict=True)
    )
    assert_same(got, expected)


class LanguageDecoder(nn.Module):
    """The same for a model of several layers and a state of several tensors."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        with torch.no_grad():
            self.state = model.init_state(BATCH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, self.state)[0]


@torch.no_grad()
def test_a_language_model(device: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(dim=16, num_layers=2, hidden_dim=16, slots_per_head=16, num_writes=3, num_reads=3))
    model = model.to(device).eval()
    decoder, state = LanguageDecoder(model), model.init_state(BATCH)
    function = compiled(decoder)
    for _ in range(8):
        tokens = torch.randint(256, (BATCH, 1), device=device)
        assert_same([function(tokens).clone()], [model(tokens, state)[0]])
    assert_same(leaves(decoder.state), leaves(state))


def leaves(state: LMState) -> list[Tensor]:
    return [*(memory.bank for memory in state.memories), *state.tails]
