"""The write/read on CUDA: slabs of steps, each staged and coupled at once, its steps run one after the other.

A slab's working memory is bounded, so that a call that saves nothing needs no more for a longer sequence; a batch whose
single step would exceed the bound runs in groups of streams. Neither changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .decay_write_kernels import launch_decay_write, write_warps
from .dual_matmul_kernels import launch_lower_matmul
from .launch import launches_early, replay, run_plainly
from .layout import ChunkFields, Staged, StepGroups, empty, empty_chunk_fields, num_steps
from .phase1_kernels import Phase1Scratch, empty_phase1_scratch, launch_phase1
from .repeats import repeat_count
from .situation import Situation, current_situation
from .solve_kernels import launch_solve
from .staging_kernels import launch_stage_inputs
from .token_gather_kernels import launch_token_gather

SLAB_STEPS = 64  # steps of a slab at most: what one captured loop holds


def working_bytes(bank: Tensor, streams: int) -> int:
    """Working memory that a call may take, for two slabs: more where the bank or the batch is larger, never with T."""
    by_bank = min(bank.numel() * bank.element_size() * 7 // 10, 288 * 2**20)
    return max(64 * 2**20, by_bank, streams * 4 * 2**20)


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


class Slab(NamedTuple):
    """Working memory of some steps: the chunks' fields, and u, inter and delta."""

    staged: Staged
    silent: Tensor  # [steps, P, C] int8
    fields: ChunkFields
    scratch: Phase1Scratch
    X: Tensor  # [steps, P, C, C]
    QX: Tensor
    u: Tensor  # [steps, P, C, D] float32
    inter: Tensor
    delta: Tensor  # [P, C, D] float32


def step_bytes(chunk: int, writes: int, reads: int, head_dim: int, element: int) -> int:
    """Working memory of one stream's step, for a bank of `element` bytes: what `_empty_slab` allocates."""
    per_token = head_dim * (8 + element) + reads * (8 + element) + writes * (60 + element) + 16 * chunk
    return chunk * per_token


def _empty_slab(like: Tensor, shape: Shape) -> Slab:
    lead = (shape.steps, shape.streams, shape.chunk)
    make = partial(empty, like=like)
    staged = Staged(
        k_idx=make((*lead, shape.writes), dtype=torch.int32),
        k_val=make((*lead, shape.writes), dtype=shape.dtype),
        v=make((*lead, shape.head_dim), dtype=shape.dtype),
        beta=make((*lead, 1), dtype=torch.float32),
        g=make((*lead, shape.gates), dtype=torch.float32),
        q_idx=make((*lead, shape.reads), dtype=torch.int32),
        q_val=make((*lead, shape.reads), dtype=shape.dtype),
    )
    chunks = shape.steps * shape.streams
    return Slab(
        staged=staged,
        silent=make(lead, dtype=torch.int8),
        fields=empty_chunk_fields(lead[:2], shape.chunk, shape.writes, shape.reads, like, torch.float32),
        scratch=empty_phase1_scratch(chunks, shape.chunk * shape.writes, like),
        X=make((*lead, shape.chunk), dtype=torch.float32),
        QX=make((*lead, shape.chunk), dtype=torch.float32),
        u=make((*lead, shape.head_dim), dtype=torch.float32),
        inter=make((*lead, shape.head_dim), dtype=torch.float32),
        delta=make((*lead[1:], shape.head_dim), dtype=torch.float32),
    )


class _SlabLoop:
    """One slab's launches, on some of a call's streams and tokens."""

    def __init__(
        self, bank: Tensor, inputs: Sequence[Tensor], readings: Tensor, shape: Shape, first_token: int
    ) -> None:
        self.bank, self.inputs, self.readings = bank, inputs, readings
        self.signature, self.first_token = shape, first_token

    def make_memory(self) -> Slab:
        slab = _empty_slab(self.bank, self.signature)
        for ids in (slab.staged.k_idx, slab.staged.q_idx, slab.fields.group_slot):
            ids.fill_(-1)
        return slab

    def stage(self, slab: Slab) -> None:
        repeats = repeat_count(self.bank.device)
        launch_stage_inputs(self.inputs, slab.staged, slab.silent, repeats, self.bank.shape[0], self.first_token)

    def couple(self, slab: Slab) -> None:
        staged, fields = slab.staged, slab.fields
        launch_phase1(staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val, fields, slab.scratch)
        launch_solve(fields.A, fields.QK, staged.beta, slab.X, slab.QX)

    def steps(self, slab: Slab, table: Tensor | None) -> None:
        staged, fields, bank = slab.staged, slab.fields, self.bank
        by_step = (self.signature.steps, *fields.order.shape[1:])
        first_weight, first_token = slab.scratch.first_weight.view(by_step), slab.scratch.first_token.view(by_step)
        shape = self.signature
        warps = write_warps(shape.streams, shape.chunk, shape.writes, shape.head_dim)
        early = launches_early(bank.device, shape.chunk, warps)
        for s in range(self.signature.steps):
            launch_token_gather(
                bank,
                table,
                *(staged.k_idx[s], fields.k_eff[s], staged.q_idx[s], fields.q_w[s]),
                residual=(staged.v[s], staged.beta[s]),
                retrieved=slab.u[s],
                inter=slab.inter[s],
            )
            launch_lower_matmul(slab.X[s], slab.u[s], slab.delta, bank.dtype, early=early)
            groups = StepGroups(*(getattr(fields, name)[s] for name in StepGroups._fields))
            launch_decay_write(bank, table, slab.delta, groups, (first_weight[s], first_token[s]), early=early)

    def read(self, slab: Slab) -> None:
        launch_lower_matmul(
            slab.QX.flatten(0, 1),
            slab.u.flatten(0, 1),
            self.readings,
            self.bank.dtype,
            plus=slab.inter.flatten(0, 1),
            unstage=(self.first_token, self.signature.streams),
        )


def write_read_cuda(bank: Tensor, inputs: Sequence[Tensor], chunk_size: int, readings: Tensor) -> None:
    """Advances `bank` in place over all tokens and fills `readings` [P, T, D], both contiguous. Saves nothing."""
    streams, tokens, writes = inputs[0].shape
    if not streams or not tokens:
        return
    each = step_bytes(chunk_size, writes, inputs[5].shape[2], bank.shape[1], bank.element_size())
    limit = working_bytes(bank, streams) // 2
    group = max(1, min(streams, limit // each))
    # A bank at an odd address would need kernels of its own in every captured loop.
    plain = current_situation(bank.device) is Situation.CAPTURING or bank.data_ptr() % 16 != 0
    for p in range(0, streams, group):
        part = tuple(x[p : p + group] for x in inputs)
        most = max(1, min(SLAB_STEPS, limit // (each * part[0].shape[0])))
        loops = _slab_loops(bank, part, chunk_size, readings[p : p + group], most)
        if plain:
            run_plainly(loops, bank)
        else:
            replay(loops, bank)


def _slab_loops(
    bank: Tensor, inputs: Sequence[Tensor], chunk_size: int, readings: Tensor, most: int
) -> list[_SlabLoop]:
    """The slabs of a call, of `most` steps; a short rest is padded to a half, a quarter and so on of that."""
    streams, tokens, writes = inputs[0].shape
    reads, gates, (num_slots, width) = inputs[5].shape[2], inputs[4].shape[2], bank.shape
    precision = torch.get_float32_matmul_precision()
    loops, first, left = [], 0, num_steps(tokens, chunk_size)
    while left > 0:
        steps = most
        while steps // 2 >= left:
            steps //= 2
        shape = Shape(steps, streams, chunk_size, writes, reads, gates, width, num_slots, bank.dtype, precision)
        loops.append(_SlabLoop(bank, inputs, readings, shape, first * chunk_size))
        first += steps
        left -= steps
    return loops
