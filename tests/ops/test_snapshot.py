"""The table of who keeps which rows, SPEC section 4."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from sdm_compile import UnsupportedConfigurationError, repeated_write_slots, sdm_write_read
from sdm_compile.ops import write_read_ops
from sdm_compile.ops.saved import empty_saved
from sdm_compile.ops.situation import Situation
from sdm_compile.ops.snapshot import (
    COMPACT,
    NO_ROWS,
    VERSIONS,
    Announcement,
    SnapshotMismatchError,
    SnapshotPlan,
    agreed_writer,
    check_rows,
    keeps_versions,
    plan_snapshot,
)
from tests.cases import TANGLED

TABLE = [
    # saving, mode, situation: layout, writer
    (False, "none", Situation.EAGER, 4, None),
    (False, "none", Situation.CAPTURING, 4, None),
    (False, "int4", Situation.EAGER, 4, None),
    (True, "none", Situation.EAGER, 2, "write"),
    (True, "none", Situation.CAPTURING, 2, "gather"),
    (True, "bf16", Situation.EAGER, 2, "write"),
    (True, "bf16", Situation.CAPTURING, 2, "write"),
    (True, "fp8", Situation.EAGER, 2, "write"),
    (True, "fp8", Situation.CAPTURING, 2, "write"),
    (True, "int4", Situation.EAGER, 2, "write"),
    (True, "int4", Situation.CAPTURING, 2, "write"),
    (True, "recompute", Situation.EAGER, 4, None),
    (True, "recompute", Situation.CAPTURING, 4, None),
]


@pytest.mark.parametrize(("saving", "mode", "situation", "layout", "writer"), TABLE)
def test_plan(saving: bool, mode: str, situation: Situation, layout: int, writer: str | None) -> None:
    assert plan_snapshot(saving, mode, situation) == SnapshotPlan(layout, writer)


@pytest.mark.parametrize("situation", Situation)
def test_plan_with_versions(situation: Situation) -> None:
    assert plan_snapshot(True, "none", situation, versions=True) == SnapshotPlan(VERSIONS, "write")
    assert plan_snapshot(False, "none", situation, versions=True) == SnapshotPlan(NO_ROWS, None)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "mode", "keeps"),
    [
        ("cuda", torch.bfloat16, 1024, "none", True),
        ("cuda", torch.float32, 132, "none", True),
        ("cuda", torch.float32, 64, "none", False),  # short rows
        ("cuda", torch.bfloat16, 1004, "none", False),  # not a multiple of 16 bytes
        ("cuda", torch.float32, 1024, "bf16", False),
        ("cuda", torch.bfloat16, 1024, "bf16", True),  # which is "none" there
        ("cuda", torch.bfloat16, 1024, "fp8", False),
        ("cuda", torch.bfloat16, 1024, "recompute", False),
        ("cpu", torch.bfloat16, 1024, "none", False),
    ],
)
def test_which_calls_keep_versions(device: str, dtype: torch.dtype, width: int, mode: str, keeps: bool) -> None:
    with FakeTensorMode():
        assert keeps_versions(torch.empty(5, width, dtype=dtype, device=device), mode) == keeps


# What the write stage of each of these calls announces, and whatever it may not.
RIGHT = {
    SnapshotPlan(NO_ROWS, None): Announcement(NO_ROWS, False),
    SnapshotPlan(COMPACT, "write"): Announcement(COMPACT, True),
    SnapshotPlan(COMPACT, "gather"): Announcement(COMPACT, False),
    SnapshotPlan(VERSIONS, "write"): Announcement(VERSIONS, True),
}
LAYOUTS = (0, COMPACT, NO_ROWS, VERSIONS)
ANNOUNCEMENTS = [Announcement(layout, stores) for layout in LAYOUTS for stores in (False, True)]


@pytest.mark.parametrize("declared", RIGHT, ids=str)
def test_handshake(declared: SnapshotPlan) -> None:
    assert agreed_writer(declared, RIGHT[declared]) == declared.writer
    for announced in ANNOUNCEMENTS:
        if announced != RIGHT[declared]:
            with pytest.raises(SnapshotMismatchError, match="but the write stage announced"):
                agreed_writer(declared, announced)


def test_more_rows_than_int32_counts_are_refused_on_cuda() -> None:
    for rows, device in ((2**31, "cpu"), (2**31 - 1, "cuda")):
        check_rows(rows, torch.device(device))
    with pytest.raises(UnsupportedConfigurationError, match="recompute"):
        check_rows(2**31, torch.device("cuda"))


def test_a_route_refuses_a_writer_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_read_ops, "plan_snapshot", lambda *_: SnapshotPlan(2, "gather"))
    repeated_write_slots()
    inputs = TANGLED.make(torch.float32).requiring_grad()
    with pytest.raises(SnapshotMismatchError, match="writer='gather'"):
        sdm_write_read(*inputs, chunk_size=TANGLED.chunk_size)
    assert repeated_write_slots() == 0


def test_what_is_kept_needs_no_graph_for_each_number_of_tokens() -> None:
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    k_idx = mode.from_tensor(
        torch.zeros(2, 40, 3, dtype=torch.int64),
        symbolic_context=StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]),
    )
    with mode:
        memory = torch.empty(20, 132)
        saved = empty_saved(memory, k_idx, k_idx, 16, "none", versions=True)
    assert saved.has_versions and saved.latest.shape == (20,) and saved.previous.shape == saved.snapshot.shape[:1]
    assert not shapes.guards
