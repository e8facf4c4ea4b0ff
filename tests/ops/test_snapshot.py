"""The table of who keeps which rows, SPEC section 4."""

from __future__ import annotations

import pytest
import torch

from sdm_compile import UnsupportedConfigurationError, repeated_write_slots, sdm_write_read
from sdm_compile.ops import write_read_ops
from sdm_compile.ops.situation import Situation
from sdm_compile.ops.snapshot import (
    COMPACT,
    NO_ROWS,
    Announcement,
    SnapshotMismatchError,
    SnapshotPlan,
    agreed_writer,
    check_rows,
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


# What the write stage of each of these calls announces, and whatever it may not.
RIGHT = {
    None: Announcement(NO_ROWS, False),
    "write": Announcement(COMPACT, True),
    "gather": Announcement(COMPACT, False),
}
ANNOUNCEMENTS = [Announcement(layout, stores) for layout in (0, COMPACT, NO_ROWS) for stores in (False, True)]


@pytest.mark.parametrize(("saving", "mode", "situation", "layout", "writer"), TABLE)
def test_handshake(saving: bool, mode: str, situation: Situation, layout: int, writer: str | None) -> None:
    declared = plan_snapshot(saving, mode, situation)
    assert agreed_writer(declared, RIGHT[writer]) == writer
    for announced in ANNOUNCEMENTS:
        if announced != RIGHT[writer]:
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
