"""How a call on CUDA is cut into slabs of steps and groups of streams, and how those run: forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from .bound import MAX_GRID, aligned, launches_are_watched
from .launch import Groups, replay, run_plainly
from .layout import num_steps
from .saved import Saved
from .situation import Situation, current_situation
from .step_table import StepAddress
from .working_memory import Fill

SLAB_STEPS = 64  # of a slab at most: what one captured loop, or one launch, holds
MAX_FORMS = 64  # of slabs, that are remembered
SLABS = 4  # slabs that a call is cut into at least, as far as its steps go: one is prepared under another's steps


def working_bytes(bank: Tensor, streams: int, training: bool) -> int:
    """Working memory that a call may take, for two slabs: more where the bank or the batch is larger, never with T.

    A training call keeps rows of gigabytes beside: with banks below 2 GiB it takes less. Measured on an H200 with one
    of 1 GiB, ms of a train step with 160 and 225 MiB: 38.5 and 38.3 at a chunk of 64, 30.8 and 30.2 at one of 256.
    """
    MiB = 2**20
    size = bank.numel() * bank.element_size()
    most = min(max(160 * MiB, int(0.22 * size)), 480 * MiB) if training else 480 * MiB
    by_bank = min(int(0.7 * size), most)
    by_streams = min(streams * (6 if training else 4), 1024) * MiB
    return max((32 if training else 64) * MiB, by_bank, by_streams)


def slab_steps(steps: int, fits: Callable[[int], bool]) -> int:
    """Steps per slab, a power of two, of a call of so many steps; `fits`: whether so many fit into working memory.

    Measured on an H200 with launches for each step, ms per call: 512 steps in 8 slabs 12.9, in 15 13.2; 128 steps in
    5, 10 and 20 slabs 12.5, 12.0 and 12.1; 16 steps of a chunk of 256 in 2, 4 and 8 slabs 5.6, 5.0 and 5.1, and, twice
    as large, in 4 and 8 9.6 and 10.1.
    """
    size = 1 << (max(1, min(SLAB_STEPS, steps // SLABS)).bit_length() - 1)
    while size > 1 and not fits(size):
        size //= 2
    return size


@dataclass(frozen=True)
class Shape:
    """Everything that a slab's launches depend on, besides addresses."""

    steps: int
    streams: int
    chunk: int
    writes: int
    reads: int
    gates: int
    head_dim: int
    num_slots: int
    dtype: torch.dtype
    precision: str

    @staticmethod
    def of(bank: Tensor, inputs: Sequence[Tensor], chunk: int) -> Shape:
        """A slab of one step of one stream of a call."""
        k_idx, _, _, _, g, q_idx, _ = inputs
        sizes = (chunk, k_idx.shape[2], q_idx.shape[2], g.shape[2], bank.shape[1], bank.shape[0])
        return Shape(1, 1, *sizes, bank.dtype, torch.get_float32_matmul_precision())


ShapeT = TypeVar("ShapeT", bound=Shape)


def step_address(x: Tensor, first: int) -> StepAddress:
    """Of x [steps, *], from the step `first` on."""
    return StepAddress(x[first], x.stride(0) * x.element_size())


def run_loops(
    kind: Hashable,
    tensors: Sequence[Tensor],
    loops: Callable[[], Groups],
    addressed: Sequence[Tensor],
    fill: Fill | None,
) -> None:
    """Runs a call's loops as the situation asks for, see `replay`; `addressed` is what a table would have to name."""
    device = tensors[0].device
    capturing = current_situation(device) is Situation.CAPTURING
    # A tensor at an odd address would need kernels of its own in every captured loop.
    if aligned([x.data_ptr() for x in addressed]) and not (capturing or launches_are_watched()):
        replay((kind, torch.get_float32_matmul_precision()), tensors, loops, device, fill)
    else:
        run_plainly(loops(), device, fill)


def of_streams(saved: Saved, streams: slice) -> Saved:
    """Of what all streams [P] saved, what some of them did; the snapshot's rows by step, too.

    Versions are numbered over all of them.
    """
    steps, all_streams = saved.X.shape[:2]
    rows = {name: getattr(saved, name) for name in ("snapshot", "scales")}
    rows = {name: x.view(steps, all_streams, len(x) // (steps * all_streams), *x.shape[1:]) for name, x in rows.items()}
    numbered = {name: getattr(saved, name) for name in ("previous", "latest")}
    parts = {name: x[:, streams] for name, x in {**saved._asdict(), **rows}.items() if name not in numbered}
    return Saved(**{name: x.flatten(1, 2) if name in rows else x for name, x in parts.items()}, **numbered)


Cut = tuple[slice, list[tuple[int, int]]]


def cut(
    shape: ShapeT,
    bank: Tensor,
    inputs: Sequence[Tensor],
    slab_bytes: Callable[[ShapeT], int],
    training: bool,
    gently: bool = False,
) -> Iterator[Cut]:
    """Groups of a call's streams, and the first step and the steps of each one's slabs, in order.

    shape: a slab of one step of one stream. slab_bytes: the working memory of a slab. A slab has a power of two of
    steps, and what is left at the end a half, a quarter and so on of it. gently: the first one is cut into a quarter, a
    quarter and a half, as no steps run yet under which it could be prepared.
    """
    streams, tokens, _ = inputs[0].shape
    if not streams or not tokens:
        return
    limit, left = working_bytes(bank, streams, training) // 2, num_steps(tokens, shape.chunk)
    most = max(1, min(streams, limit // slab_bytes(shape), MAX_GRID // shape.chunk))
    group = -(-streams // -(-streams // most))  # as even as it goes

    def fits(steps: int) -> bool:
        return steps * group <= MAX_GRID and slab_bytes(replace(shape, steps=steps, streams=group)) <= limit

    steps, first, slabs = slab_steps(left, fits), 0, []
    short = [steps // 2, steps // 4, steps // 4] if gently and steps >= 4 else []
    while left > 0:
        size = short.pop() if short else steps
        while size > left:
            size //= 2
        slabs.append((first, size))
        first, left = first + size, left - size
    for p in range(0, streams, group):
        yield slice(p, min(p + group, streams)), slabs
