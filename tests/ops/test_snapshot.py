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
    # saving, mode, situation, whether the write can go by token: layout, writer
    (False, "none", Situation.EAGER, False, 4, None),
    (False, "none", Situation.EAGER, True, 4, None),
    (False, "none", Situation.CAPTURING, True, 4, None),
    (False, "int4", Situation.EAGER, False, 4, None),
    (True, "none", Situation.EAGER, False, 2, "write"),
    (True, "none", Situation.EAGER, True, 2, "gather"),
    (True, "none", Situation.CAPTURING, False, 2, "gather"),
    (True, "none", Situation.CAPTURING, True, 2, "gather"),
    *(
        (True, mode, situation, by_token, 2, "write")
        for mode in ("bf16", "fp8", "int4")
        for situation in Situation
        for by_token in (False, True)
    ),
    (True, "recompute", Situation.EAGER, False, 4, None),
    (True, "recompute", Situation.EAGER, True, 4, None),
    (True, "recompute", Situation.CAPTURING, True, 4, None),
]
every_row = pytest.mark.parametrize(("saving", "mode", "situation", "by_token", "layout", "writer"), TABLE)


@every_row
def test_plan(saving: bool, mode: str, situation: Situation, by_token: bool, layout: int, writer: str | None) -> None:
    assert plan_snapshot(saving, mode, situation, by_token) == SnapshotPlan(layout, writer)


# What the write stage of each of these calls announces, and whatever it may not.
RIGHT = {
    None: Announcement(NO_ROWS, False),
    "write": Announcement(COMPACT, True),
    "gather": Announcement(COMPACT, False),
}
ANNOUNCEMENTS = [Announcement(layout, stores) for layout in (0, COMPACT, NO_ROWS) for stores in (False, True)]


@every_row
def test_handshake(
    saving: bool, mode: str, situation: Situation, by_token: bool, layout: int, writer: str | None
) -> None:
    declared = plan_snapshot(saving, mode, situation, by_token)
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
