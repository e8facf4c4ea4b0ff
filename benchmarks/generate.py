"""Generation with the main job's model, untrained: each token by eager calls, and by a replay of a `DecodeGraph`.

The graph comes first through its values: over 500 steps its logits and its state must be those of eager calls, bit by
bit. A token is chosen (greedily on the device, or by `generate`'s own sampling) and brought to the host at every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sdm_compile import layer, sdm_decode_step
from sdm_compile.generation import generate, sample
from sdm_compile.graphs import DecodeGraph
from sdm_compile.lm import LanguageModel, LMConfig, LMState

from . import measure

BATCHES = (1, 8, 32)
EQUAL_STEPS = 500
PROMPT = b"The "
Step = Callable[[Tensor, LMState], tuple[Tensor, LMState]]


def random_tokens(batch: int, device: str) -> Tensor:
    return torch.randint(256, (batch, 1), device=device)


def equal(model: LanguageModel, batch: int, device: str, steps: int) -> bool:
    """Whether a graph gives the logits and the state of eager calls, bit by bit."""
    state, plain = model.init_state(batch), model.init_state(batch)
    step = DecodeGraph(model, state, random_tokens(batch, device))
    for _ in range(steps):
        tokens = random_tokens(batch, device)
        if not measure.same_bits(step(tokens)[0], model(tokens, plain)[0]):
            return False
    return all(measure.same_bits(a, b) for a, b in zip(tree_leaves(state), tree_leaves(plain), strict=True))


def greedy_rate(call: Callable[[Tensor], Tensor], tokens: Tensor, steps: int) -> float:
    """Tokens per second of all sequences of a batch, from logits [B, 1, 256] of `call`."""

    def run(count: int) -> None:
        chosen = tokens
        for _ in range(count):
            chosen = call(chosen)[:, -1].argmax(-1, keepdim=True)
            chosen.tolist()

    run(10)
    start = time.perf_counter()
    run(steps)
    return steps * len(tokens) / (time.perf_counter() - start)


def eager_text(model: LanguageModel) -> Iterator[int]:
    """What `generate` does, with the model called for each token."""
    device, generator = model.embedding.weight.device, torch.Generator().manual_seed(0)
    state = model.init_state(1)
    model(torch.tensor([list(PROMPT[:-1])], device=device), state)
    token = PROMPT[-1]
    while True:
        logits, _ = model(torch.tensor([[token]], device=device), state)
        token = sample(logits[0, -1].float(), 0.8, 0.95, generator)
        yield token


def text_rate(tokens: Iterator[int], steps: int) -> float:
    list(islice(tokens, 10))
    start = time.perf_counter()
    list(islice(tokens, steps))
    return steps / (time.perf_counter() - start)


def op_inputs(model: LanguageModel, batch: int, device: str) -> list[list[Tensor]]:
    """What each layer's decode op gets in one step of a DecodeGraph."""
    calls: list[list[Tensor]] = []

    def recorded(*inputs: Tensor) -> Tensor:
        calls.append([x.clone() for x in inputs])
        return sdm_decode_step(*inputs)

    state = model.init_state(batch).at(torch.arange(batch, device=device))
    with mock.patch.object(layer, "sdm_decode_step", recorded):
        model(random_tokens(batch, device), state)
    return calls


@torch.no_grad()
def generate_rows(
    device: str = "cuda", config: LMConfig | None = None, steps: int = 400
) -> Iterator[dict[str, object]]:
    """First the main job's own generation, one sequence sampled on the host; then batches, greedily on the device."""
    torch.manual_seed(0)
    model = LanguageModel(config or LMConfig()).to(device)
    text = list(islice(generate(model, model, PROMPT, 0.8, 0.95, 0), 50))
    row: dict[str, object] = {"case": "batch 1, sampled by generate()"}
    if text == list(islice(eager_text(model), 50)):
        forwards = (model, torch.compile(model, fullgraph=True, dynamic=False))
        rates = [text_rate(generate(model, forward, PROMPT, 0.8, 0.95, 0), steps) for forward in forwards]
        yield row | _rates(text_rate(eager_text(model), steps), *rates)
    else:
        yield row | {"wrong": True}
    for batch in BATCHES:
        yield _batch_row(model, batch, device, steps)


def _rates(eager: float, graph: float, fused: float) -> dict[str, object]:
    return {
        "eager tokens/s": f"{eager:,.0f}",
        "graph tokens/s": f"{graph:,.0f}",
        "x eager": f"{graph / eager:.1f}",
        "graph of the compiled model tokens/s": f"{fused:,.0f}",
        "compiled x eager": f"{fused / eager:.1f}",
    }


def _batch_row(model: LanguageModel, batch: int, device: str, steps: int) -> dict[str, object]:
    row: dict[str, object] = {"case": f"batch {batch}, greedy"}
    if not equal(model, batch, device, EQUAL_STEPS):
        return row | {"wrong": True}
    state, tokens = model.init_state(batch), random_tokens(batch, device)
    eager = greedy_rate(lambda chosen: model(chosen, state)[0], tokens, steps)
    step = DecodeGraph(model, state, tokens)
    graph = greedy_rate(lambda chosen: step(chosen)[0], tokens, steps)
    compiled = DecodeGraph(torch.compile(model, fullgraph=True, dynamic=False), state, tokens)
    fused = greedy_rate(lambda chosen: compiled(chosen)[0], tokens, steps)
    calls = op_inputs(model, batch, device) * 80  # a replay of many, as `benchmarks.run --only decode` times it

    def bare() -> int:
        for inputs in calls:
            sdm_decode_step(*inputs)
        return len(calls)

    inside = measure.kernel_us(lambda: step(tokens), "decode_step")
    alone = measure.kernel_us(measure.captured(bare)[0].replay, "decode_step")
    figures = {
        "step us": f"{measure.milliseconds(lambda: step(tokens), calls=100) * 1e3:.1f}",
        "host us": f"{measure.host_milliseconds(lambda: step(tokens), repeats=51) * 1e3:.1f}",
        "decode op us per layer": f"{inside:.2f}",
        "the op alone us": f"{alone:.2f}",
        "op x alone": f"{inside / alone:.2f}",
        "the op's replay us": f"{measure.replay_ms(bare) * 1e3 / len(calls):.2f}",
    }
    return row | _rates(eager, graph, fused) | figures
