"""The table of who keeps which rows, SPEC section 4."""

from __future__ import annotations

import pytest

from sdm_compile.ops.situation import Situation
from sdm_compile.ops.snapshot import SnapshotPlan, plan_snapshot

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
]


@pytest.mark.parametrize(("saving", "mode", "situation", "layout", "writer"), TABLE)
def test_plan(saving: bool, mode: str, situation: Situation, layout: int, writer: str | None) -> None:
    assert plan_snapshot(saving, mode, situation) == SnapshotPlan(layout, writer)
