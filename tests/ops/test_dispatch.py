"""`last_dispatch()`: what the calls of a thread decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sdm_compile import last_dispatch, sdm_decode_step, sdm_write_read, sdm_write_read_
from sdm_compile.ops import Dispatch, LastDispatch
from sdm_compile.ops.situation import Situation
from tests.cases import RAGGED, Inputs, upstream

T = TypeVar("T")
SIZES = {"streams": 2, "writes": 3, "reads": 4, "head_dim": 5, "num_slots": 19}
CALL = {"tokens": 11, "steps": 3, "chunk_size": 4, **SIZES}


def in_a_new_thread(function: Callable[[], T]) -> T:
    """Where no call has been made yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def expected(op: str, layout: int | None, writer: str | None, **sizes: int) -> Dispatch:
    return Dispatch(op=op, route="cpu", situation=Situation.EAGER, layout=layout, writer=writer, **sizes)


def after(*calls: Callable[[Inputs], Any]) -> LastDispatch:
    """The record of a fresh thread after these calls."""

    def run() -> LastDispatch:
        assert last_dispatch() == LastDispatch(None, None, None)
        for call in calls:
            call(RAGGED.make(torch.float32))
        return last_dispatch()

    return in_a_new_thread(run)


def train(inputs: Inputs, **settings: Any) -> None:
    inputs = inputs.requiring_grad()
    torch.autograd.backward(sdm_write_read(*inputs, chunk_size=4, **settings), upstream(inputs))


def decode(inputs: Inputs) -> None:
    sdm_decode_step(inputs.memory, *(x[:, 0] for x in inputs[1:]))


def test_a_call_that_saves_nothing() -> None:
    assert after(lambda i: sdm_write_read(*i, chunk_size=4)) == LastDispatch(
        forward=expected("write_read", 4, None, **CALL)
    )


def test_in_place() -> None:
    record = after(lambda i: sdm_write_read_(*i, chunk_size=4))
    assert record == LastDispatch(forward=expected("write_read_", 4, None, **CALL))


@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4"])
def test_training(mode: str) -> None:
    assert after(lambda i: train(i, snapshot_quant=mode)) == LastDispatch(
        forward=expected("write_read_saving", 2, "write", **CALL),
        backward=expected("write_read_bwd", 2, "write", **CALL),
    )


def test_training_that_recomputes() -> None:
    assert after(lambda i: train(i, snapshot_quant="recompute")) == LastDispatch(
        forward=expected("write_read_recompute", 4, None, **CALL),
        backward=expected("write_read_recompute_bwd", 4, None, **CALL),
    )


def test_decode() -> None:
    sizes = {**SIZES, "tokens": 1, "steps": 1, "chunk_size": 1}
    assert after(decode) == LastDispatch(decode=expected("decode_step_", None, None, **sizes))


@pytest.mark.parametrize("mode", ["none", "recompute"])
def test_a_backward_counts_for_the_thread_of_its_forward_too(mode: str) -> None:
    """On CUDA, autograd runs it in a thread of its own."""

    def run() -> LastDispatch:
        readings, _ = sdm_write_read(*RAGGED.make(torch.float32).requiring_grad(), chunk_size=4, snapshot_quant=mode)
        in_a_new_thread(readings.sum().backward)
        return last_dispatch()

    record = in_a_new_thread(run).backward
    assert record is not None and record.op == ("write_read_bwd" if mode == "none" else "write_read_recompute_bwd")


def test_each_kind_keeps_its_latest() -> None:
    record = after(train, decode, lambda i: sdm_write_read(*i.tokens(0, 9), chunk_size=2))
    assert record.forward == expected("write_read", 4, None, **{**CALL, "tokens": 9, "steps": 5, "chunk_size": 2})
    assert record.backward == expected("write_read_bwd", 2, "write", **CALL)
    assert record.decode is not None
    assert record.decode.op == "decode_step_"


def test_nothing_to_do_is_recorded_too() -> None:
    record = after(lambda i: sdm_write_read(*i.tokens(0, 0)))
    assert record.forward == expected("write_read", 4, None, **{**CALL, "tokens": 0, "steps": 0, "chunk_size": 64})


def test_a_refused_call_leaves_no_record() -> None:
    def refused(inputs: Inputs) -> None:
        with pytest.raises(ValueError, match="v has shape"):
            sdm_write_read(*inputs._replace(v=inputs.v[:1]))

    assert after(refused) == LastDispatch()


def test_tracing_leaves_no_record() -> None:
    def traced(inputs: Inputs) -> None:
        sdm_write_read(*(x.to("meta") for x in inputs))
        make_fx(lambda *args: sdm_write_read(*args), tracing_mode="fake")(*inputs)

    assert after(traced) == LastDispatch()


def test_a_compiled_call_is_recorded() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sdm_write_read, fullgraph=True, backend="aot_eager")
    record = after(lambda i: compiled(*i, chunk_size=4))
    assert record == LastDispatch(forward=expected("write_read", 4, None, **CALL))


def test_threads_keep_their_own() -> None:
    train(RAGGED.make(torch.float32))
    mine = last_dispatch()
    assert mine.forward is not None
    other = after(lambda i: sdm_write_read(*i.tokens(0, 5)))
    assert other.forward is not None
    assert other.forward.tokens == 5
    assert last_dispatch() == mine


def test_records_are_frozen() -> None:
    record = after(decode)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.decode = None  # type: ignore[misc]
    assert record.decode is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.decode.steps = 2  # type: ignore[misc]
