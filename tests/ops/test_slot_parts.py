"""How walks over a stream's slots are divided among programs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from sdm_compile.ops.slot_parts import MOST_GROUPS, slot_parts

STREAMS = (0, 1, 2, 3, 5, 8, 16, 17, 64, 65535)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("groups", [1, 3, 64, MOST_GROUPS])
def test_parts_are_a_power_of_two_and_few(groups: int, streams: int) -> None:
    block, parts = slot_parts(groups, streams)
    assert groups <= block <= MOST_GROUPS and block & (block - 1) == 0
    assert parts in (1, 2, 4, 8)  # so that the last bits of a slot are its part's number
    assert parts * streams <= max(16, streams)


@pytest.mark.parametrize("streams", STREAMS)
def test_steps_of_several_blocks_have_one_part(streams: int) -> None:
    assert slot_parts(MOST_GROUPS + 1, streams) == (MOST_GROUPS, 1)


def test_few_streams_have_several_parts() -> None:
    assert [slot_parts(64, streams)[1] for streams in (1, 2, 3, 4, 8, 16, 17)] == [8, 8, 4, 4, 2, 1, 1]
