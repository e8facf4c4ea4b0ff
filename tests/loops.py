"""A call's slabs on CUDA, run one launch after the other: what Triton's interpreter can do, and what a test can cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sdm_compile.ops import slabs, write_read_bwd_cuda, write_read_cuda
from sdm_compile.ops.launch import StepLoop, own_memory
from sdm_compile.ops.layout import num_steps
from sdm_compile.ops.repeats import repeat_count
from sdm_compile.ops.row_versions_kernels import latest_rows_call
from sdm_compile.ops.saved import empty_saved
from sdm_compile.ops.snapshot import COMPACT, VERSIONS, SnapshotPlan
from sdm_compile.ops.write_read_cuda import Saving, runs_by_step
from sdm_compile.ops.write_read_ops import bank_gradient
from tests.cases import Case


def _spoil(memory: Any, form: Any, name: str) -> None:
    """Overwrites the tensor of this name and all that takes turns with it: none of them is in use now."""
    storage = getattr(form, name).untyped_storage()._cdata
    for x, like in zip(tree_leaves(memory), tree_leaves(form), strict=True):
        if isinstance(x, Tensor) and like.untyped_storage()._cdata == storage:
            x.view(torch.uint8).fill_(255)


def _run(groups: Sequence[Sequence[StepLoop]], device: torch.device) -> None:
    for loop in (loop for group in groups for loop in group):
        memory, form = own_memory(loop, device), loop.memory_form()
        for x in filter(torch.is_tensor, tree_leaves(memory)):  # nothing relies on what it held
            x.view(torch.uint8).fill_(255)
        loop.stage(memory)
        loop.couple(memory, None)
        if loop.concludes:
            _spoil(memory, form, "dots")
        loop.steps(memory, None)
        if loop.concludes:
            _spoil(memory, form, "dB")
            loop.conclude(memory)
        loop.read(memory)


def saving_of(case: Case, memory: Tensor, inputs: Sequence[Tensor], mode: str, writer: str) -> Saving:
    """Where a forward of this case keeps what its backward reads; it holds nothing yet.

    writer: "gather" or "write", of compact rows; or "versions", which the write stores.
    """
    versions = writer == "versions"
    saved = empty_saved(memory, inputs[0], inputs[5], case.chunk_size, mode, versions)
    saved.latest.fill_(-1)
    steps = num_steps(case.tokens, case.chunk_size)
    saved = saved.unflattened(steps, case.streams, case.chunk_size, case.writes)
    return Saving(saved, mode, SnapshotPlan(VERSIONS, "write") if versions else SnapshotPlan(COMPACT, writer))


def filled_gradient(dfinal: Tensor | None, like: Tensor) -> Tensor:
    """Where a backward accumulates the gradient of a bank like `like`, in float32."""
    dM, fill = bank_gradient(dfinal, like, True)
    fill()
    return dM


def forward(
    bank: Tensor,
    inputs: Sequence[Tensor],
    chunk_size: int,
    readings: Tensor,
    saving: Saving | None = None,
    *,
    slab: int,
    by_step: bool | None = None,
) -> None:
    """`write_read_cuda` in slabs of so many steps, a power of two; by_step: other than as it would choose to launch."""
    with (
        patch.object(slabs, "slab_steps", lambda steps, fits: slab),
        patch.object(write_read_cuda, "runs_by_step", runs_by_step if by_step is None else lambda mode: by_step),
    ):
        versions = saving is not None and saving.declared.versions
        source = bank.clone() if versions else bank
        loops = write_read_cuda.call_loops(source, inputs, chunk_size, readings, saving, repeat_count(bank.device))
        _run(list(loops), bank.device)
        if versions:
            latest_rows_call(bank, source, saving.saved.snapshot, saving.saved.latest).launch()


def backward(call: write_read_bwd_cuda.Call, chunk_size: int, *, slab: int) -> None:
    """`backward_cuda` in slabs of so many steps, a power of two."""
    with patch.object(slabs, "slab_steps", lambda steps, fits: slab):
        _run(list(write_read_bwd_cuda.call_loops(call, chunk_size)), call.bank.device)
