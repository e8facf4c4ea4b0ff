"""The calls that samples of the stages are cut from, and the chunked form of each, made of the stages' references."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sdm_compile import reference
from sdm_compile.ops.layout import ChunkFields, Staged
from tests.cases import Case, Inputs

# Every size differs, also from the number of steps, 7, and of the write entries of a chunk, 12.
RAGGED = Case("ragged", streams=2, tokens=26, writes=3, reads=6, head_dim=5, slots=9, chunk_size=4)
OTHER_SIZES = Case("other sizes", streams=3, tokens=17, writes=2, reads=7, head_dim=6, slots=8, chunk_size=4)
OTHER_CHUNK = replace(OTHER_SIZES, name="other sizes and chunk", chunk_size=9)
ONE = Case("one of everything", 1, 1, 1, 1, 1, 1, 0, 1)
REUSE = Case("heavy reuse", streams=2, tokens=23, writes=2, reads=5, head_dim=3, slots=4, chunk_size=9, signed=True)
WRITE_GATES = Case("gates per write", tokens=13, chunk_size=5, write_gates=True, gate_shift=0.3)
EDGES = Case(
    "every edge at once",
    tokens=23,
    chunk_size=7,
    write_gates=True,
    erased=0.1,
    no_slot=0.2,
    no_token=0.15,
    repeated=0.3,
    id_dtype=torch.int32,
)
ERASED = Case("erased by token", tokens=9, chunk_size=6, erased=0.3)
NO_SLOT = Case("no slot at all", streams=1, tokens=5, no_slot=1.0)
NO_STREAMS = Case("no streams", streams=0)
NO_TOKENS = Case("no tokens", tokens=0)

ONE_SLOT = Case("all to one slot", tokens=18, writes=1, reads=2, slots=1, chunk_size=6)
WIDE = Case("several blocks of columns", tokens=9, head_dim=1030, slots=4, chunk_size=3)
MANY_GROUPS = Case("several blocks of groups", tokens=130, slots=400, chunk_size=64)

EVERY = [RAGGED, OTHER_SIZES, ONE, REUSE, WRITE_GATES, EDGES, ERASED, NO_SLOT, NO_STREAMS, NO_TOKENS]
# For stages that see chunks alone, whose size is then one more size to differ.
EVERY_CHUNKED = [RAGGED, OTHER_CHUNK, *EVERY[2:]]
EVERY_STEP = EVERY_CHUNKED[:-1]  # for stages that see one step: there must be one
EVERY_STEP_BWD = [*EVERY_STEP, ONE_SLOT, WIDE, MANY_GROUPS]


class Chunked(NamedTuple):
    """The chunked form of one call, stage by stage."""

    staged: Staged
    fields: ChunkFields
    X: Tensor  # [steps, P, C, C]
    QX: Tensor  # [steps, P, C, C]
    banks: list[Tensor]  # [num_slots, D] before every step, and after the last
    retrieved: Tensor  # [steps, P, C, D], like the three that follow
    inter: Tensor
    delta: Tensor
    readings: Tensor


def run_chunked(inputs: Inputs, chunk_size: int) -> Chunked:
    staged = Staged(*reference.stage_inputs(*inputs[1:], chunk_size))
    staged = staged._replace(k_idx=staged.k_idx.int(), q_idx=staged.q_idx.int())
    fields = ChunkFields(*reference.phase1(staged.k_idx, staged.k_val, staged.g, staged.q_idx, staged.q_val))
    X, QX = reference.solve(fields.A, fields.QK, staged.beta)
    banks, per_step = [inputs.memory], []
    for s in range(staged.k_idx.shape[0]):
        k_idx, _, v, beta, _, q_idx, _ = (x[s] for x in staged)
        k_eff, q_w, write_w, _, _, *groups = (x[s] for x in fields)
        retrieved, inter = reference.token_gather(banks[-1], k_idx, k_eff, q_idx, q_w)
        delta, readings = reference.dual_matmul(X[s], QX[s], v, beta, retrieved, inter)
        banks.append(reference.decay_write(banks[-1], delta, write_w, *groups))
        per_step.append((retrieved, inter, delta, readings))
    stacked = [torch.stack(x) for x in zip(*per_step, strict=True)] or [staged.v] * 4
    return Chunked(staged, fields, X, QX, banks, *stacked)


@cache
def chunked(case: Case, dtype: torch.dtype = torch.float64) -> Chunked:
    """The call in float64, of inputs rounded to `dtype`; samples take slices of it."""
    return run_chunked(case.make(dtype).to(torch.float64), case.chunk_size)


def middle_step(case: Case) -> int:
    """A step whose bank has been written to, where there is more than one."""
    return len(chunked(case).readings) // 2
