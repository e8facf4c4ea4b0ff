"""What the tests of StatePool put into one: a layer, a model, and what an entry holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sdm_compile import SparseDeltaMemory
from sdm_compile.lm import LanguageModel, LMConfig, LMState

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BANKS = [torch.float32, torch.bfloat16]
CAPACITY, HEADS, SLOTS, DIM = 4, 2, 16, 6  # of the banks here; H * D is a layer's dim
CONFIG = LMConfig(
    dim=12, num_layers=2, hidden_dim=20, conv_width=3,
    num_heads=HEADS, slots_per_head=SLOTS, num_writes=3, num_reads=5, chunk_size=4,
)  # fmt: skip


def part(state: Any, entry: int, capacity: int = CAPACITY) -> list[Tensor]:
    """A copy of what an entry holds."""
    return [leaf.unflatten(0, (capacity, -1))[entry].clone() for leaf in pytree.tree_leaves(state)]


def make_layer(device: str) -> SparseDeltaMemory:
    torch.manual_seed(0)
    return SparseDeltaMemory(CONFIG.sdm()).to(device).eval()


def make_model(device: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(CONFIG).to(device).eval()


def with_banks(state: LMState, dtype: torch.dtype) -> LMState:
    return LMState([memory.to(dtype) for memory in state.memories], state.tails)
