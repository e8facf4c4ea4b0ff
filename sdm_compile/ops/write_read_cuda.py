"""The write/read on CUDA: slabs of steps, each staged and coupled at once, its steps run one after the other.

A slab's working memory is bounded, so that a call that saves nothing needs no more for a longer sequence; a batch whose
single step would exceed the bound runs in groups of streams. Neither changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .bound import ALIGNMENT, MAX_GRID, KernelCall, each_step, launches_are_watched
from .decay_write_kernels import Links, decay_write_by_token_call, decay_write_call, writes_by_token
from .dual_matmul_kernels import lower_matmul_call
from .launch import replay, run_plainly
from .layout import ChunkFields, Staged, StepGroups, empty, empty_chunk_fields, empty_staged, num_steps
from .phase1_kernels import Phase1Scratch, empty_phase1_scratch, launch_phase1
from .repeats import repeat_count
from .situation import Situation, current_situation
from .solve_kernels import launch_solve
from .staging_kernels import launch_stage_inputs
from .step_loop import run_in_order
from .token_gather_kernels import token_gather_call

SLAB_STEPS = 64  # steps of a slab at most: what one captured loop holds
SLABS = 4  # slabs that a call is cut into at least, as far as its steps go: one is prepared under another's steps


def working_bytes(bank: Tensor, streams: int) -> int:
    """Working memory that a call may take, for two slabs: more where the bank or the batch is larger, never with T."""
    by_bank = min(bank.numel() * bank.element_size() * 7 // 10, 576 * 2**20)
    return max(64 * 2**20, by_bank, streams * 4 * 2**20)


def slab_steps(limit: int, steps: int) -> int:
    """Steps per slab, a power of two, of a call of so many steps of which `limit` at a time fit into working memory.

    Measured on an H200, ms per call: 512 steps in 8 slabs 12.9, in 15 13.2; 128 steps in 5, 10 and 20 slabs 12.5, 12.0
    and 12.1; 16 steps of a chunk of 256 in 2, 4 and 8 slabs 5.6, 5.0 and 5.1, and, twice as large, in 4 and 8 9.6 and
    10.1.
    """
    most = max(1, min(SLAB_STEPS, limit, steps // SLABS))
    return 1 << (most.bit_length() - 1)


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
    by_token: bool = False  # which of the decay-and-write's kernels it takes


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


def _empty_slab(like: Tensor, shape: Shape) -> Slab:
    lead = (shape.steps, shape.streams, shape.chunk)
    make = partial(empty, like=like)
    chunks = shape.steps * shape.streams
    return Slab(
        staged=empty_staged(
            lead, shape.writes, shape.reads, shape.gates, shape.head_dim, like, shape.dtype, torch.float32
        ),
        silent=make(lead, dtype=torch.int8),
        fields=empty_chunk_fields(lead[:2], shape.chunk, shape.writes, shape.reads, like, torch.float32),
        scratch=empty_phase1_scratch(chunks, shape.chunk * shape.writes, like),
        X=make((*lead, shape.chunk), dtype=torch.float32),
        QX=make((*lead, shape.chunk), dtype=torch.float32),
        u=make((*lead, shape.head_dim), dtype=torch.float32),
        inter=make((*lead, shape.head_dim), dtype=torch.float32),
        delta=make((*lead[1:], shape.head_dim), dtype=torch.float32),
    )


def step_bytes(like: Tensor, shape: Shape) -> int:
    """Working memory of one step of a slab of this shape."""
    slab = _empty_slab(like.new_empty(0, device="meta"), replace(shape, steps=1))
    return sum(x.numel() * x.element_size() for x in tree_leaves(slab))


class _SlabStages:
    """The stages of a slab's steps as launches. With a table the bank's address comes from there."""

    def __init__(self, bank: Tensor, table: Tensor | None, slab: Slab, shape: Shape) -> None:
        staged, fields = slab.staged, slab.fields
        early = shape.by_token and bank.is_cuda  # Triton's interpreter knows no early launch
        by_step = (shape.steps, shape.streams, shape.chunk * shape.writes)
        leads = [x.view(by_step) for x in (slab.scratch.lead_value, slab.scratch.lead_index)]

        def gather(step: int) -> KernelCall:
            rows = (staged.k_idx[step], fields.k_eff[step], staged.q_idx[step], fields.q_w[step])
            residual = (staged.v[step], staged.beta[step])
            return token_gather_call(bank, table, *rows, residual, slab.u[step], slab.inter[step])

        def dual_matmul(step: int) -> KernelCall:
            return lower_matmul_call(slab.X[step], slab.u[step], slab.delta, bank.dtype, early=early)

        def write(step: int) -> KernelCall:
            if shape.by_token:
                links = Links(staged.k_idx[step], fields.write_w[step], leads[0][step], leads[1][step])
                return decay_write_by_token_call(bank, table, slab.delta, links, early)
            groups = StepGroups(*(getattr(fields, name)[step] for name in StepGroups._fields))
            return decay_write_call(bank, table, slab.delta, groups, [x[step] for x in leads])

        self.gather, self.dual_matmul, self.write = (
            each_step(call, shape.steps) for call in (gather, dual_matmul, write)
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
        inputs = (staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val)
        launch_phase1(*inputs, fields, slab.scratch, self.signature.by_token)
        launch_solve(fields.A, fields.QK, staged.beta, slab.X, slab.QX)

    def steps(self, slab: Slab, table: Tensor | None) -> None:
        run_in_order(_SlabStages(self.bank, table, slab, self.signature), self.signature.steps)

    def read(self, slab: Slab) -> None:
        lower_matmul_call(
            slab.QX.flatten(0, 1),
            slab.u.flatten(0, 1),
            self.readings,
            self.bank.dtype,
            plus=slab.inter.flatten(0, 1),
            unstage=(self.first_token, self.signature.streams),
        ).launch()


def write_read_cuda(bank: Tensor, inputs: Sequence[Tensor], chunk_size: int, readings: Tensor) -> str:
    """Advances `bank` in place over all tokens and fills `readings` [P, T, D], both contiguous. Saves nothing.

    Returns the route: which kernel writes the bank's rows.
    """
    capturing = current_situation(bank.device) is Situation.CAPTURING
    # A bank at an odd address would need kernels of its own in every captured loop.
    plain = capturing or launches_are_watched() or bank.data_ptr() % ALIGNMENT != 0
    run = run_plainly if plain else replay
    groups = list(call_loops(bank, inputs, chunk_size, readings))
    run(groups, bank)
    return "triton by token" if groups and groups[0][0].signature.by_token else "triton by group"


def call_loops(bank: Tensor, inputs: Sequence[Tensor], chunk_size: int, readings: Tensor) -> Iterator[list[_SlabLoop]]:
    """A call's slabs in order: one list for each group of streams."""
    k_idx, _, _, _, g, q_idx, _ = inputs
    streams, tokens, writes = k_idx.shape
    if not streams or not tokens:
        return
    shape = Shape(
        *(1, 1, chunk_size, writes, q_idx.shape[2], g.shape[2], bank.shape[1], bank.shape[0], bank.dtype),
        precision=torch.get_float32_matmul_precision(),
    )
    limit = working_bytes(bank, streams) // 2 // step_bytes(bank, shape)  # steps of one stream
    group = max(1, min(streams, limit, MAX_GRID // chunk_size))
    for p in range(0, streams, group):
        part = tuple(x[p : p + group] for x in inputs)
        count = part[0].shape[0]
        slab_shape = replace(
            shape,
            steps=slab_steps(min(limit, MAX_GRID) // count, num_steps(tokens, chunk_size)),
            streams=count,
            by_token=writes_by_token(bank, count, chunk_size, writes),
        )
        yield _slab_loops(bank, part, readings[p : p + group], slab_shape)


def _slab_loops(bank: Tensor, inputs: Sequence[Tensor], readings: Tensor, shape: Shape) -> list[_SlabLoop]:
    """A call's slabs of this shape; a short rest is padded to a half, a quarter and so on of its steps."""
    loops, first, left = [], 0, num_steps(inputs[0].shape[1], shape.chunk)
    while left > 0:
        while shape.steps // 2 >= left:
            shape = replace(shape, steps=shape.steps // 2)
        loops.append(_SlabLoop(bank, inputs, readings, shape, first * shape.chunk))
        first += shape.steps
        left -= shape.steps
    return loops
