"""Generation of text, one byte at a time through the decode state: on CUDA, one replay of a graph per byte."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .graphs import DecodeGraph
from .lm import LanguageModel
from .training import MAX_SEED, Forward


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draws a token from logits [V].

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: only the likeliest tokens that together reach this probability are drawn from.
        generator: of the CPU, so that a seed means the same on every device.
    Raises:
        ValueError: the logits are not finite.
    """
    if temperature == 0:
        return int(logits.argmax())
    # One copy from the device, and few operations: on a GPU this takes longer than a small model's forward.
    logits = logits.cpu().double()
    scaled = (logits - logits.max()) / temperature  # which overflows for no temperature
    probabilities, tokens = scaled.softmax(-1).sort(descending=True, stable=True)
    total = probabilities.cumsum(0)
    last = min(int(torch.searchsorted(total, top_p)), len(total) - 1)  # the first that reaches top_p
    if not total[last] > 0:
        raise ValueError("the model's logits are not finite")
    drawn = total[last] * torch.rand((), dtype=torch.float64, generator=generator)
    return int(tokens[min(int(torch.searchsorted(total, drawn, right=True)), last)])


def generate(
    model: LanguageModel, forward: Forward, prompt: bytes, temperature: float, top_p: float, seed: int
) -> Iterator[int]:
    """The bytes that follow the prompt, one after the other, without end.

    Args:
        model, forward: the model, and the model or its compiled form, through which every byte goes by itself, as a
            `DecodeGraph`. The prompt goes through the model in one call.
        prompt: at least one byte.
        temperature, top_p: see `sample`.
        seed: of the draws.
    Raises:
        ValueError: an empty prompt, a negative temperature, top_p outside (0, 1], or a seed outside 0 to 2**32 - 1.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least one byte")
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be from 0 to {MAX_SEED}, got {seed}")
    return _generate(model, forward, prompt, temperature, top_p, torch.Generator().manual_seed(seed))


@torch.no_grad()
def _generate(
    model: LanguageModel, forward: Forward, prompt: bytes, temperature: float, top_p: float, generator: torch.Generator
) -> Iterator[int]:
    device = model.embedding.weight.device
    state = model.init_state(1)
    if len(prompt) > 1:
        model(torch.tensor([list(prompt[:-1])], device=device), state)
    tokens = torch.tensor([[prompt[-1]]], device=device)
    step = DecodeGraph(forward, state, tokens, pooled=False)
    while True:
        logits, _ = step(tokens)
        token = sample(logits[0, -1].float(), temperature, top_p, generator)
        yield token
        tokens.fill_(token)


class TextStream:
    """Turns bytes into text piece by piece, and ends at the first stop string.

    Args:
        stops: strings none of which is ever shown, nor anything after it.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = [stop for stop in stops if stop]
        self.stopped = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # text that may be the beginning of a stop string

    def feed(self, token: int | None) -> str:
        """Takes the next byte, or None for the end, and returns the text that can be shown by now."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(b"" if token is None else bytes([token]), final=token is None)
        ends = [text.index(stop) for stop in self.stops if stop in text]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = 0 if token is None else max((self._overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of the text with which the stop string begins."""
        return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))


@torch.no_grad()
def decode_differences(model: LanguageModel, forward: Forward, tokens: Tensor) -> Tensor:
    """Largest difference of log-probabilities between decoding and the full forward, per decoded token: [N - N // 2].

    The first half of tokens [N] is prefilled in one call, the rest decoded one token at a time, as `generate` does.
    """
    tokens = tokens.long().to(model.embedding.weight.device)[None]
    half = tokens.shape[1] // 2
    full, _ = model(tokens)
    _, state = model(tokens[:, :half], model.init_state(1))
    step = DecodeGraph(forward, state, tokens[:, half : half + 1], pooled=False)
    parts = []
    for i in range(half, tokens.shape[1]):
        logits, _ = step(tokens[:, i : i + 1])
        parts.append(logits.clone())
    decoded = torch.cat(parts, dim=1)
    return (decoded.float().log_softmax(-1) - full[:, half:].float().log_softmax(-1)).abs().amax(-1)[0]
