"""The benchmark cases: shapes, inputs with the skew that a product-key layer sees, published figures and floors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

RESULTS = Path(__file__).with_name("RESULTS.md")
BANDWIDTH = 4.25e12  # bytes per second that a device copy reaches on one H200


@dataclass(frozen=True)
class WriteReadCase:
    """One call of the write/read, with the published CUDA package's figures on one H200 (ms; GiB)."""

    name: str
    batch: int
    heads: int
    tokens: int
    writes: int
    reads: int
    chunk: int
    slots_per_head: int
    head_dim: int
    dtype: torch.dtype
    published_eager: float
    published_graph: float
    published_extra: float
    floor: float

    @property
    def streams(self) -> int:
        return self.batch * self.heads


_bf16, _fp32 = torch.bfloat16, torch.float32
WRITE_READ = [
    WriteReadCase("flagship-32k", 1, 2, 32768, 64, 64, 64, 65536, 1024, _bf16, 18.4, 13.9, 0.71, 5.95),
    WriteReadCase("flagship-b4", 4, 2, 8192, 64, 64, 64, 65536, 1024, _bf16, 14.2, 12.6, 0.76, 5.95),
    WriteReadCase("paper-1.4b", 4, 2, 4096, 128, 128, 256, 65536, 1024, _bf16, 11.6, 10.7, 1.13, 4.80),
    WriteReadCase("paper-7b", 1, 4, 4096, 128, 128, 256, 65536, 1024, _bf16, 7.9, 5.6, 0.56, 2.40),
    WriteReadCase("small-768", 4, 1, 4096, 64, 64, 64, 36864, 768, _bf16, 5.8, 2.85, 0.18, 1.09),
    WriteReadCase("small-fp32", 4, 1, 4096, 32, 32, 64, 16384, 256, _fp32, 3.3, 1.40, 0.11, 0.37),
    WriteReadCase("narrow-64", 8, 8, 4096, 16, 16, 64, 4096, 64, _bf16, 3.7, 2.42, 0.62, 0.35),
]


@dataclass(frozen=True)
class TrainCase:
    """The same call in training: every float input requires a gradient (ms; GiB, inputs included)."""

    call: WriteReadCase
    published_saving: float  # the forward alone
    published_eager: float
    published_graph: float
    published_peak: float
    floor: float


_TRAIN_FIGURES = [
    (20.2, 56.9, 48.6, 11.17, 21.9),
    (16.8, 45.2, 42.5, 11.88, 21.9),
    (13.4, 37.6, 37.0, 11.34, 17.6),
    (7.1, 22.3, 19.0, 5.67, 8.8),
    (5.6, 13.0, 10.1, 2.30, 4.0),
    (6.2, 13.9, 4.75, 0.81, 1.34),
    (3.9, 9.8, 6.88, 2.00, 1.31),
]
TRAIN = [TrainCase(call, *figures) for call, figures in zip(WRITE_READ, _TRAIN_FIGURES, strict=True)]


@dataclass(frozen=True)
class DecodeCase:
    """One decode step, with the published package's figures on one H200 (us)."""

    batch: int
    heads: int
    width: int  # writes, and reads
    head_dim: int
    published_eager: float
    published_graph: float
    floor: float
    slots_per_head: int = 65536

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {self.heads} heads, W = R = {self.width}, head_dim {self.head_dim}"


DECODE = [
    DecodeCase(1, 2, 64, 1024, 64, 2.60, 0.2),
    DecodeCase(8, 2, 64, 1024, 62, 4.20, 1.5),
    DecodeCase(32, 2, 64, 1024, 63, 10.98, 5.9),
    DecodeCase(128, 2, 64, 1024, 58, 61.0, 23.7, 16384),
    DecodeCase(1, 1, 128, 64, 51, 2.84, 0.0),
]

TOP_K = [(65536, 64, 0.30), (32768, 128, 0.237), (2, 64, 0.065)]
"""(rows, k, the published package's ms), two factors of 256, bfloat16."""


def product_key_slots(rows: int, k: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Slots and scores [rows, k] of random projections, in ascending slot order: the skew that a real layer sees."""
    slots, scores = [], []
    for first in range(0, rows, 16384):
        count = min(16384, rows - first)
        raw = torch.randn(count, 2, side, device=generator.device, generator=generator)
        width = min(k, side)
        (best_a, column_a), (best_b, column_b) = raw[:, 0].topk(width), raw[:, 1].topk(width)
        score, pair = (best_a[:, :, None] + best_b[:, None, :]).flatten(1).topk(k)
        slot = column_a.gather(1, pair // width) * side + column_b.gather(1, pair % width)
        slot, order = slot.sort(-1)
        slots.append(slot)
        scores.append(score.gather(1, order))
    return torch.cat(slots), torch.cat(scores)


def write_read_inputs(case: WriteReadCase, device: str, tokens: int | None = None, seed: int = 0) -> list[Tensor]:
    """memory, k_idx, k_val, v, beta, g, q_idx, q_val of a case, or of its first so many tokens' worth of shape."""
    generator = torch.Generator(device=device).manual_seed(seed)
    streams, count, side = case.streams, tokens or case.tokens, int(case.slots_per_head**0.5)
    first_row = (torch.arange(streams, device=device) * case.slots_per_head).view(streams, 1, 1)

    def sides(width: int) -> tuple[Tensor, Tensor]:
        slots, scores = product_key_slots(streams * count, width, side, generator)
        weights = scores.view(streams, count, width).softmax(-1).to(case.dtype)
        return slots.view(streams, count, width) + first_row, weights

    k_idx, k_val = sides(case.writes)
    q_idx, q_val = sides(case.reads)
    rows = streams * case.slots_per_head
    memory = torch.randn(rows, case.head_dim, device=device, generator=generator).mul_(case.head_dim**-0.5)
    v = torch.randn(streams, count, case.head_dim, device=device, generator=generator).to(case.dtype)
    beta = torch.rand(streams, count, 1, device=device, generator=generator)
    g = -torch.rand(streams, count, 1, device=device, generator=generator) * 0.5
    return [memory.to(case.dtype), k_idx, k_val, v, beta, g, q_idx, q_val]


def few_tokens(case: WriteReadCase, device: str) -> list[Tensor]:
    """Four chunks of a case, the last one half full, on a small bank: what float64 on the CPU can follow."""
    slots = min(case.slots_per_head, 4096)
    return write_read_inputs(replace(case, slots_per_head=slots), device, 3 * case.chunk + case.chunk // 2)


def decode_inputs(case: DecodeCase, device: str, seed: int = 0, sets: int = 1) -> list[list[Tensor]]:
    """One bank, and so many sets of inputs: [memory, k_idx, k_val, v, beta, g, q_idx, q_val] each."""
    width, slots, head_dim = case.width, case.slots_per_head, case.head_dim
    shape = WriteReadCase("", case.batch, case.heads, sets, width, width, 1, slots, head_dim, _bf16, 0, 0, 0, 0)
    memory, *inputs = write_read_inputs(shape, device, seed=seed)
    return [[memory, *(x[:, i].contiguous() for x in inputs)] for i in range(sets)]
