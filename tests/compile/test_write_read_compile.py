"""torch.compile and torch.export take the public calls whole: one graph, few over many lengths, the bits of eager."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sdm_compile import sdm_decode_step, sdm_write_read, sdm_write_read_
from sdm_compile.machine import why_not_compile
from tests.bad_inputs import BAD_INPUTS, BadInput
from tests.cases import RAGGED, TANGLED, Case, Inputs, values_and_gradients
from tests.harness import assert_same_bits

F32, BF16 = torch.float32, torch.bfloat16
LENGTHS = (5, 7, 64, 65, 130)  # one chunk of 64, one whole one, two and three
NO_GRAD = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}

write_read = functools.partial(sdm_write_read, chunk_size=TANGLED.chunk_size)
write_read_ = functools.partial(sdm_write_read_, chunk_size=TANGLED.chunk_size)
static_and_dynamic = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
without_grad = pytest.mark.parametrize("mode", NO_GRAD)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **options)


@static_and_dynamic
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_training(dtype: torch.dtype, dynamic: bool) -> None:
    function = compiled(write_read, dynamic=dynamic)
    for case in (TANGLED, replace(TANGLED, tokens=9)):
        inputs = case.make(dtype)
        assert_same_bits(values_and_gradients(function, inputs), values_and_gradients(write_read, inputs))


@pytest.mark.parametrize(
    "settings", [{"snapshot_quant": "fp8"}, {"snapshot_quant": "int4"}, {"grad_bank_fp32": True}], ids=str
)
def test_training_settings(settings: dict[str, Any]) -> None:
    call = functools.partial(write_read, **settings)
    inputs = TANGLED.make(BF16)
    got = values_and_gradients(compiled(call, backend="aot_eager"), inputs)
    assert_same_bits(got, values_and_gradients(call, inputs))
    plain = values_and_gradients(write_read, inputs)
    assert any(not torch.equal(a, b) for a, b in zip(got, plain, strict=True)), "the setting must reach the op"


def test_recomputing_in_one_graph() -> None:
    """Of every length that is cut into as many segments."""
    counter = CompileCounterWithBackend("aot_eager")
    call = functools.partial(write_read, snapshot_quant="recompute")
    function = compiled(call, backend=counter, dynamic=True)
    for tokens in (23, 28, 25):
        inputs = replace(TANGLED, tokens=tokens).make(F32)
        assert_same_bits(values_and_gradients(function, inputs), values_and_gradients(write_read, inputs))
    assert counter.frame_count == 1


def test_training_some_inputs() -> None:
    inputs = TANGLED.make(F32).requiring_grad("v")
    grads = [torch.autograd.grad(f(*inputs)[0].sum(), inputs.v)[0] for f in (compiled(write_read), write_read)]
    assert_same_bits(grads[0], grads[1])


@pytest.mark.skipif(why_not_compile() is not None, reason=str(why_not_compile()))
def test_segments_chain_inside_one_graph() -> None:
    """The final bank of one call is the bank of the next, with ordinary operations between."""

    def two_segments(*args: Tensor) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*args)
        readings, bank = write_read(*inputs.tokens(0, 9))
        rest, bank = write_read(*inputs._replace(memory=0.5 * bank).tokens(9, 23))
        return torch.cat([readings, rest], 1), bank

    inputs = TANGLED.make(F32)
    assert_same_bits(values_and_gradients(compiled(two_segments), inputs), values_and_gradients(two_segments, inputs))


@static_and_dynamic
@without_grad
def test_inference(mode: str, dynamic: bool) -> None:
    function = compiled(write_read, dynamic=dynamic)
    for case in (TANGLED, replace(TANGLED, tokens=9)):
        inputs = case.make(F32)
        with NO_GRAD[mode]():
            assert_same_bits(function(*inputs), write_read(*inputs))


@static_and_dynamic
@without_grad
def test_in_place(mode: str, dynamic: bool) -> None:
    """The bank itself advances, call after call."""
    function = compiled(write_read_, dynamic=dynamic)
    inputs, expected = TANGLED.make(F32), TANGLED.make(F32)
    address = inputs.memory.data_ptr()
    for stop in (23, 9):
        with NO_GRAD[mode]():
            readings = function(*inputs.tokens(0, stop))
            assert_same_bits(readings, write_read_(*expected.tokens(0, stop)))
        assert_same_bits(inputs.memory, expected.memory)
    assert inputs.memory.data_ptr() == address


@pytest.mark.parametrize("lead", [(2,), (2, 1)], ids=str)
@without_grad
def test_decode(mode: str, lead: tuple[int, ...]) -> None:
    """One graph for every step of a loop."""
    counter = CompileCounterWithBackend("inductor")
    function = compiled(sdm_decode_step, backend=counter)
    inputs, expected = TANGLED.make(F32), TANGLED.make(F32)
    with NO_GRAD[mode]():
        for t in range(6):
            token = [x[:, t].view(*lead, x.shape[-1]) for x in inputs[1:]]
            assert_same_bits(function(inputs.memory, *token), sdm_decode_step(expected.memory, *token))
            assert_same_bits(inputs.memory, expected.memory)
    assert counter.frame_count == 1


def test_reading_and_writing_in_one_graph() -> None:
    """A prefill, a decode step on the same bank and a functional read of it, in the order written."""

    def mixed(*args: Tensor) -> tuple[Tensor, ...]:
        inputs = Inputs(*args)
        before, _ = write_read(*inputs)
        prefill = write_read_(*inputs)
        step = sdm_decode_step(inputs.memory, *(x[:, 4] for x in inputs[1:]))
        after, final = write_read(*inputs)
        return before, prefill, step, after, final

    inputs, expected = TANGLED.make(F32), TANGLED.make(F32)
    with torch.no_grad():
        assert_same_bits(compiled(mixed)(*inputs), mixed(*expected))
    assert_same_bits(inputs.memory, expected.memory)


@pytest.mark.parametrize("way", ["train", "no_grad", "inference_mode", "in place"])
def test_two_graphs_serve_every_length(way: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    plain = sdm_write_read_ if way == "in place" else sdm_write_read
    function = compiled(plain, backend=counter)
    context = NO_GRAD.get(way, torch.no_grad if way == "in place" else contextlib.nullcontext)
    for tokens in LENGTHS:
        case = Case("", tokens=tokens, head_dim=3)
        got, expected = case.make(F32), case.make(F32)
        with context():
            if way == "train":
                assert_same_bits(values_and_gradients(function, got), values_and_gradients(plain, expected))
            else:
                assert_same_bits(function(*got), plain(*expected))
        assert_same_bits(got.memory, expected.memory)
    assert counter.frame_count <= 2


def test_nothing_to_do() -> None:
    inputs = replace(RAGGED, tokens=0).make(F32)
    assert_same_bits(values_and_gradients(compiled(write_read), inputs), values_and_gradients(write_read, inputs))


# Errors at trace time, with our text in them

TRACED_ERRORS = [bad for bad in BAD_INPUTS if bad.error is not IndexError]


@pytest.mark.parametrize("bad", TRACED_ERRORS, ids=lambda b: b.name)
def test_bad_input(bad: BadInput) -> None:
    assert_refused_while_tracing(sdm_write_read, bad)


@pytest.mark.parametrize("bad", TRACED_ERRORS[::7], ids=lambda b: b.name)
@pytest.mark.parametrize("way", ["grad", "traced", "in place", "decode"])
def test_bad_input_of_other_calls(bad: BadInput, way: str) -> None:
    if way in bad.not_for:
        return
    function = {"in place": sdm_write_read_, "decode": sdm_decode_step}.get(way, sdm_write_read)
    assert_refused_while_tracing(function, bad, way == "grad", **({"trace_steps": True} if way == "traced" else {}))


def assert_refused_while_tracing(
    function: Callable[..., Any], bad: BadInput, requires_grad: bool = False, **settings: Any
) -> None:
    inputs, keywords = bad.arguments()
    if requires_grad and inputs.memory.is_floating_point():
        inputs.memory.requires_grad_()
    before = inputs.memory.detach().clone()
    counter = CompileCounterWithBackend("eager")
    call = functools.partial(function, **keywords, **settings)
    with pytest.raises(Exception, match=re.escape(bad.message)):
        torch.compile(call, fullgraph=True, backend=counter)(*inputs)
    assert counter.frame_count == 0
    assert inputs.memory.is_meta or torch.equal(inputs.memory.detach(), before)


def test_traced_steps_keep_plain_banks() -> None:
    bad = BadInput("", lambda _: {"snapshot_quant": "bf16"}, "snapshot_quant is 'bf16'")
    assert_refused_while_tracing(sdm_write_read, bad, trace_steps=True)


def test_ids_beyond_the_bank_raise_when_they_are_run() -> None:
    inputs = RAGGED.make(F32)
    function = compiled(sdm_write_read, backend="aot_eager")
    function(*inputs)
    with pytest.raises(IndexError, match="k_idx holds slot id 36, but memory has 19 rows"):
        function(*inputs._replace(k_idx=inputs.k_idx + 19))


def test_in_place_refuses_to_be_differentiated() -> None:
    inputs = RAGGED.make(F32).requiring_grad("v")
    before = inputs.memory.clone()
    with pytest.raises(Exception, match="writes in place and has no gradient"):
        compiled(sdm_write_read_, backend="aot_eager")(*inputs)
    assert_same_bits(inputs.memory, before)


# Export


class Segment(torch.nn.Module):
    """A learned bank, as a program to export."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self.memory = torch.nn.Parameter(memory)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return write_read(self.memory, *inputs)


class Session(torch.nn.Module):
    """A bank that every call advances."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self.register_buffer("memory", memory)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return write_read_(self.memory, *inputs)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.nn.Module:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def test_export_of_any_length() -> None:
    inputs = TANGLED.make(F32)
    module = Segment(inputs.memory)
    length = torch.export.Dim("length", min=2, max=1000)
    with torch.no_grad():
        program = torch.export.export(module, (inputs[1:],), dynamic_shapes=(tuple({1: length} for _ in inputs[1:]),))
        loaded = saved_and_loaded(program)
        for stop in (23, 7, 2):
            part = inputs.tokens(0, stop)
            assert_same_bits(loaded(part[1:]), write_read(*part))


def test_export_of_an_advancing_bank() -> None:
    inputs, expected = TANGLED.make(F32), TANGLED.make(F32)
    with torch.no_grad():
        loaded = saved_and_loaded(torch.export.export(Session(inputs.memory), (inputs[1:],)))
        for _ in range(2):
            assert_same_bits(loaded(inputs[1:]), write_read_(*expected))
            assert_same_bits(dict(loaded.named_buffers())["memory"], expected.memory)
