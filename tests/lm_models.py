"""What the tests of the language model, its training and its generation run: a small model."""

from __future__ import annotations

import torch

from sdm_compile.lm import LanguageModel, LMConfig

CONFIG = LMConfig(
    dim=12, num_layers=2, hidden_dim=20, conv_width=3,
    num_heads=2, slots_per_head=16, num_writes=3, num_reads=5, chunk_size=4,
)  # fmt: skip


def make_model() -> LanguageModel:
    """In float64, where no rounding can change which slots are the best."""
    torch.manual_seed(0)
    return LanguageModel(CONFIG).double()
