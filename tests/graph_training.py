"""What the tests of TrainGraph train: a model and its twin, which takes the same steps plainly.

The fixture `way` of `tests/graphs` says how the steps of the first are run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdm_compile import SparseDeltaMemory, SparseDeltaMemoryConfig
from sdm_compile.graphs import TrainGraph
from tests.harness import assert_same_bits

DIM = 12
WAYS = ["eager", "python graphs", pytest.param("cuda graphs", marks=pytest.mark.gpu)]
capturing = pytest.mark.parametrize("way", WAYS[1:], indirect=True)


class Model(nn.Module):
    """A layer between two norms, asked for the stream one token earlier; it has a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        config = SparseDeltaMemoryConfig(
            dim=DIM, num_heads=2, slots_per_head=16, num_writes=3, num_reads=4, chunk_size=8
        )
        self.norm = nn.BatchNorm1d(DIM)
        self.layer = SparseDeltaMemory(config)
        self.dropout = nn.Dropout(0.1)
        self.scales = [torch.ones(DIM)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        self.scales = [fn(x) for x in self.scales]
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.dropout(self.layer(x)[0])


def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


@dataclass
class Way:
    """How TrainGraph runs a step: the device, whether it captures, and whether graphs are made of Python."""

    device: str
    captures: bool
    models: list[nn.Module] = field(default_factory=list)  # what a capture of Python leaves as it was

    def model(self, seed: int = 0) -> Model:
        torch.manual_seed(seed)
        model = Model().to(self.device)
        self.models.append(model)
        return model

    def optimizer(self, model: nn.Module, kind: str = "AdamW", lr: float = 0.02) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {
            "AdamW": {"fused": True, "weight_decay": 0.1},
            "Adam": {"foreach": self.device == "cuda"},
            "SGD": {"fused": True, "momentum": 0.9, "dampening": 0.5},
            "RMSprop": {"foreach": self.device == "cuda"},
        }[kind]
        if self.device == "cuda" and kind != "SGD":
            settings["capturable"] = True
        # A number is rounded once more where it becomes a tensor: the twin, which has no TrainGraph, begins with one.
        rate = torch.tensor(lr, device=self.device) if self.captures else lr
        return getattr(torch.optim, kind)(model.parameters(), lr=rate, **settings)

    def batches(self, number: int, tokens: int = 10, batch: int = 4) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(7)
        xs = [torch.randn(batch, tokens, DIM, generator=generator) for _ in range(number)]
        return [{"x": x.to(self.device), "y": x.roll(1, 1).to(self.device)} for x in xs]


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    accumulate: int = 1,
    max_norm: float | None = None,
    autocast: torch.dtype | None = None,
) -> list[Tensor]:
    """The step as one writes it: the loss, and the norm where there is one."""
    optimizer.zero_grad()
    size = len(batch["x"]) // accumulate
    losses = []
    for i in range(accumulate):
        part = {name: x[i * size : (i + 1) * size] for name, x in batch.items()}
        with torch.autocast(batch["x"].device.type, autocast) if autocast else nullcontext():
            loss = loss_fn(model, part)
        (loss / accumulate if accumulate > 1 else loss).backward()
        losses.append(loss.detach())
    norm = [] if max_norm is None else [nn.utils.clip_grad_norm_(model.parameters(), max_norm)]
    optimizer.step()
    return [torch.stack(losses).mean() if accumulate > 1 else losses[0], *norm]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [x for p in model.parameters() for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    return [x.detach().clone() for x in (*model.parameters(), *model.buffers(), *states)]


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """As a scheduler does it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Pair:
    """A TrainGraph and a twin that takes the same steps plainly, both with random numbers of the same seeds."""

    def __init__(self, way: Way, kind: str = "AdamW", **settings: Any) -> None:
        self.settings = {name: value for name, value in settings.items() if name != "max_graphs"}
        self.model, self.twin = way.model(), way.model()
        self.optimizer, self.twins = way.optimizer(self.model, kind), way.optimizer(self.twin, kind)
        self.graph = TrainGraph(self.model, loss_fn, self.optimizer, **settings)
        self.steps = 0

    def both(self, change: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
        change(self.model, self.optimizer)
        change(self.twin, self.twins)

    def step(self, batch: dict[str, Tensor]) -> None:
        """One step of both, with the same result."""
        self.steps += 1
        torch.manual_seed(self.steps)
        got = [self.graph.step(batch)]
        random = torch.cuda.get_rng_state() if batch["x"].is_cuda else torch.get_rng_state()
        got += [] if self.graph.grad_norm is None else [self.graph.grad_norm]
        torch.manual_seed(self.steps)
        assert_same_bits(got, plain_step(self.twin, self.twins, batch, **self.settings))
        assert torch.equal(random, torch.cuda.get_rng_state() if batch["x"].is_cuda else torch.get_rng_state())

    def check(self) -> None:
        assert_same_bits(everything(self.model, self.optimizer), everything(self.twin, self.twins))
        assert all(p.grad is None for p in self.model.parameters())
