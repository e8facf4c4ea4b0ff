"""The kernels of rows' versions in Triton's interpreter; and calls that keep versions against those that keep rows
before they are overwritten, bit by bit.

The interpreter has to be chosen before Triton is imported, so that its tests run in a process of their own.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sdm_compile.ops.write_read_ops import input_gradients
from tests.cases import RAGGED, REUSE, SIGNED, TANGLED, Case
from tests.harness import assert_same_bits, normal_like
from tests.interpreted import in_the_interpreter, run_interpreted

pytest.importorskip("triton")
from sdm_compile.ops import slabs, slot_parts
from sdm_compile.ops.row_versions_kernels import (
    Versions,
    latest_rows_call,
    version_links_call,
    version_rows_call,
)
from sdm_compile.ops.write_read_bwd_cuda import call_of
from tests import loops

STREAMS, STEPS, CHUNK, WRITES, READS, SLOTS, WIDTH = 2, 5, 3, 2, 4, 8, 4
ENTRIES = CHUNK * WRITES
CASES = [replace(case, head_dim=(case.head_dim + 3) // 4 * 4) for case in (RAGGED, TANGLED, SIGNED, REUSE)]


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


class Call:
    """Random ids of all steps, some of no slot, and the memory that versions of them take."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)

        def ids(width: int) -> Tensor:
            slots = torch.rand(STEPS, STREAMS, CHUNK, SLOTS, generator=g).argsort(-1)[..., :width]
            slots += SLOTS * torch.arange(STREAMS).view(STREAMS, 1, 1)
            return slots.masked_fill(torch.rand(slots.shape, generator=g) < 0.2, -1).int()

        self.k_idx, self.q_idx = ids(WRITES), ids(READS)
        self.group_slot = torch.full((STEPS, STREAMS, ENTRIES), -1, dtype=torch.int32)
        for step, stream in torch.cartesian_prod(torch.arange(STEPS), torch.arange(STREAMS)).tolist():
            slots = self.k_idx[step, stream].unique()
            slots = slots[slots >= 0]
            self.group_slot[step, stream, : len(slots)] = slots
        self.source = torch.randn(STREAMS * SLOTS + 1, WIDTH, generator=g)
        self.payload = torch.randn(STEPS * STREAMS * ENTRIES, WIDTH, generator=g)
        self.latest = torch.full((len(self.source),), -1, dtype=torch.int32)
        self.previous = torch.full((len(self.payload),), 77, dtype=torch.int32)
        self.k_rows, self.q_rows = (torch.full(x.shape, 99, dtype=torch.int64) for x in (self.k_idx, self.q_idx))

    def run(self, first: int, end: int, streams: slice = slice(None)) -> None:
        """These steps of these streams."""
        rows = self.payload.view(STEPS, STREAMS, ENTRIES, WIDTH)[first, streams.start or 0]
        versions, part = Versions(self.source, self.payload, rows, self.latest, self.previous), slice(first, end)
        rows_per_step = STREAMS * ENTRIES
        version_links_call(versions, None, self.group_slot[part, streams].contiguous(), rows_per_step).launch()
        idx = tuple(x[part, streams].contiguous() for x in (self.k_idx, self.q_idx))
        found = tuple(torch.full(x.shape, 99, dtype=torch.int64) for x in idx)
        version_rows_call(versions, None, idx, found, rows_per_step).launch()
        for out, x in zip((self.k_rows, self.q_rows), found, strict=True):
            out[part, streams] = x

    def expected(self) -> tuple[list[Tensor], Tensor, dict[int, int]]:
        """Addresses, predecessors and the latest versions, one step after the other."""
        latest: dict[int, int] = {}
        previous = torch.full_like(self.previous, 77)
        found = [torch.zeros(x.shape, dtype=torch.int64) for x in (self.k_idx, self.q_idx)]
        for step in range(STEPS):
            for out, idx in zip(found, (self.k_idx, self.q_idx), strict=True):
                for place in (idx[step] >= 0).nonzero().tolist():
                    slot = int(idx[step][tuple(place)])
                    row = self.payload[latest[slot]] if slot in latest else self.source[slot]
                    out[step][tuple(place)] = row.data_ptr()
            for stream, group in (self.group_slot[step] >= 0).nonzero().tolist():
                slot, own = int(self.group_slot[step, stream, group]), (step * STREAMS + stream) * ENTRIES + group
                previous[own] = latest.get(slot, -1)
                latest[slot] = own
        return found, previous, latest


@in_the_interpreter
@pytest.mark.parametrize("groups", [slot_parts.MOST_GROUPS, 4])
@pytest.mark.parametrize("cuts", [(0, 5), (0, 1, 2, 3, 4, 5), (0, 2, 4, 5)], ids=str)
def test_every_entry_finds_its_row_as_of_its_step(
    cuts: tuple[int, ...], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_parts, "MOST_GROUPS", groups)  # of a step's six
    call = Call(seed=len(cuts))
    found, previous, latest = call.expected()
    assert len(set(call.group_slot[call.group_slot >= 0].tolist())) < (call.group_slot >= 0).sum()  # slots come again
    for first, end in itertools.pairwise(cuts):
        call.run(first, end)
    assert_same_bits([call.k_rows, call.q_rows, call.previous], [*found, previous])
    assert {slot: n for slot, n in enumerate(call.latest.tolist()) if n >= 0} == latest
    bank = torch.full_like(call.source, float("nan"))
    latest_rows_call(bank, call.source, call.payload, call.latest).launch()
    rows = [call.payload[latest[slot]] if slot in latest else call.source[slot] for slot in range(len(bank))]
    assert_same_bits(bank, torch.stack(rows))


@in_the_interpreter
def test_streams_may_come_one_after_the_other() -> None:
    call = Call(seed=7)
    found, previous, _ = call.expected()
    for stream in range(STREAMS):
        for first, end in ((0, 2), (2, 5)):
            call.run(first, end, slice(stream, stream + 1))
    assert_same_bits([call.k_rows, call.q_rows, call.previous], [*found, previous])


@in_the_interpreter
def test_ids_beyond_the_bank_are_no_slots() -> None:
    calls = [Call(seed=3), Call(seed=3)]
    for call, instead in zip(calls, (len(calls[0].source) + 3, -1), strict=True):
        for ids in (call.k_idx, call.q_idx, call.group_slot):
            assert (ids == 4).any()
            ids[ids == 4] = instead
        call.run(0, STEPS)
    for name in ("latest", "previous"):
        assert_same_bits(getattr(calls[0], name), getattr(calls[1], name))
    assert all(((call.q_rows == 0) == ((call.q_idx < 0) | (call.q_idx >= len(call.source)))).all() for call in calls)


def train(case: Case, writer: str, slab: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Readings, the final bank and all gradients of a call that saves rows so, in memory that held something before."""
    memory, *inputs = case.make(dtype)
    bank, readings = memory.clone(), torch.full_like(inputs[2], float("nan"))
    saving = loops.saving_of(case, memory, inputs, "none", writer)
    for name, x in saving.saved._asdict().items():
        x.fill_(-1 if name == "latest" else 7)
    loops.forward(bank, inputs, case.chunk_size, readings, saving, slab=slab)
    grads = [loops.filled_gradient(normal_like(memory), memory), *input_gradients(inputs)]
    read = memory if writer == "versions" else bank
    call = call_of(normal_like(readings), grads[0], read, inputs, saving.saved, "none", grads[1:])
    loops.backward(call, case.chunk_size, slab=slab)
    assert_same_bits(memory, case.make(dtype).memory)
    return [readings, bank, *grads]


@in_the_interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_with_versions_has_the_bits_of_one_without(case: Case) -> None:
    expected = train(case, "write", 2)
    for slab in (1, 4):
        assert_same_bits(train(case, "versions", slab), expected)


@in_the_interpreter
def test_in_bfloat16() -> None:
    case = replace(REUSE, head_dim=24)
    assert_same_bits(train(case, "versions", 2, torch.bfloat16), train(case, "write", 2, torch.bfloat16))


@in_the_interpreter
def test_groups_of_streams_have_the_same_bits() -> None:
    case = CASES[-1]
    expected = train(case, "versions", 2)
    with patch.object(slabs, "working_bytes", lambda *args: 1):  # a stream at a time
        assert_same_bits(train(case, "versions", 2), expected)
