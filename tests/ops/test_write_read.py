"""The write/read through its public functions: values, bits, edges and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile import UnsupportedConfigurationError, reference, repeated_write_slots, sdm_write_read, sdm_write_read_
from tests.bad_inputs import BAD_INPUTS, BadInput, assert_refused
from tests.calls import call
from tests.cases import CASES, FLOATS, RAGGED, SEVERAL, TANGLED, Case, Inputs, gradients, upstream, values_and_gradients
from tests.harness import LAYOUTS, TOLERANCES, assert_close, assert_same_bits, laid_out

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NAN = float("nan")

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
several_cases = pytest.mark.parametrize("case", SEVERAL, ids=lambda c: c.name)
every_dtype = pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)


# Meaning


@every_dtype
@every_case
def test_values_and_gradients(case: Case, dtype: torch.dtype) -> None:
    """Against the differentiated float64 token loop: gradients of both outputs jointly, and of each alone."""
    inputs = case.make(dtype).requiring_grad()
    exact = inputs.to(F64).requiring_grad()
    outputs, expected = call(case)(*inputs), reference.write_read(*exact)
    assert_close(outputs, expected)
    assert [out.dtype for out in outputs] == [dtype, dtype]
    dreadings, dfinal = upstream(inputs)
    for given in ((dreadings, dfinal), (dreadings, None), (None, dfinal)):
        got = gradients(outputs, inputs, given)
        want = gradients(expected, exact, [None if grad is None else grad.double() for grad in given])
        if case.erased == 1:  # no gate has a gradient, but rounding noise may remain
            v, g = FLOATS.index("v"), FLOATS.index("g")
            assert not want[g].any()
            assert got[g].norm() < TOLERANCES[dtype] * got[v].norm()
            got[g].zero_()
        assert_close(got, want)


def dyadic_inputs(dtype: torch.dtype, tokens: int) -> Inputs:
    """Numbers of so few bits that every sum in float32 is exact, but a bfloat16 bank must round."""
    inputs = replace(RAGGED, tokens=tokens, slots=5).make(F64)
    return inputs._replace(
        memory=(inputs.memory * 8).round(),
        k_val=0.5 + 0.5 * (inputs.k_val > 0.3),
        v=(inputs.v * 8).round(),
        beta=0.5 + 0.5 * (inputs.beta > 0.5),
        g=torch.where(inputs.g < -0.8, float("-inf"), 0.0).double(),
        q_val=0.25 * (inputs.q_val * 8).round(),
    ).to(dtype)


@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize(("dtype", "tokens"), [(F32, 4), (BF16, 10)], ids=str)
def test_rows_are_rounded_once_per_chunk(dtype: torch.dtype, tokens: int, chunk_size: int) -> None:
    inputs = dyadic_inputs(dtype, tokens)
    bank, readings = inputs.memory, []
    for start in range(0, tokens, chunk_size):
        part = inputs._replace(memory=bank).tokens(start, start + chunk_size)
        reading, bank = (x.to(dtype) for x in reference.write_read(*part.to(F64)))
        readings.append(reading)
    assert_same_bits(sdm_write_read(*inputs, chunk_size=chunk_size), (torch.cat(readings, 1), bank))
    exact = reference.write_read(*inputs.to(F64))[1]
    assert torch.equal(bank.double(), exact) == (dtype == F32), "the numbers must make bfloat16 round, and float32 not"


def test_default_chunk_size_is_64() -> None:
    inputs = Case("", streams=1, tokens=67).make(F32)
    assert_same_bits(sdm_write_read(*inputs), sdm_write_read(*inputs, chunk_size=64))
    assert not torch.equal(sdm_write_read(*inputs)[0], sdm_write_read(*inputs, chunk_size=16)[0])


# Dtypes and layouts of the inputs


def test_inputs_are_rounded_to_the_bank_dtype_but_not_the_gates() -> None:
    """Weights and values of a wider dtype act as if rounded first; beta and g are used as they come."""
    wide = RAGGED.make(F32)
    narrow = wide._replace(**{name: getattr(wide, name).to(BF16) for name in ("memory", "k_val", "v", "q_val")})
    mixed = narrow._replace(k_val=wide.k_val, v=wide.v, q_val=wide.q_val)
    assert_same_bits(sdm_write_read(*mixed, chunk_size=4), sdm_write_read(*narrow, chunk_size=4))
    rounded = narrow._replace(beta=wide.beta.to(BF16), g=wide.g.to(BF16))
    assert not torch.equal(sdm_write_read(*rounded, chunk_size=4)[0], sdm_write_read(*narrow, chunk_size=4)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts_of_inputs_and_gradients(layout: str) -> None:
    def strided(*args: Tensor) -> tuple[Tensor, Tensor]:
        return sdm_write_read(*(laid_out(x, layout) for x in args))

    def contiguous(*args: Tensor) -> tuple[Tensor, Tensor]:
        return sdm_write_read(*(laid_out(x, layout).contiguous() for x in args))

    inputs = RAGGED.make(F32)
    assert all(out.is_contiguous() for out in strided(*inputs))
    assert_same_bits(values_and_gradients(strided, inputs), values_and_gradients(contiguous, inputs))
    leaves = inputs.requiring_grad()
    outputs = sdm_write_read(*leaves)
    given = [laid_out(grad, layout) for grad in upstream(inputs)]
    expected = gradients(outputs, leaves, [grad.contiguous() for grad in given])
    assert_same_bits(gradients(outputs, leaves, given), expected)


# Memory: what is written, kept and shared


@pytest.mark.parametrize("tokens", [11, 0])
@pytest.mark.parametrize("settings", [{}, {"trace_steps": True}], ids=["composite", "traced"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_inputs_are_left_alone_and_outputs_are_fresh(tokens: int, settings: dict[str, bool], grad: bool) -> None:
    inputs = replace(RAGGED, tokens=tokens, repeated=0.3, no_slot=0.3).make(F32)
    if grad:
        inputs = inputs.requiring_grad()
    before, versions = [x.detach().clone() for x in inputs], [x._version for x in inputs]
    readings, final = sdm_write_read(*inputs, **settings)
    storages = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
    assert final.untyped_storage().data_ptr() not in storages
    assert not readings.numel() or readings.untyped_storage().data_ptr() not in storages
    with torch.no_grad():
        readings.fill_(7), final.fill_(7)
    assert_same_bits([x.detach() for x in inputs], before)
    assert [x._version for x in inputs] == versions


# The same bits


@every_dtype
def test_whole_chunks_in_two_calls_are_one_call(dtype: torch.dtype) -> None:
    inputs = RAGGED.make(dtype)
    readings, bank = sdm_write_read(*inputs.tokens(0, 8), chunk_size=4)
    rest, bank = sdm_write_read(*inputs._replace(memory=bank).tokens(8, 11), chunk_size=4)
    assert_same_bits((torch.cat([readings, rest], 1), bank), sdm_write_read(*inputs, chunk_size=4))


@every_dtype
@every_case
def test_saving_and_in_place_calls_have_the_bits_of_the_plain_one(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype)
    plain = call(case)(*inputs)
    assert_same_bits([out.detach() for out in call(case)(*inputs.requiring_grad())], plain)
    bank = inputs.memory.clone()
    readings = sdm_write_read_(bank, *inputs[1:], chunk_size=case.chunk_size)
    assert_same_bits((readings, bank), plain)


@every_dtype
@several_cases
def test_repeated_runs_have_the_same_bits(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype)
    first = values_and_gradients(call(case), inputs)
    for _ in range(3):
        assert_same_bits(values_and_gradients(call(case), inputs.clone()), first)


@every_dtype
@several_cases
def test_streams_do_not_depend_on_their_batch(case: Case, dtype: torch.dtype) -> None:
    """To rounding: on the CPU the library's matmuls may sum in another order for another batch size."""
    case = replace(case, streams=3)
    inputs = case.make(dtype)
    together = values_and_gradients(call(case), inputs)
    dreadings, dfinal = upstream(inputs)
    for p in range(3):
        own = slice(p * case.slots, (p + 1) * case.slots)
        alone = inputs.stream(p).requiring_grad()
        outputs = call(case)(*alone)
        assert_same_bits(outputs[1][: own.start].detach(), inputs.memory[: own.start])
        assert_same_bits(outputs[1][own.stop :].detach(), inputs.memory[own.stop :])
        got = [*outputs, *gradients(outputs, alone, (dreadings[p : p + 1], dfinal))]
        for place, (a, b) in enumerate(zip(got, together, strict=True)):
            rows = place in (1, 2)  # the final bank and the gradient of the first one
            assert_close(a[own] if rows else a, b[own] if rows else b[p : p + 1])


# What NaN reaches

both_gates = pytest.mark.parametrize("write_gates", [False, True], ids=["token gates", "write gates"])


@pytest.mark.parametrize("place", FLOATS)
@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_nan_stays_in_its_stream(place: str, stream: int, dtype: torch.dtype) -> None:
    """All of a stream's numbers NaN: the other stream's outputs and gradients keep their bits."""
    inputs = TANGLED.make(dtype)
    clean = values_and_gradients(call(TANGLED), inputs)
    rows = [slice(p * TANGLED.slots, (p + 1) * TANGLED.slots) for p in (0, 1)]
    getattr(inputs, place)[rows[stream] if place == "memory" else stream] = NAN
    got = values_and_gradients(call(TANGLED), inputs)
    assert got[0][stream].isnan().any(), "the stream itself must be hit"
    for number, (a, b) in enumerate(zip(got, clean, strict=True)):
        own = rows[1 - stream] if number in (1, 2) else 1 - stream
        assert b[own].isfinite().all()
        assert_same_bits(a[own], b[own])


@both_gates
@every_dtype
def test_nan_without_a_slot_reaches_nothing(dtype: torch.dtype, write_gates: bool) -> None:
    """Weights and gates of entries without a slot, and v, beta and g of tokens without a write slot."""
    case = replace(TANGLED, write_gates=write_gates)
    inputs = case.make(dtype)
    clean = values_and_gradients(call(case), inputs)
    no_write, no_read = inputs.k_idx < 0, inputs.q_idx < 0
    silent = no_write.all(-1, keepdim=True)
    unused = {
        "k_val": no_write,
        "v": silent.expand_as(inputs.v),
        "beta": silent,
        "g": no_write if write_gates else silent,
        "q_val": no_read,
    }
    assert all(mask.any() and not mask.all() for mask in unused.values())
    poisoned = inputs._replace(**{name: getattr(inputs, name).masked_fill(m, NAN) for name, m in unused.items()})
    poisoned.memory[-1] = NAN  # a row that no stream owns
    got = values_and_gradients(call(case), poisoned)
    assert got[1][-1].isnan().all()
    got[1][-1] = clean[1][-1]
    assert_same_bits(got, clean)
    grads = dict(zip(FLOATS, got[2:], strict=True))
    for name, mask in unused.items():
        assert (grads[name][mask] == 0).all(), name


@every_dtype
def test_tokens_without_any_slot_leave_the_bank_and_read_zero(dtype: torch.dtype) -> None:
    inputs = replace(RAGGED, no_slot=1.0).make(dtype)
    inputs = inputs._replace(**{n: torch.full_like(getattr(inputs, n), NAN) for n in FLOATS[1:]})
    inputs.memory[0, 0], inputs.memory[1, 1] = NAN, -0.0
    readings, final = sdm_write_read(*inputs)
    assert_same_bits(readings, torch.zeros_like(readings))
    assert_same_bits(final, inputs.memory)
    assert final[1, 1].signbit()


@every_dtype
def test_erasing_makes_exact_zeros(dtype: torch.dtype) -> None:
    """g = -inf with a write of weight 0 turns a finite row, however large, into zeros."""
    inputs = replace(RAGGED, erased=1.0).make(dtype)
    inputs = inputs._replace(memory=inputs.memory * 1e30, k_val=torch.zeros_like(inputs.k_val))
    _, final = sdm_write_read(*inputs)
    written = inputs.k_idx.unique()
    assert (final[written] == 0).all()
    kept = torch.ones(len(final), dtype=torch.bool).index_fill_(0, written, False)
    assert_same_bits(final[kept], inputs.memory[kept])


# Nothing to do


@pytest.mark.parametrize("mode", ["none", "bf16", "fp8", "int4"])
@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"streams": 0}, {"streams": 0, "spare_slots": 0}], ids=str)
def test_empty_calls(sizes: dict[str, int], mode: str) -> None:
    """T = 0, and P = 0 with or without rows in the bank: empty readings, the bank cloned, its gradient passed on."""
    inputs = replace(RAGGED, **sizes).make(F32)
    outputs = sdm_write_read(*inputs, snapshot_quant=mode)
    assert_same_bits(outputs, (inputs.memory.new_empty(*inputs.k_idx.shape[:2], RAGGED.head_dim), inputs.memory))
    bank = inputs.memory.clone()
    assert_same_bits((sdm_write_read_(bank, *inputs[1:]), bank), outputs)
    for settings in ({"snapshot_quant": mode}, {"trace_steps": True}):
        leaves = inputs.requiring_grad()
        outputs = sdm_write_read(*leaves, **settings)
        given = upstream(leaves)
        for got, name in zip(gradients(outputs, leaves, given), FLOATS, strict=True):
            assert_same_bits(got, given[1] if name == "memory" else torch.zeros_like(getattr(leaves, name)))


# Repeated write slots


def repeats_of(k_idx: Tensor) -> int:
    return sum(
        len(used) - len(set(used)) for row in k_idx.flatten(0, -2).tolist() for used in [[i for i in row if i >= 0]]
    )


def test_repeated_write_slots_are_counted() -> None:
    inputs = replace(RAGGED, repeated=0.5, no_slot=0.3).make(F32)
    expected = repeats_of(inputs.k_idx)
    assert expected > 3
    repeated_write_slots()
    sdm_write_read(*inputs)
    assert repeated_write_slots(reset=False) == expected
    sdm_write_read_(inputs.memory.clone(), *inputs[1:])
    assert repeated_write_slots() == 2 * expected, "reset=False must not reset"
    assert repeated_write_slots() == 0
    sdm_write_read(*inputs, trace_steps=True)
    with torch.inference_mode():
        sdm_write_read(*inputs)
    assert repeated_write_slots() == 2 * expected


@pytest.mark.parametrize("traced", [False, True], ids=["composite", "traced"])
def test_a_backward_counts_no_repeats(traced: bool) -> None:
    inputs = replace(RAGGED, repeated=0.5).make(F32).requiring_grad()
    repeated_write_slots()
    outputs = sdm_write_read(*inputs, trace_steps=traced)
    assert repeated_write_slots() == repeats_of(inputs.k_idx)
    gradients(outputs, inputs, upstream(inputs))
    assert repeated_write_slots() == 0


def test_well_formed_inputs_count_no_repeats() -> None:
    repeated_write_slots()
    sdm_write_read(*replace(RAGGED, no_slot=0.5).make(F32))  # several writes without a slot are no repeats
    assert repeated_write_slots() == 0


# In place


def test_in_place_advances_the_bank_and_its_version() -> None:
    inputs = RAGGED.make(F32)
    readings, final = sdm_write_read(*inputs)
    version = inputs.memory._version
    got = sdm_write_read_(*inputs)
    assert_same_bits((got, inputs.memory), (readings, final))
    assert inputs.memory._version > version
    assert got.untyped_storage().data_ptr() != inputs.memory.untyped_storage().data_ptr()


def test_in_place_counts_as_a_change_of_the_bank() -> None:
    """Autograd notices that a bank which a backward needs has moved on; also where there was nothing to write."""
    inputs = RAGGED.make(F32).requiring_grad("v")
    readings, final = sdm_write_read(*inputs)
    with torch.no_grad():
        sdm_write_read_(final, *inputs[1:])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        readings.sum().backward()
    nothing = replace(RAGGED, tokens=0).make(F32)
    sdm_write_read_(*nothing)
    assert nothing.memory._version > 0


@pytest.mark.parametrize("name", FLOATS)
def test_in_place_refuses_to_be_differentiated(name: str) -> None:
    inputs = RAGGED.make(F32).requiring_grad(name)
    before = inputs.memory.detach().clone()
    with pytest.raises(RuntimeError, match=r"write_read_ writes in place and has no gradient.*torch\.no_grad"):
        sdm_write_read_(*inputs)
    assert_same_bits(inputs.memory.detach(), before)
    assert inputs.memory._version == 0
    with torch.no_grad():
        sdm_write_read_(*inputs)
    assert not torch.equal(inputs.memory.detach(), before)


def test_in_place_under_inference_mode() -> None:
    inputs = RAGGED.make(F32)
    expected = sdm_write_read(*inputs)
    ordinary = inputs.memory.clone()
    with torch.inference_mode():
        made_inside = inputs.memory.clone()
        for bank in (ordinary, made_inside):
            assert_same_bits((sdm_write_read_(bank, *inputs[1:]), bank), expected)
    before = made_inside.clone()
    with pytest.raises(RuntimeError, match=r"made under torch\.inference_mode"):
        sdm_write_read_(made_inside, *inputs[1:])
    assert_same_bits(made_inside, before)
    sdm_write_read_(ordinary, *inputs[1:])


# Bad input


@pytest.mark.parametrize(
    ("bad", "way"),
    [(bad, way) for bad in BAD_INPUTS for way in ("no_grad", "grad", "traced", "in place") if way not in bad.not_for],
    ids=lambda x: getattr(x, "name", x),
)
def test_bad_input(bad: BadInput, way: str) -> None:
    function = sdm_write_read_ if way == "in place" else sdm_write_read
    settings = {"trace_steps": True} if way == "traced" else {}
    assert_refused(function, bad, requires_grad=way == "grad", **settings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_needs_a_contiguous_bank(layout: str) -> None:
    inputs = RAGGED.make(F32)
    bank = laid_out(inputs.memory, layout)
    before, version = bank.clone(), bank._version
    with pytest.raises(ValueError, match=r"memory has strides \(\d+, \d+\); an in-place call needs a contiguous bank"):
        sdm_write_read_(bank, *inputs[1:])
    assert_same_bits(bank, before)
    assert bank._version == version


@pytest.mark.parametrize(
    "settings", [{"snapshot_quant": "bf16"}, {"snapshot_quant": "fp8"}, {"grad_bank_fp32": True}], ids=str
)
def test_traced_steps_keep_plain_banks(settings: dict[str, Any]) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(UnsupportedConfigurationError, match=f"{name} is {value!r}.*trace_steps=False"):
        sdm_write_read(*RAGGED.make(F32), trace_steps=True, **settings)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_lossy_snapshot_of_a_float64_bank_is_refused(grad: bool) -> None:
    inputs = RAGGED.make(F64)
    with pytest.raises(UnsupportedConfigurationError, match="snapshot_quant is 'fp8' with a float64 bank"):
        sdm_write_read(*(inputs.requiring_grad() if grad else inputs), snapshot_quant="fp8")
