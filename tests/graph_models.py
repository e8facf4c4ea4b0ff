"""What the tests of DecodeGraph run: a step that is exact and nothing of this package, and a small language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sdm_compile.lm import LanguageModel, LMConfig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = LMConfig(
    dim=16, num_layers=2, hidden_dim=24, conv_width=3, num_heads=2, slots_per_head=16, num_writes=3, num_reads=4
)


class Sums:
    """A pool of running sums [capacity, n]; no pytree, and nothing of this package."""

    def __init__(self, total: Tensor, entries: Tensor | None = None) -> None:
        self.total, self.entries = total, entries

    def at(self, entries: Tensor | None) -> Sums:
        return Sums(self.total, entries)


def add(x: Tensor, state: Sums) -> dict[str, Any]:
    """Adds x [B, n] to the entries' sums, by a matmul that is exact for small integers."""
    entries = state.entries
    chosen = (entries == torch.arange(len(state.total), device=x.device)[:, None]).to(x.dtype)  # [capacity, B]
    state.total.add_(chosen @ x)
    return {"sums": chosen.T @ state.total, "rows": x.sum(0), "state": state, "total": state.total, "name": "sums"}


def integers(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randint(-4, 5, shape, device=device).float()


def make_sums(device: str, capacity: int = 4) -> Sums:
    return Sums(integers(capacity, 3, device=device))


def make_model(device: str = "cpu") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(CONFIG).to(device).eval()


def random_tokens(batch: int, device: str) -> Tensor:
    return torch.randint(256, (batch, 1), device=device)


def tensors_of(state: Any) -> list[Tensor]:
    return [x.clone() for x in pytree.tree_leaves(state)]
