"""What the public write/read owes whatever its inputs: changes that may alter its rounding and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdm_compile import sdm_write_read
from tests.cases import Case, Inputs
from tests.harness import assert_close, normal_like, vjp

quick = settings(deadline=None, derandomize=True, database=None, max_examples=25)


@st.composite
def calls(draw: st.DrawFn, repeated: bool = True) -> tuple[Inputs, int]:
    """Inputs in float64, with every edge of the contract, and a chunk size."""
    writes = draw(st.integers(1, 4))
    share = st.sampled_from([0.0, 0.0, 0.3])
    case = Case(
        "",
        streams=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 14)),
        writes=writes,
        reads=draw(st.integers(1, 5)),
        head_dim=draw(st.integers(1, 6)),
        slots=draw(st.integers(writes, 9)),
        spare_slots=draw(st.integers(0, 1)),
        chunk_size=draw(st.integers(1, 16)),
        write_gates=draw(st.booleans()),
        gate_shift=draw(st.sampled_from([0.0, 0.3])),
        erased=draw(share),
        no_slot=draw(share),
        no_token=draw(share),
        repeated=draw(share) if repeated else 0.0,
        signed=draw(st.booleans()),
    )
    return case.make(torch.float64, seed=draw(st.integers(0, 2**16))), case.chunk_size


def upstream(inputs: Inputs) -> list[Tensor]:
    """Gradients of the readings and of the final bank."""
    return [normal_like(inputs.v, 1), normal_like(inputs.memory, 2)]


def values_and_gradients(
    inputs: Inputs, chunk_size: int, given_grads: list[Tensor] | None = None
) -> tuple[list[Tensor], Inputs]:
    """Readings and final bank, and the inputs with gradients in the place of the floats."""

    def call(*args: Any) -> tuple[Tensor, Tensor]:
        return sdm_write_read(*args, chunk_size=chunk_size)

    grads = iter(vjp(call, inputs, given_grads or upstream(inputs)))
    return list(call(*inputs)), Inputs(*(next(grads) if x.is_floating_point() else x for x in inputs))


@quick
@given(call=calls(), other=st.integers(1, 16))
def test_the_chunk_size_changes_only_rounding(call: tuple[Inputs, int], other: int) -> None:
    inputs, chunk_size = call
    assert_close(values_and_gradients(inputs, other), values_and_gradients(inputs, chunk_size))


@quick
@given(call=calls(repeated=False), seed=st.integers(0, 2**16))
def test_the_order_of_a_tokens_writes_and_reads_changes_only_rounding(call: tuple[Inputs, int], seed: int) -> None:
    inputs, chunk_size = call
    generator = torch.Generator().manual_seed(seed)
    writes, reads = (torch.rand(x.shape, generator=generator).argsort(-1) for x in (inputs.k_idx, inputs.q_idx))

    def reordered(x: Inputs) -> Inputs:
        return x._replace(
            k_idx=x.k_idx.gather(-1, writes),
            k_val=x.k_val.gather(-1, writes),
            g=x.g.gather(-1, writes) if x.g.shape[-1] == writes.shape[-1] else x.g,
            q_idx=x.q_idx.gather(-1, reads),
            q_val=x.q_val.gather(-1, reads),
        )

    outputs, grads = values_and_gradients(inputs, chunk_size)
    assert_close(values_and_gradients(reordered(inputs), chunk_size), (outputs, reordered(grads)))


@quick
@given(call=calls(), seed=st.integers(0, 2**16))
def test_slots_have_no_order(call: tuple[Inputs, int], seed: int) -> None:
    """Bank rows anywhere else, streams interleaved, ids to match: the same readings, and the same rows there."""
    inputs, chunk_size = call
    place = torch.randperm(len(inputs.memory), generator=torch.Generator().manual_seed(seed))

    def moved(x: Inputs) -> Inputs:
        memory = torch.empty_like(x.memory).index_copy(0, place, x.memory)
        k_idx, q_idx = (torch.where(i >= 0, place[i.clamp_min(0)], i) for i in (x.k_idx, x.q_idx))
        return x._replace(memory=memory, k_idx=k_idx, q_idx=q_idx)

    (readings, final), grads = values_and_gradients(inputs, chunk_size)
    dreadings, dfinal = upstream(inputs)
    given_grads = [dreadings, torch.empty_like(dfinal).index_copy(0, place, dfinal)]
    (moved_readings, moved_final), moved_grads = values_and_gradients(moved(inputs), chunk_size, given_grads)
    assert_close([moved_readings, moved_final[place]], [readings, final])
    assert_close(moved_grads, moved(grads))


@quick
@given(call=calls())
def test_a_stream_alone_is_what_it_is_among_others(call: tuple[Inputs, int]) -> None:
    inputs, chunk_size = call
    readings, final = sdm_write_read(*inputs, chunk_size=chunk_size)
    bank = inputs.memory
    for p in range(len(readings)):
        alone, bank = sdm_write_read(bank, *(x[p : p + 1] for x in inputs[1:]), chunk_size=chunk_size)
        assert_close(alone[0], readings[p])
    assert_close(bank, final)


@quick
@given(call=calls(), cut=st.integers(0, 14))
def test_two_calls_are_one(call: tuple[Inputs, int], cut: int) -> None:
    """The final bank of the first goes into the second, and its gradient back."""
    inputs, chunk_size = call

    def two(memory: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        first, bank = sdm_write_read(memory, *(x[:, :cut] for x in rest), chunk_size=chunk_size)
        second, bank = sdm_write_read(bank, *(x[:, cut:] for x in rest), chunk_size=chunk_size)
        return torch.cat([first, second], 1), bank

    outputs, grads = values_and_gradients(inputs, chunk_size)
    assert_close(two(*inputs), outputs)
    assert_close(vjp(two, inputs, upstream(inputs)), [x for x in grads if x.is_floating_point()])
