"""Walks over many steps in order, of which each slot's must be: several programs of a stream, with slots of their own.

Each program reads the slots of all groups, and follows those of its part. Two parts share no slot, so that no program
waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_PARTS = 8


@triton.jit
def of_this_part(slot):
    """Whether slots are of this program's part, the number of which is its place in the grid's second dimension.

    There is a power of two of them; -1 is of the last one.
    """
    return (slot & (tl.num_programs(1) - 1)) == tl.program_id(1)


def slot_parts(groups: int, streams: int) -> tuple[int, int]:
    """Groups of a step that a program takes at a time, of so many, and the parts of each stream's slots."""
    return min(8192, triton.next_power_of_2(groups)), max(1, min(MOST_PARTS, 256 // triton.next_power_of_2(streams)))
