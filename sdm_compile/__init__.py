"""Sparse Delta Memory as first-class PyTorch: `torch.library` ops, a layer, and a small language model."""

from .config import SparseDeltaMemoryConfig
from .graphs import CaptureError, DecodeGraph, StatePool, TrainGraph
from .layer import SparseDeltaMemory
from .lm import LanguageModel, LMConfig, LMPending, LMState
from .ops import (
    SDMPending,
    UnsupportedConfigurationError,
    last_dispatch,
    product_key_topk,
    repeated_write_slots,
    sdm_commit_,
    sdm_decode_step,
    sdm_draft,
    sdm_write_read,
    sdm_write_read_,
)
from .state import SDMState

__all__ = [
    "CaptureError",
    "DecodeGraph",
    "LMConfig",
    "LMPending",
    "LMState",
    "LanguageModel",
    "SDMPending",
    "SDMState",
    "SparseDeltaMemory",
    "SparseDeltaMemoryConfig",
    "StatePool",
    "TrainGraph",
    "UnsupportedConfigurationError",
    "last_dispatch",
    "product_key_topk",
    "repeated_write_slots",
    "sdm_commit_",
    "sdm_decode_step",
    "sdm_draft",
    "sdm_write_read",
    "sdm_write_read_",
]

__version__ = "0.1.0"
