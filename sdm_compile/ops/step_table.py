"""The table of addresses on the device from which a captured step loop takes where the call's own tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .bound import KernelCall

ADDRESSES = 8  # a step's entries in a table; even, so that every step's are aligned to 16 bytes


class StepAddress(NamedTuple):
    """Where something lies that is not a loop's own: at its first step, and how many bytes further at each next one."""

    first: Tensor
    stride: int = 0


@triton.jit
def from_table(p, p_table, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pointer p, at the address that is a step's entry n of a table: a multiple of 16.

    The part of a step may be at another address where its rows are no multiple of 16 bytes: a kernel then knows of no
    row where it is, and relies on nothing.
    """
    return tl.multiple_of(tl.load(p_table + n).to(tl.pointer_type(p.dtype.element_ty)), 16)


@triton.jit
def rows_before(p_payload, p_rows, D):  # type: ignore[no-untyped-def]
    """How many rows of a payload of D columns come before p_rows, as int64."""
    return (p_rows.to(tl.int64) - p_payload.to(tl.int64)) // (D * (p_payload.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit(do_not_specialize=["steps", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"])
def _write_table_kernel(  # type: ignore[no-untyped-def]
    p_table,
    p0,
    p1,
    p2,
    p3,
    p4,
    p5,
    p6,
    p7,
    steps,
    s0: tl.int64,
    s1: tl.int64,
    s2: tl.int64,
    s3: tl.int64,
    s4: tl.int64,
    s5: tl.int64,
    s6: tl.int64,
    s7: tl.int64,
    B: tl.constexpr,
):
    firsts, strides = (p0, p1, p2, p3, p4, p5, p6, p7), (s0, s1, s2, s3, s4, s5, s6, s7)
    step = tl.arange(0, B)
    for n in tl.static_range(len(firsts)):
        address = firsts[n].to(tl.int64) + step * strides[n]
        tl.store(p_table + step * len(firsts) + n, address, mask=step < steps)


def write_table(table: Tensor, addresses: Sequence[StepAddress]) -> None:
    """Fills a table [steps, ADDRESSES] int64, on the current stream."""
    addresses = [*addresses, *[StepAddress(table)] * (ADDRESSES - len(addresses))]
    firsts, strides = zip(*addresses, strict=True)
    steps = table.shape[0]
    options = {"B": triton.next_power_of_2(steps), "num_warps": 1}
    KernelCall(_write_table_kernel, (1,), (table, *firsts, steps, *strides), options).launch()
