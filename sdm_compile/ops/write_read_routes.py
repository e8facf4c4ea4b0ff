"""The write/read on each kind of device, behind one interface, which the ops call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from .decay_write import decay_write_
from .layout import StepGroups, empty, num_steps
from .saved import Saved, empty_call_snapshot, empty_saved, saved_of
from .snapshot import COMPACT, Announcement, SnapshotPlan, agreed_writer
from .staging import stage_inputs, unstage_readings
from .step_loop import Coupled, couple, run_steps
from .working_memory import Fill
from .write_read_bwd import write_read_backward_cpu

Inputs = Sequence[Tensor]
"""k_idx, k_val, v, beta, g, q_idx, q_val."""


def empty_bank(memory: Tensor) -> Tensor:
    return empty(tuple(memory.shape), memory)


def empty_readings(memory: Tensor, k_idx: Tensor) -> Tensor:
    return empty((*k_idx.shape[:2], memory.shape[1]), memory)


def _forward_cpu(
    bank: Tensor,
    inputs: Inputs,
    chunk_size: int,
    snapshot: tuple[Tensor, Tensor] | None = None,
    mode: str = "none",
    count_repeats: bool = True,
) -> tuple[Tensor, Tensor, Coupled]:
    """Advances `bank` over all steps: readings [P, T, D], the retrieved rows, and what Phase 1 and the solve made."""
    staged = stage_inputs(
        *inputs, num_slots=bank.shape[0], dtype=bank.dtype, chunk_size=chunk_size, count_repeats=count_repeats
    )
    coupled = couple(staged)
    rows_per_step = coupled.fields.group_slot[:1].numel()

    def write(step: int, bank: Tensor, delta: Tensor, groups: StepGroups) -> Tensor:
        rows = slice(step * rows_per_step, (step + 1) * rows_per_step)
        payload, scales = (None, None) if snapshot is None else (snapshot[0][rows], snapshot[1][rows])
        decay_write_(bank, delta, *groups, snapshot=payload, scales=scales, snapshot_quant=mode)
        return bank

    _, readings, retrieved = run_steps(bank, staged, coupled, write)
    return unstage_readings(readings, inputs[0].shape[1]), retrieved, coupled


class Route(Protocol):
    """The write/read on one kind of device. `forward` advances its bank, contiguous, in place."""

    def forward(self, bank: Tensor, inputs: Inputs, chunk_size: int, fill: Fill | None = None) -> tuple[Tensor, str]:
        """Advances `bank`, once it is filled, over all steps: readings [P, T, D], and the name of the route taken."""

    def save(
        self,
        memory: Tensor,
        inputs: Inputs,
        chunk_size: int,
        mode: str,
        plan: SnapshotPlan,
        count_repeats: bool = True,
        final: bool = True,
    ) -> tuple[Tensor, Tensor, Saved, str]:
        """Keeps what a backward needs, as planned: readings, the final bank, that, flattened, and the route's name.

        memory: any strides; stays as it was. final: whether the final bank is wanted; else the bank that `backward`
        takes comes in its place.
        """

    def backward(
        self,
        dreadings: Tensor | None,
        dM: Tensor,
        bank: Tensor,
        inputs: Inputs,
        saved: Saved,
        chunk_size: int,
        mode: str,
        grads: Sequence[Tensor],
        fill: Fill | None = None,
    ) -> str:
        """`dM`, once it is filled, the final bank's gradient, becomes that of the bank before, in place.

        bank: see `bank_to_keep`. Fills `grads`, [P, T, *] contiguous, of k_val, v, beta, g and q_val. Returns the name
        of the route.
        """


class CpuRoute:
    def forward(self, bank: Tensor, inputs: Inputs, chunk_size: int, fill: Fill | None = None) -> tuple[Tensor, str]:
        if fill is not None:
            fill()
        return _forward_cpu(bank, inputs, chunk_size)[0], "cpu"

    def save(
        self,
        memory: Tensor,
        inputs: Inputs,
        chunk_size: int,
        mode: str,
        plan: SnapshotPlan,
        count_repeats: bool = True,
        final: bool = True,
    ) -> tuple[Tensor, Tensor, Saved, str]:
        agreed_writer(plan, Announcement(COMPACT, True))
        bank = empty_bank(memory).copy_(memory)
        snapshot = empty_call_snapshot(bank, inputs[0], chunk_size, mode)
        for tensor in snapshot:
            tensor.zero_()  # rows of unused groups too, which on CUDA stay as they are
        readings, retrieved, coupled = _forward_cpu(bank, inputs, chunk_size, snapshot, mode, count_repeats)
        return readings, bank, saved_of(retrieved, *snapshot, coupled.X, coupled.QX, coupled.fields), "cpu"

    def backward(
        self,
        dreadings: Tensor | None,
        dM: Tensor,
        bank: Tensor,
        inputs: Inputs,
        saved: Saved,
        chunk_size: int,
        mode: str,
        grads: Sequence[Tensor],
        fill: Fill | None = None,
    ) -> str:
        if fill is not None:
            fill()
        staged = stage_inputs(
            *inputs,
            num_slots=bank.shape[0],
            dtype=bank.dtype,
            chunk_size=chunk_size,
            count_repeats=False,
        )
        saved = saved._replace(snapshot=saved.snapshot.contiguous()).unflattened(*staged.k_idx.shape)
        found = write_read_backward_cpu(dreadings, dM, bank, inputs, staged, saved, chunk_size, mode)
        for grad, x in zip(grads, found, strict=True):
            grad.copy_(x)
        return "cpu"


class CudaRoute:
    """Imports Triton's kernels when it is used: Triton is not installed everywhere."""

    def forward(self, bank: Tensor, inputs: Inputs, chunk_size: int, fill: Fill | None = None) -> tuple[Tensor, str]:
        from .write_read_cuda import write_read_cuda

        readings = empty_readings(bank, inputs[0])
        return readings, write_read_cuda(bank, inputs, chunk_size, readings, fill=fill)

    def save(
        self,
        memory: Tensor,
        inputs: Inputs,
        chunk_size: int,
        mode: str,
        plan: SnapshotPlan,
        count_repeats: bool = True,
        final: bool = True,
    ) -> tuple[Tensor, Tensor, Saved, str]:
        from .bound import aligned
        from .row_versions_kernels import latest_rows_call
        from .write_read_cuda import Saving, write_read_cuda

        readings, versions = empty_readings(memory, inputs[0]), plan.versions
        saved = empty_saved(memory, inputs[0], inputs[5], chunk_size, mode, versions)
        saving = Saving(_by_step(saved, inputs[0], chunk_size), mode, plan)
        bank, fill = memory, None
        if not versions:
            bank = empty_bank(memory)
            fill = partial(bank.copy_, memory)
        elif not (memory.is_contiguous() and aligned([memory.data_ptr()])):  # kernels take 16 bytes of a row at a time
            bank = empty_bank(memory).copy_(memory)
        if versions:
            saved.latest.fill_(-1)
        route = write_read_cuda(bank, inputs, chunk_size, readings, saving, count_repeats, fill)
        if versions and final:
            source, bank = bank, empty_bank(memory)
            latest_rows_call(bank, source, saved.snapshot, saved.latest).launch()
        return readings, bank, saved, route

    def backward(
        self,
        dreadings: Tensor | None,
        dM: Tensor,
        bank: Tensor,
        inputs: Inputs,
        saved: Saved,
        chunk_size: int,
        mode: str,
        grads: Sequence[Tensor],
        fill: Fill | None = None,
    ) -> str:
        from .write_read_bwd_cuda import backward_cuda

        saved = _by_step(Saved(*(x.contiguous() for x in saved)), inputs[0], chunk_size)
        backward_cuda(dreadings, dM, bank, inputs, saved, chunk_size, mode, grads, fill)
        return "triton"


def _by_step(saved: Saved, k_idx: Tensor, chunk_size: int) -> Saved:
    streams, tokens, writes = k_idx.shape
    return saved.unflattened(num_steps(tokens, chunk_size), streams, chunk_size, writes)


CPU, CUDA = CpuRoute(), CudaRoute()
