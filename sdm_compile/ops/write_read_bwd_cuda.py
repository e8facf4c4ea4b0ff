"""The write/read's backward on CUDA: slabs of steps, the last one first, and each one's last step first.

A slab's steps update the gradient of the bank in place; what needs no bank runs for all steps of a slab at once, before
and after them (SPEC section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .bound import KernelCall, each_step
from .copy_kernels import copy_all, transpose_all
from .dual_matmul_kernels import (
    lower_matmul_call,
    outer_product_call,
    transposed_lower_matmul_call,
    values_backward_call,
)
from .layout import Staged, empty, empty_staged
from .phase1_bwd_kernels import Phase1BwdScratch, empty_phase1_bwd_sorted_scratch, launch_phase1_bwd_sorted
from .saved import Saved
from .slabs import MAX_FORMS, Shape, cut, of_streams, run_loops, step_address
from .slot_entries_kernels import entry_dots_call, entry_weights_call, row_numbers_call
from .slot_groups_kernels import SlotGroups, SlotGroupsScratch, empty_slot_groups, launch_slot_groups
from .snapshot import StepRows
from .solve_kernels import beta_backward_call
from .staging_kernels import launch_stage_inputs, launch_stage_tokens_bwd, launch_unstage_readings_bwd
from .step_bwd_kernels import (
    Banks,
    GradientGatherConfig,
    SlotEntries,
    SlotRowsConfig,
    gradient_gather_call,
    slot_rows_call,
    sum_parts_call,
)
from .step_table import StepAddress
from .working_memory import Fill, in_turn, memory_bytes

KEPT = ("QX", "A", "k_eff", "q_w", "write_w", "group_decay")  # what a slab takes over of `Saved`


@dataclass(frozen=True)
class BackwardShape(Shape):
    mode: str  # the form of the snapshot's rows
    versions: bool  # whether they are versions
    grad_dtype: torch.dtype  # of the bank's gradient
    all_streams: int  # of the call


class Slab(NamedTuple):
    """Working memory of some steps; float32 where nothing else is said."""

    staged: Staged
    silent: Tensor  # [steps, P, C] int8
    dy: Tensor  # [steps, P, C, D] bank dtype
    kept: dict[str, Tensor]  # KEPT, [steps, P, *]
    groups: SlotGroups  # [steps * P, *]
    groups_scratch: SlotGroupsScratch
    number: Tensor  # [steps, P, F] int32, see `SlotEntries`
    sources: Tensor  # [steps, P, F] int32, see `SlotEntries`
    weights: Tensor  # [steps, P, F]
    Xt: Tensor  # [steps, P, C, C] X^T
    delta: Tensor  # [steps, P, C, D]
    du: Tensor  # [steps, P, C, D]
    gathered: Tensor  # [P, C, D]
    dwrite_w: Tensor  # [steps, P, C, parts, W]
    dgroup_decay: Tensor  # [steps, P, parts, E]
    dots: Tensor  # [steps, P, parts, F]
    dk_eff: Tensor  # [steps, P, C, W]
    dq_w: Tensor  # [steps, P, C, R]
    dB: Tensor  # [steps, P, C, C]
    dA: Tensor  # [steps, P, C, C]
    dQK: Tensor  # [steps, P, C, C]
    dbeta: Tensor  # [steps, P, C, 1]
    dk_val: Tensor  # [steps, P, C, W]
    dg: Tensor  # [steps, P, C, 1 or W]
    dq_val: Tensor  # [steps, P, C, R]
    phase1_scratch: Phase1BwdScratch


@lru_cache(maxsize=MAX_FORMS)
def _slab_form(shape: BackwardShape) -> Slab:
    like = torch.empty(0, dtype=shape.dtype, device="meta")
    chunks, tokens = (shape.steps, shape.streams), (shape.steps, shape.streams, shape.chunk)
    entries = shape.chunk * shape.writes
    joined = (*chunks, shape.chunk * (shape.writes + shape.reads))
    gather_parts = GradientGatherConfig.from_shapes(shape.chunk, shape.writes, shape.head_dim).parts(shape.head_dim)
    row_parts = SlotRowsConfig.from_shapes(shape.chunk, shape.head_dim).parts(shape.head_dim)
    staged = empty_staged(
        tokens, shape.writes, shape.reads, shape.gates, shape.head_dim, like, shape.dtype, torch.float32
    )

    def floats(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=like.device)

    sizes = (shape.steps * shape.streams, shape.chunk, shape.writes, shape.reads)
    groups, groups_scratch = empty_slot_groups(*sizes, like)
    matrix, of_writes, of_reads = ((*tokens, width) for width in (shape.chunk, shape.writes, shape.reads))
    # What `couple` is the last to read, and then what the steps leave to `conclude`.
    coupling, left = in_turn(
        dict(
            kept=dict(QX=floats(*matrix), k_eff=floats(*of_writes), q_w=floats(*of_reads)),
            groups_scratch=groups_scratch,
        ),
        dict(
            dwrite_w=floats(*tokens, gather_parts, shape.writes),
            dgroup_decay=floats(*chunks, row_parts, entries),
            dots=floats(*chunks, row_parts, joined[-1]),
        ),
    )
    # What the steps are the last to read, and then what `conclude` makes.
    stepping, made = in_turn(
        dict(
            Xt=floats(*matrix),
            kept=dict(write_w=floats(*of_writes), group_decay=floats(*chunks, entries)),
            groups={name: x for name, x in groups._asdict().items() if name != "keys"},
            number=torch.empty(joined, dtype=torch.int32, device=like.device),
            sources=torch.empty(joined, dtype=torch.int32, device=like.device),
            weights=floats(*joined),
            gathered=floats(*tokens[1:], shape.head_dim),
        ),
        dict(
            **{name: floats(*matrix) for name in ("dB", "dA", "dQK")},
            **{name: floats(*of_writes) for name in ("dk_eff", "dk_val")},
            **{name: floats(*of_reads) for name in ("dq_w", "dq_val")},
            dbeta=floats(*tokens, 1),
            dg=floats(*tokens, shape.gates),
            phase1_scratch=empty_phase1_bwd_sorted_scratch(*sizes, like),
        ),
    )
    kept = {**coupling.pop("kept"), **stepping.pop("kept"), "A": floats(*matrix)}
    return Slab(
        staged=staged,
        silent=torch.empty(tokens, dtype=torch.int8, device=like.device),
        dy=empty((*tokens, shape.head_dim), like),
        kept=kept,
        groups=groups._replace(**stepping.pop("groups")),
        delta=floats(*tokens, shape.head_dim),
        du=floats(*tokens, shape.head_dim),
        **{**coupling, **left, **stepping, **made},
    )


@lru_cache(maxsize=MAX_FORMS)
def _slab_bytes(shape: BackwardShape) -> int:
    return memory_bytes(_slab_form(shape))


class Call(NamedTuple):
    """What one backward works on; of the streams at hand, by step where it says so."""

    dreadings: Tensor | None  # [P, T, D]
    dM: Tensor  # [num_slots, D]
    bank: Tensor  # [num_slots, D] the final one, or, of versions, the one before the call
    where: Tensor  # [num_slots] int32, see `row_numbers_call`
    inputs: Sequence[Tensor]  # [P, T, *]
    saved: Saved  # [steps, P, *], and of the snapshot [steps, P * E, *]
    snapshot: StepRows  # of all steps and streams
    grads: Sequence[Tensor]  # [P, T, *] of k_val, v, beta, g and q_val


class _SlabLoop:
    """One slab's launches, on some of a call's streams and tokens. `first`: its first step among those of the call."""

    def __init__(self, call: Call, shape: BackwardShape, first: int) -> None:
        self.call, self.signature, self.first = call, shape, first

    @property
    def length(self) -> int:
        return self.signature.steps

    def addresses(self) -> list[StepAddress]:
        call = self.call
        of_call = (call.dM, call.bank, call.snapshot.payload, call.snapshot.scales, call.where)
        rows = step_address(call.saved.snapshot, self.first)
        return [*map(StepAddress, of_call), rows, StepAddress(call.saved.previous)]

    captures_steps = True

    def memory_form(self) -> Slab:
        return _slab_form(self.signature)

    @property
    def memory_bytes(self) -> int:
        return _slab_bytes(self.signature)

    def clear(self, slab: Slab) -> None:
        for ids in (slab.staged.k_idx, slab.staged.q_idx, slab.groups.slot):
            ids.fill_(-1)

    def stage(self, slab: Slab) -> None:
        call, shape = self.call, self.signature
        first_token = self.first * shape.chunk
        launch_stage_inputs(call.inputs, slab.staged, slab.silent, None, shape.num_slots, first_token)
        steps = slice(self.first, self.first + self.length)
        copy_all(list(slab.kept.values()), [getattr(call.saved, name)[steps] for name in slab.kept])
        X, retrieved = (getattr(call.saved, name)[steps].contiguous() for name in ("X", "retrieved"))
        values = (slab.staged.v.flatten(0, 1), slab.staged.beta.flatten(0, 1))
        X, Xt, retrieved, delta = (x.flatten(0, 1) for x in (X, slab.Xt, retrieved, slab.delta))
        transpose_all(Xt, X)
        lower_matmul_call(X, retrieved, delta, shape.dtype, values, many=True).launch()
        if call.dreadings is None:
            slab.dy.zero_()
        else:
            launch_unstage_readings_bwd(call.dreadings, slab.dy, first_token)

    def couple(self, slab: Slab, table: Tensor | None) -> None:
        call, shape, staged, kept = self.call, self.signature, slab.staged, slab.kept
        QX, k_eff, q_w, beta, dy, du = (
            x.flatten(0, 1) for x in (kept["QX"], kept["k_eff"], kept["q_w"], staged.beta, slab.dy, slab.du)
        )
        transposed_lower_matmul_call(QX, dy, du, shape.dtype, many=True).launch()
        launch_slot_groups(staged.k_idx, staged.q_idx, slab.groups, slab.groups_scratch)
        places = (slab.sources.flatten(0, 1), slab.weights.flatten(0, 1))
        entry_weights_call(slab.groups.keys, k_eff, q_w, beta, *places).launch()
        rows = call.saved.snapshot[self.first]
        previous = call.saved.previous if shape.versions else None
        first = None if table is None else table[0]
        groups = [x.unflatten(0, (shape.steps, shape.streams)) for x in (slab.groups.slot, slab.groups.ordinal)]
        entries = shape.chunk * shape.writes
        row_numbers_call(
            *(call.where, call.snapshot.payload, rows, previous, first, groups[0], groups[1], slab.number),
            rows_per_step=shape.all_streams * entries,
            rows_per_stream=entries,
        ).launch()

    def steps(self, slab: Slab, table: Tensor | None) -> None:
        launches = [each_step(call, self.length) for call in self._calls(slab, table)]
        for step in reversed(range(self.length)):
            for launch in launches:
                launch(step)

    def _calls(self, slab: Slab, table: Tensor | None) -> tuple[Callable[[int], KernelCall], ...]:
        """A step's launches, in order."""
        call, shape, staged, kept = self.call, self.signature, slab.staged, slab.kept
        groups = [x.unflatten(0, (shape.steps, shape.streams)) for x in slab.groups]

        def banks(step: int) -> Banks:
            entry = None if table is None else table[step]
            return Banks(call.dM, call.bank, call.snapshot, entry)

        def gather(step: int) -> KernelCall:
            writes = (staged.k_idx[step], kept["write_w"][step], slab.delta[step])
            return gradient_gather_call(banks(step), *writes, slab.gathered, slab.dwrite_w[step])

        def matmul(step: int) -> KernelCall:
            Xt, du = slab.Xt[step], slab.du[step]
            return lower_matmul_call(Xt, slab.gathered, du, shape.dtype, plus=du, upper=True, many=False)

        def rows(step: int) -> KernelCall:
            fields = (*groups[1:], slab.number, slab.sources, slab.weights, kept["group_decay"])
            entries = SlotEntries(*(x[step] for x in fields))
            sent_back, dots = (slab.du[step], slab.dy[step]), (slab.dgroup_decay[step], slab.dots[step])
            return slot_rows_call(banks(step), entries, *sent_back, *dots)

        return gather, matmul, rows

    concludes = True

    def conclude(self, slab: Slab) -> None:
        staged, kept, dtype = slab.staged, slab.kept, self.signature.dtype
        du, dy, delta, beta, dB, dA, dQK, dots, dk_eff, dq_w = (
            x.flatten(0, 1)
            for x in (
                *(slab.du, slab.dy, slab.delta, staged.beta, slab.dB),
                *(slab.dA, slab.dQK, slab.dots, slab.dk_eff, slab.dq_w),
            )
        )
        outer_product_call(du, delta, dB, dtype, tril=-1, negative=True).launch()
        outer_product_call(dy, delta, dQK, dtype, tril=0).launch()
        beta_backward_call(slab.dB, kept["A"], staged.beta, slab.dA, slab.dbeta).launch()
        entry_dots_call(slab.groups.keys, dots, beta, dk_eff, dq_w).launch()
        dwrite_w = _summed(slab.dwrite_w.flatten(0, 2)).view_as(dk_eff)
        ddecay = _summed(slab.dgroup_decay.flatten(0, 1))
        grads = (dk_eff, dq_w, dwrite_w, dA, dQK, ddecay)
        inputs = (staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val)
        outs = (slab.dk_val, slab.dg, slab.dq_val)
        of_chunks = [[x.flatten(0, 1) for x in side] for side in (inputs, outs)]
        launch_phase1_bwd_sorted(slab.groups.keys, grads, of_chunks[0], of_chunks[1], slab.phase1_scratch)

    def read(self, slab: Slab) -> None:
        call, shape, staged = self.call, self.signature, slab.staged
        first_token = self.first * shape.chunk
        retrieved = call.saved.retrieved[self.first : self.first + self.length].contiguous()
        du, v, beta, retrieved, dbeta = (
            x.flatten(0, 1) for x in (slab.du, staged.v, staged.beta, retrieved, slab.dbeta)
        )
        dk_val, dv, *others = call.grads
        unstage = (first_token, shape.streams)
        values_backward_call(du, v, beta, retrieved, dv=dv, dbeta=dbeta, plus=dbeta, unstage=unstage).launch()
        made = (slab.dk_val, slab.dbeta, slab.dg, slab.dq_val)
        k_idx, q_idx = call.inputs[0], call.inputs[5]
        launch_stage_tokens_bwd(made, k_idx, q_idx, (dk_val, *others), shape.num_slots, first_token)


def _summed(parts: Tensor) -> Tensor:
    """[n, parts, N] to [n, N], in the order of the parts."""
    if parts.shape[1] == 1:
        return parts[:, 0]
    out = parts.new_empty((parts.shape[0], parts.shape[2]))
    sum_parts_call(parts, out).launch()
    return out


def backward_cuda(
    dreadings: Tensor | None,
    dM: Tensor,
    bank: Tensor,
    inputs: Sequence[Tensor],
    saved: Saved,
    chunk_size: int,
    mode: str,
    grads: Sequence[Tensor],
    fill: Fill | None = None,
) -> None:
    """`dM`, the final bank's gradient, becomes that of the bank before, in place; fills those of the inputs.

    bank: the final one, or, of versions, the one before the call. fill: fills dM first.
    saved: what the forward filled, unflattened and contiguous. grads: [P, T, *] of k_val, v, beta, g and q_val, fresh.
    """
    call = call_of(dreadings, dM, bank, inputs, saved, mode, grads)
    run_loops(
        ("backward", mode, chunk_size, dreadings is None),
        [dM, call.bank, call.where, *inputs, *saved, *grads, *([] if dreadings is None else [dreadings])],
        lambda: list(call_loops(call, chunk_size)),
        [dM, call.bank, saved.snapshot, saved.scales, saved.previous],
        fill,
    )


def call_of(
    dreadings: Tensor | None,
    dM: Tensor,
    bank: Tensor,
    inputs: Sequence[Tensor],
    saved: Saved,
    mode: str,
    grads: Sequence[Tensor],
) -> Call:
    """What `backward_cuda` is given, as its loops take it."""
    bank = bank.contiguous()
    if saved.has_versions:
        where = saved.latest.clone()
    else:
        where = torch.full((bank.shape[0],), -1, dtype=torch.int32, device=bank.device)
    return Call(dreadings, dM, bank, where, inputs, saved, StepRows(saved.snapshot, saved.scales, mode), grads)


def call_loops(call: Call, chunk_size: int) -> Iterator[list[_SlabLoop]]:
    """A backward's slabs in order: one list for each group of streams."""
    shape = BackwardShape(
        **vars(Shape.of(call.bank, call.inputs, chunk_size)),
        mode=call.snapshot.mode,
        versions=call.saved.has_versions,
        grad_dtype=call.dM.dtype,
        all_streams=call.inputs[0].shape[0],
    )
    for streams, slabs in cut(shape, call.bank, call.inputs, _slab_bytes, training=True):
        part = call._replace(
            dreadings=None if call.dreadings is None else call.dreadings[streams],
            inputs=[x[streams] for x in call.inputs],
            saved=of_streams(call.saved, streams),
            grads=[x[streams] for x in call.grads],
        )
        of_part = replace(shape, streams=part.inputs[0].shape[0])
        yield [_SlabLoop(part, replace(of_part, steps=steps), first) for first, steps in reversed(slabs)]
