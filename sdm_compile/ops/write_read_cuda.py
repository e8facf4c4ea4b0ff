"""The write/read on CUDA: slabs of steps, each staged and coupled at once, and its steps then run in order.

A slab's working memory is bounded, so that beside what a saving call keeps, a longer sequence needs no more; a batch
whose single step would exceed the bound runs in groups of streams. Neither changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from .bound import KernelCall, each_step
from .copy_kernels import copy_all
from .decay_write_kernels import announce, decay_write_call
from .dual_matmul_kernels import lower_matmul_call
from .layout import ChunkFields, Staged, StepGroups, WriteGroups, empty, empty_chunk_fields, empty_staged
from .phase1_kernels import LEADS, Phase1Scratch, empty_phase1_scratch, launch_phase1
from .repeats import repeat_count
from .row_versions_kernels import Versions, version_links_call, version_rows_call
from .row_writes_kernels import row_writes_call
from .saved import Saved
from .slabs import MAX_FORMS, Shape, cut, of_streams, run_loops, step_address
from .snapshot import (
    COMPACT,
    KEEPS_NOTHING,
    NO_ROWS,
    SCALED_MODES,
    VERSIONS,
    SnapshotMismatchError,
    SnapshotPlan,
    StepRows,
    agreed_writer,
)
from .solve_kernels import launch_solve
from .staging_kernels import launch_stage_inputs
from .step_flow_kernels import FlowMemory, KeptRows, empty_flow_memory, step_flow_call
from .step_loop import run_in_order
from .step_table import StepAddress
from .token_gather_kernels import token_gather_call
from .working_memory import Fill, in_turn, memory_bytes


@dataclass(frozen=True)
class ForwardShape(Shape):
    by_step: bool = False  # a launch for each step's stages, not one for all steps
    mode: str | None = None  # the form of the snapshot's rows; None: saves nothing
    plan: SnapshotPlan = KEEPS_NOTHING
    all_streams: int = 0  # of the call, over which versions are numbered; 0 without them


class StepMemory(NamedTuple):
    """What launches for each step leave for later ones."""

    u: Tensor  # [steps, P, C, D] float32
    inter: Tensor  # [steps, P, C, D] float32
    delta: Tensor  # [P, C, D] float32


class Slab(NamedTuple):
    """Working memory of some steps."""

    staged: Staged
    silent: Tensor  # [steps, P, C] int8
    fields: ChunkFields
    scratch: Phase1Scratch
    ordinals: Tensor | None  # [steps, P, C, W] int32, see `launch_phase1`
    X: Tensor  # [steps, P, C, C]
    QX: Tensor
    stepping: FlowMemory | StepMemory


@lru_cache(maxsize=MAX_FORMS)
def _slab_form(shape: ForwardShape) -> Slab:
    like = torch.empty(0, dtype=shape.dtype, device="meta")
    lead = (shape.steps, shape.streams, shape.chunk)
    make = partial(empty, like=like)
    scratch = empty_phase1_scratch(shape.steps * shape.streams, shape.chunk * shape.writes, like)
    fields = empty_chunk_fields(lead[:2], shape.chunk, shape.writes, shape.reads, like, torch.float32)
    matrices = {name: make((*lead, shape.chunk), dtype=torch.float32) for name in ("X", "QX")}
    if shape.by_step:
        of_step = (*lead[1:], shape.head_dim)
        sizes = ((shape.steps, *of_step), (shape.steps, *of_step), of_step)
        stepping: FlowMemory | StepMemory = StepMemory(*(make(size, dtype=torch.float32) for size in sizes))
    else:
        # What Phase 1 is the last to read, and then what the steps take.
        flow = empty_flow_memory(*lead, shape.writes, shape.reads, shape.head_dim, like, shape.plan)
        coupling, left = in_turn(
            dict(
                scratch={name: x for name, x in scratch._asdict().items() if name not in LEADS},
                fields={name: x for name, x in fields._asdict().items() if name in WriteGroups._fields},
            ),
            dict(stepping=flow, matrices=matrices),
        )
        scratch, fields = scratch._replace(**coupling["scratch"]), fields._replace(**coupling["fields"])
        stepping, matrices = left["stepping"], left["matrices"]
    return Slab(
        staged=empty_staged(
            lead, shape.writes, shape.reads, shape.gates, shape.head_dim, like, shape.dtype, torch.float32
        ),
        silent=make(lead, dtype=torch.int8),
        fields=fields,
        scratch=scratch,
        ordinals=make((*lead, shape.writes), dtype=torch.int32) if shape.mode and not shape.by_step else None,
        stepping=stepping,
        **matrices,
    )


@lru_cache(maxsize=MAX_FORMS)
def _slab_bytes(shape: ForwardShape) -> int:
    return memory_bytes(_slab_form(shape))


class Saving(NamedTuple):
    """What a saving call fills beside its outputs, of the streams at hand; by step."""

    saved: Saved  # [steps, P, *], and of the snapshot [steps, P * E, *]
    mode: str
    declared: SnapshotPlan

    def rows_of_write(self, step: int) -> StepRows | None:
        """What the write stage is given of a step to store rows in."""
        if self.declared.writer != "write":
            return None
        return StepRows(self.saved.snapshot[step], self.saved.scales[step], self.mode)

    def kept_rows(self, ordinals: Tensor | None, step: int) -> KeptRows:
        """What one launch for all steps from this one on is given to store rows in."""
        return KeptRows(
            self.declared, ordinals, self.saved.snapshot[step], self.saved.retrieved[step], self.all_streams
        )

    @property
    def all_streams(self) -> int:
        """The call's, of which these may be some."""
        return self.saved.retrieved.stride(0) // self.saved.retrieved.stride(1)


class _SlabStages:
    """The stages of a slab's steps as launches. With a table the addresses of what is the call's come from there.

    first: the slab's first step among those of the call.
    """

    def __init__(
        self,
        bank: Tensor,
        table: Tensor | None,
        slab: Slab,
        values: StepMemory,
        shape: ForwardShape,
        saving: Saving | None,
        first: int,
    ) -> None:
        staged, fields, (us, inters, delta) = slab.staged, slab.fields, values
        of_groups = (shape.steps, shape.streams, shape.chunk * shape.writes)
        leads = [x.view(of_groups) for x in (slab.scratch.lead_value, slab.scratch.lead_index)]

        def entry(step: int) -> Tensor | None:
            return None if table is None else table[step]

        def gather(step: int) -> KernelCall:
            rows = (staged.k_idx[step], fields.k_eff[step], staged.q_idx[step], fields.q_w[step])
            residual = (staged.v[step], staged.beta[step])
            kept = None if saving is None else saving.saved.retrieved[first + step]
            return token_gather_call(bank, entry(step), *rows, residual, us[step], inters[step], kept)

        def dual_matmul(step: int) -> KernelCall:
            return lower_matmul_call(slab.X[step], us[step], delta, bank.dtype)

        def write(step: int) -> KernelCall:
            groups = StepGroups(*(getattr(fields, name)[step] for name in StepGroups._fields))
            rows = None if saving is None else saving.rows_of_write(first + step)
            return decay_write_call(bank, entry(step), delta, groups, [x[step] for x in leads], rows)

        self.gather, self.dual_matmul, self.write = (
            each_step(call, shape.steps) for call in (gather, dual_matmul, write)
        )


class _SlabLoop:
    """One slab's launches, on some of a call's streams and tokens."""

    def __init__(
        self,
        bank: Tensor,
        inputs: Sequence[Tensor],
        readings: Tensor,
        shape: ForwardShape,
        first: int,
        saving: Saving | None,
        repeats: Tensor | None,
        payload: Tensor | None,
    ) -> None:
        """payload: the snapshot's of all steps and streams, if it has versions."""
        self.bank, self.inputs, self.readings, self.saving, self.repeats = bank, inputs, readings, saving, repeats
        self.signature, self.first = shape, first
        self.versions: Versions | None = None
        if saving is not None and payload is not None:
            saved = saving.saved
            self.versions = Versions(bank, payload, saved.snapshot[first], saved.latest, saved.previous)

    @property
    def length(self) -> int:
        return self.signature.steps

    def addresses(self) -> list[StepAddress]:
        if self.versions is not None:
            return [*map(StepAddress, self.versions)]
        if not self.signature.by_step:
            return []
        if self.saving is None:
            return [StepAddress(self.bank)]
        saved = self.saving.saved
        of_steps = (saved.snapshot, saved.scales, saved.retrieved)
        return [StepAddress(self.bank), *(step_address(x, self.first) for x in of_steps)]

    @property
    def captures_steps(self) -> bool:
        return self.signature.by_step

    def memory_form(self) -> Slab:
        return _slab_form(self.signature)

    @property
    def memory_bytes(self) -> int:
        return _slab_bytes(self.signature)

    def clear(self, slab: Slab) -> None:
        for ids in (slab.staged.k_idx, slab.staged.q_idx, slab.fields.group_slot):
            ids.fill_(-1)

    def stage(self, slab: Slab) -> None:
        first_token = self.first * self.signature.chunk
        launch_stage_inputs(self.inputs, slab.staged, slab.silent, self.repeats, self.bank.shape[0], first_token)

    def couple(self, slab: Slab, table: Tensor | None) -> None:
        staged, fields, shape = slab.staged, slab.fields, self.signature
        inputs = (staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val)
        launch_phase1(*inputs, fields, slab.scratch, not shape.by_step, slab.ordinals)
        flow = slab.stepping
        entry, rows_per_step = None if table is None else table[0], shape.all_streams * shape.chunk * shape.writes
        if self.versions is not None:
            # Before the solve: its X and QX take the memory of the groups' slots.
            version_links_call(self.versions, entry, fields.group_slot, rows_per_step).launch()
        launch_solve(fields.A, fields.QK, staged.beta, slab.X, slab.QX)
        if isinstance(flow, FlowMemory):
            k_rows = None
            if self.versions is not None and flow.addresses is not None:
                idx, k_rows = (staged.k_idx, staged.q_idx), flow.addresses[0]
                version_rows_call(self.versions, entry, idx, flow.addresses, rows_per_step).launch()
            leads = (slab.scratch.lead_value, slab.scratch.lead_index)
            ordinals = None if flow.rows.ordinal is None else slab.ordinals
            row_writes_call(staged.k_idx, leads, fields.write_w, ordinals, flow.rows, k_rows).launch()
            flow.counters.zero_()

    def steps(self, slab: Slab, table: Tensor | None) -> None:
        shape, saving, values = self.signature, self.saving, slab.stepping
        if isinstance(values, StepMemory):
            run_in_order(_SlabStages(self.bank, table, slab, values, shape, saving, self.first), shape.steps)
            return
        rows = None if saving is None else saving.kept_rows(slab.ordinals, self.first)
        links, first_token = slab.scratch.lead_index, self.first * shape.chunk
        step_flow_call(
            self.bank, slab.staged, slab.fields, links, slab.X, slab.QX, values, self.readings, first_token, rows
        ).launch()

    concludes = False

    def conclude(self, slab: Slab) -> None:
        """Nothing."""

    def read(self, slab: Slab) -> None:
        if isinstance(slab.stepping, StepMemory):
            lower_matmul_call(
                slab.QX.flatten(0, 1),
                slab.stepping.u.flatten(0, 1),
                self.readings,
                self.bank.dtype,
                plus=slab.stepping.inter.flatten(0, 1),
                unstage=(self.first * self.signature.chunk, self.signature.streams),
            ).launch()
        if self.saving is not None:
            made = {**slab.fields._asdict(), "X": slab.X, "QX": slab.QX}
            steps = slice(self.first, self.first + self.length)
            kept = {name: x[steps] for name, x in self.saving.saved._asdict().items() if name in made}
            copy_all(list(kept.values()), [made[name] for name in kept])


def write_read_cuda(
    bank: Tensor,
    inputs: Sequence[Tensor],
    chunk_size: int,
    readings: Tensor,
    saving: Saving | None = None,
    count_repeats: bool = True,
    fill: Fill | None = None,
) -> str:
    """Advances `bank` in place over all tokens and fills `readings` [P, T, D], both contiguous.

    saving: what to keep for a backward, all contiguous. If that is versions, the bank stays as it is:
    `latest_rows_call` makes the one after the call. fill: fills the bank first. Returns how the steps are launched.
    """
    tensors, addressed, kind, mode = [bank, *inputs, readings], [bank], None, None
    repeats = repeat_count(bank.device) if count_repeats else None
    if repeats is not None:
        tensors.append(repeats)
    if saving is not None:
        saved = saving.saved
        tensors = [*tensors, *saved]
        addressed = [
            bank,
            *(getattr(saved, name) for name in ("snapshot", "scales", "retrieved", "previous", "latest")),
        ]
        kind, mode = (saving.mode, saving.declared), saving.mode
    run_loops(
        ("forward", kind, chunk_size, count_repeats),
        tensors,
        lambda: list(call_loops(bank, inputs, chunk_size, readings, saving, repeats)),
        addressed,
        fill,
    )
    return "triton by step" if runs_by_step(mode) else "triton in one launch"


def runs_by_step(mode: str | None) -> bool:
    """Whether a forward that saves rows in this form, or none, takes launches for each step instead of one for all.

    A row's scale needs the whole row, and the programs of one launch for all steps have columns of it.
    """
    return mode in SCALED_MODES


def call_loops(
    bank: Tensor,
    inputs: Sequence[Tensor],
    chunk_size: int,
    readings: Tensor,
    saving: Saving | None = None,
    repeats: Tensor | None = None,
) -> Iterator[list[_SlabLoop]]:
    """A call's slabs in order: one list for each group of streams. repeats: the count to add to, if any."""
    declared, mode = (KEEPS_NOTHING, None) if saving is None else (saving.declared, saving.mode)
    one = vars(Shape.of(bank, inputs, chunk_size))
    all_streams, payload = 0, None
    if saving is not None and declared.versions:
        all_streams, payload = inputs[0].shape[0], saving.saved.snapshot
    shape = ForwardShape(**one, by_step=runs_by_step(mode), mode=mode, plan=declared, all_streams=all_streams)
    for streams, steps in cut(shape, bank, inputs, _slab_bytes, saving is not None, gently=not shape.by_step):
        part = tuple(x[streams] for x in inputs)
        count = part[0].shape[0]
        saved = None
        if saving is not None:
            saved = saving._replace(saved=of_streams(saving.saved, streams))
        rows = None if saved is None else saved.rows_of_write(0)
        writer = agreed_writer(declared, announce(rows, NO_ROWS if saving is None else _layout_of(shape)))
        if shape.by_step and writer == "gather":
            raise SnapshotMismatchError("launches for each step have the write store the rows, not the gather")
        of_part = replace(shape, streams=count)
        yield [
            _SlabLoop(bank, part, readings[streams], replace(of_part, steps=n), first, saved, repeats, payload)
            for first, n in steps
        ]


def _layout_of(shape: ForwardShape) -> int:
    """Which layout the launches of a saving call of this shape are made for."""
    return VERSIONS if shape.plan.versions and not shape.by_step else COMPACT
