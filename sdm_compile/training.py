"""Training of the language model: its settings, one step, and evaluation.

Everything that a step depends on is in the Trainer's tensors and its step number; training draws no random numbers but
the windows, which are a function of the step. So a run resumed from a checkpoint continues bit for bit.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .graphs import TrainGraph
from .lm import LanguageModel, LMConfig, LMState
from .text import Corpus

Forward = Callable[..., tuple[Tensor, LMState]]  # a LanguageModel, compiled or not

MAX_NORM = 1.0  # of all gradients together
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    Args:
        steps: number of optimizer steps.
        batch, length: windows per step, and bytes per window.
        lr: highest learning rate; it rises over `warmup` steps and then falls along a cosine to a twentieth.
        weight_decay: of the matrices, apart from the embedding and the SDM layers' own exceptions.
        seed: of the initial weights and of the windows.
        text: files to learn from; none for Python's help topics.
    Raises:
        ValueError: a value out of range.
    """

    steps: int = 160
    batch: int = 8
    length: int = 256
    lr: float = 5e-3
    warmup: int = 15
    weight_decay: float = 0.1
    seed: int = 0
    text: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("batch", 1), ("length", 1), ("warmup", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.seed > MAX_SEED:
            raise ValueError(f"seed must be at most {MAX_SEED}, got {self.seed}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be a number of at least 0, got {self.weight_decay}")

    def learning_rate(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Trainer:
    """A language model being trained.

    Args:
        model_config, config: sizes and settings.
        device: where it is trained.
    """

    def __init__(self, model_config: LMConfig, config: TrainConfig, device: torch.device) -> None:
        self.config = config
        torch.manual_seed(config.seed)
        self.model = LanguageModel(model_config).to(device)
        self.device = device
        self.step = 0
        self.start_bits: float | None = None  # validation bits per byte before the first step
        decayed: list[nn.Parameter] = []
        kept: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            plain = parameter.ndim < 2 or name.startswith("embedding") or getattr(parameter, "_no_weight_decay", False)
            (kept if plain else decayed).append(parameter)
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
        captured = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), fused=True, capturable=captured)
        self._graph: tuple[Forward, TrainGraph] | None = None
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self._names = [names[parameter] for parameter in decayed + kept]  # in the optimizer's order

    def train_step(self, forward: Forward, corpus: Corpus) -> Tensor:
        """One optimizer step; returns the batch's loss, in nats per byte. On a GPU it is one replay of a graph.

        An interruption leaves either all of the step done or none of it.
        """
        config = self.config
        windows = corpus.batch(self.step, config.seed, config.batch, config.length)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate(self.step)
        if self.device.type == "cuda":
            graph = self._graph_of(forward)
            with interrupts_held():
                loss = graph.step(windows)
                self.step += 1
            return loss
        loss = next_byte_loss(forward, windows.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        with interrupts_held():
            self.optimizer.step()
            self.step += 1
        return loss.detach()

    def _graph_of(self, forward: Forward) -> TrainGraph:
        """The graph of steps through `forward`; that of the latest one is kept."""
        if self._graph is None or self._graph[0] is not forward:
            graph = TrainGraph(self.model, lambda _, x: next_byte_loss(forward, x), self.optimizer, max_norm=MAX_NORM)
            self._graph = forward, graph
        return self._graph[1]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that training depends on, under `model.` and `optimizer.` names."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{self._names[i]}.{key}": value for key, value in state.items()}
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Takes over what `tensors()` gave."""
        load_model(self.model, tensors)
        state: dict[int, dict[str, Tensor]] = {}
        for i, name in enumerate(self._names):
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"optimizer.{name}.{key}" in tensors]
            if keys:
                state[i] = {key: tensors[f"optimizer.{name}.{key}"] for key in keys}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})


def next_byte_loss(forward: Forward, windows: Tensor) -> Tensor:
    """Mean loss over windows [B, T + 1] of predicting each byte from those before it, in nats."""
    logits, _ = forward(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def load_model(model: LanguageModel, tensors: dict[str, Tensor]) -> None:
    """Loads the `model.` tensors of a checkpoint into a model.

    Raises:
        ValueError: they are not those of such a model.
    """
    try:
        model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    except RuntimeError as error:
        raise ValueError(
            f"the checkpoint's tensors are not those of its model: {' '.join(str(error).split())}"
        ) from error


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds a Ctrl-C back until the block has ended, so that the block is done whole."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is ever interrupted
        yield
        return
    received = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        signal.raise_signal(signal.SIGINT)


@torch.no_grad()
def evaluate(model: LanguageModel, text: Tensor, batch: int, length: int) -> float:
    """Bits per byte of a text [N] uint8, N >= 2.

    The text is cut into `batch` long streams; each is read in segments of `length` bytes through the decode state, so
    that every byte is predicted from all of its stream before it. The model runs uncompiled here: reading the text
    twice in a run is quicker than one more compilation.
    """
    device = model.embedding.weight.device
    predicted = len(text) - 1
    segments = -(-predicted // (batch * length))
    padded = batch * segments * length
    inputs = F.pad(text[:-1].long(), (0, padded - predicted)).view(batch, segments, length).to(device)
    targets = F.pad(text[1:].long(), (0, padded - predicted), value=-100).view(batch, segments, length).to(device)
    state = model.init_state(batch)
    nats = 0.0
    for segment in range(segments):
        logits, state = model(inputs[:, segment], state)
        target = targets[:, segment].flatten()
        nats += F.cross_entropy(logits.flatten(0, 1).float(), target, ignore_index=-100, reduction="sum").item()
    return nats / predicted / math.log(2)
