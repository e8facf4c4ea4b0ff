"""The layer trains on a GPU: eager, compiled, under autocast, and as one captured step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from sdm_compile import SparseDeltaMemory, SparseDeltaMemoryConfig

pytestmark = pytest.mark.gpu

WAYS = ["eager", "compiled"]
PRECISIONS = ["float32", "bfloat16", "autocast"]


class Regression(nn.Module):
    """One layer on a stream of vectors, asked for the stream three tokens earlier."""

    def __init__(self) -> None:
        super().__init__()
        config = SparseDeltaMemoryConfig(
            dim=64, num_heads=2, slots_per_head=64, num_writes=8, num_reads=8, chunk_size=16
        )
        self.layer = SparseDeltaMemory(config)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x)
        return (y[:, 3:].float() - x[:, :-3].float()).square().mean()


def make(precision: str) -> tuple[Regression, Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = Regression().to("cuda", dtype)
    return model, torch.randn(2, 100, 64, device="cuda").to(dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", WAYS)
def test_the_loss_falls(way: str, precision: str) -> None:
    model, x = make(precision)
    loss_of: Callable[[Tensor], Tensor] = torch.compile(model, fullgraph=True) if way == "compiled" else model
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16) if precision == "autocast" else nullcontext():
            loss = loss_of(x)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_a_whole_step_as_one_graph() -> None:
    """Forward, backward and optimizer, replayed on inputs that change, against the same steps run one by one."""
    model, x = make("float32")
    other = copy.deepcopy(model)
    batches = [torch.randn_like(x) for _ in range(4)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=3e-3, capturable=True) for m in (model, other)]

    def step(module: Regression, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = module(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for module, optimizer in zip((model, other), optimizers, strict=True):
            step(module, optimizer, batches[0])
    torch.cuda.current_stream().wait_stream(warm_up)
    graph, static = torch.cuda.CUDAGraph(), batches[0].clone()
    with torch.cuda.graph(graph):
        loss = step(model, optimizers[0], static)
    for batch in batches[1:]:
        static.copy_(batch)
        graph.replay()
        torch.testing.assert_close(loss, step(other, optimizers[1], batch), rtol=1e-4, atol=1e-5)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
