"""The write/read through its public functions: values, gradients, edges and errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sdm_compile import UnsupportedConfigurationError, reference, repeated_write_slots, sdm_write_read, sdm_write_read_
from sdm_compile.ops.write_read_ops import empty_saved
from sdm_compile.ops.write_read_recompute import segments
from tests.bad_inputs import BAD_INPUTS, BadInput, assert_refused
from tests.cases import (
    CASES,
    FLOATS,
    RAGGED,
    REUSE,
    SEVERAL,
    TANGLED,
    Case,
    Inputs,
    gradients,
    upstream,
    values_and_gradients,
)
from tests.harness import LAYOUTS, TOLERANCES, assert_close, assert_same_bits, laid_out

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NAN = float("nan")

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
several_cases = pytest.mark.parametrize("case", SEVERAL, ids=lambda c: c.name)
every_dtype = pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)


def call(case: Case, **settings: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    return functools.partial(sdm_write_read, chunk_size=case.chunk_size, **settings)


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


@pytest.mark.parametrize("bank", [F64, F32, BF16], ids=str)
def test_gradients_have_each_input_dtype(bank: torch.dtype) -> None:
    """They are those that the same numbers in the bank's dtype get, rounded once to the input's dtype."""
    case = replace(RAGGED, write_gates=True)
    gate = F64 if bank == F64 else F32
    plain_dtypes = {"memory": bank, "k_val": bank, "v": bank, "beta": gate, "g": gate, "q_val": bank}
    mixed_dtypes = {"memory": bank, "k_val": BF16, "v": F64, "beta": F32, "g": BF16, "q_val": F32}
    mixed, plain = case.make(BF16), case.make(BF16)
    for name in FLOATS:
        mixed = mixed._replace(**{name: getattr(mixed, name).to(mixed_dtypes[name])})
        plain = plain._replace(**{name: getattr(plain, name).to(plain_dtypes[name])})
    got, expected = values_and_gradients(call(case), mixed), values_and_gradients(call(case), plain)
    assert_same_bits(got[:2], expected[:2])
    for name, a, b in zip(FLOATS, got[2:], expected[2:], strict=True):
        assert a.dtype == mixed_dtypes[name], name
        coarser = min(a.dtype, b.dtype, key=lambda d: d.itemsize)
        assert_same_bits(a.to(coarser), b.to(coarser))


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


def test_expanded_gradients() -> None:
    """The zero-stride ones that `sum().backward()` makes."""
    inputs = RAGGED.make(F64).requiring_grad()
    outputs = call(RAGGED)(*inputs)
    got = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), inputs.floats(), retain_graph=True)
    assert_same_bits(got, gradients(outputs, inputs, [torch.ones_like(out) for out in outputs]))


# Which gradients, how often


@pytest.mark.parametrize("names", [*((name,) for name in FLOATS), ("memory", "g"), ("k_val", "q_val")], ids="+".join)
@pytest.mark.parametrize("traced", [False, True], ids=["composite", "traced"])
def test_gradients_of_some_inputs(names: tuple[str, ...], traced: bool) -> None:
    case = replace(RAGGED, repeated=0.3, no_slot=0.2)
    some, everything = case.make(F64).requiring_grad(*names), case.make(F64).requiring_grad()
    outputs = call(case, trace_steps=traced)(*some)
    loss = sum((out * grad).sum() for out, grad in zip(outputs, upstream(some), strict=True))
    loss.backward()
    expected = gradients(call(case)(*everything), everything, upstream(some))
    for name, want in zip(FLOATS, expected, strict=True):
        grad = getattr(some, name).grad
        assert (grad is None) == (name not in names), name
        if grad is not None:
            assert_close(grad, want)


def test_no_gradient_wanted_saves_nothing() -> None:
    inputs = RAGGED.make(F32)
    outputs = sdm_write_read(*inputs)
    assert not any(out.requires_grad for out in outputs)
    with torch.no_grad():
        assert not any(out.requires_grad for out in sdm_write_read(*inputs.requiring_grad()))


@several_cases
def test_second_backward_through_one_call(case: Case) -> None:
    inputs = case.make(F32).requiring_grad()
    outputs = call(case)(*inputs)
    first = gradients(outputs, inputs, upstream(inputs))
    other = gradients(outputs, inputs, upstream(inputs, seed=5))
    assert_same_bits(gradients(outputs, inputs, upstream(inputs)), first)
    assert not torch.equal(first[0], other[0])
    torch.autograd.backward(outputs, upstream(inputs))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(outputs, upstream(inputs))


@every_dtype
@pytest.mark.parametrize("splits", [(4, 8), (3, 3, 10)], ids=str)
def test_segments_chain_with_gradient(dtype: torch.dtype, splits: tuple[int, ...]) -> None:
    """The final bank fed to the next call, empty segments too, against the token loop over everything."""
    inputs = RAGGED.make(dtype).requiring_grad()
    exact = inputs.to(F64).requiring_grad()
    bank, readings, start = inputs.memory, [], 0
    for stop in (*splits, RAGGED.tokens):
        reading, bank = sdm_write_read(*inputs._replace(memory=bank).tokens(start, stop), chunk_size=4)
        readings.append(reading)
        start = stop
    expected = reference.write_read(*exact)
    outputs = (torch.cat(readings, 1), bank)
    assert_close(outputs, expected)
    given = upstream(inputs)
    wanted = gradients(expected, exact, [grad.double() for grad in given])
    assert_close(gradients(outputs, inputs, given), wanted)


@every_dtype
def test_whole_chunks_in_two_calls_are_one_call(dtype: torch.dtype) -> None:
    inputs = RAGGED.make(dtype)
    readings, bank = sdm_write_read(*inputs.tokens(0, 8), chunk_size=4)
    rest, bank = sdm_write_read(*inputs._replace(memory=bank).tokens(8, 11), chunk_size=4)
    assert_same_bits((torch.cat([readings, rest], 1), bank), sdm_write_read(*inputs, chunk_size=4))


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


@pytest.mark.parametrize("place", ["final bank", "v", "k_val", "k_idx", "q_idx"])
def test_changing_what_the_backward_reads_raises(place: str) -> None:
    inputs = RAGGED.make(F32).requiring_grad()
    readings, final = sdm_write_read(*inputs)
    with torch.no_grad():
        changed = final if place == "final bank" else getattr(inputs, place)
        changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        readings.sum().backward()


# Snapshots and the gradient bank


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


QUANTIZED = {"bf16": 1e-2, "fp8": 6e-2, "int4": 2e-1}
every_mode = pytest.mark.parametrize("mode", QUANTIZED)


@every_mode
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@several_cases
def test_snapshot_modes_never_change_a_value(case: Case, dtype: torch.dtype, mode: str) -> None:
    plain, kept = call(case), call(case, snapshot_quant=mode)
    inputs = case.make(dtype)
    assert_same_bits(kept(*inputs), plain(*inputs))
    assert_same_bits(
        [out.detach() for out in kept(*inputs.requiring_grad())],
        [out.detach() for out in plain(*inputs.requiring_grad())],
    )


@every_mode
@several_cases
def test_snapshot_modes_round_some_gradients(case: Case, mode: str) -> None:
    inputs = case.make(F32)
    expected = values_and_gradients(call(case), inputs)[2:]
    got = values_and_gradients(call(case, snapshot_quant=mode), inputs)[2:]
    for name, a, b in zip(FLOATS, got, expected, strict=True):
        if name in ("memory", "v", "beta"):
            assert_same_bits(a, b)
        else:
            assert relative_error(a, b) < QUANTIZED[mode], name
            assert not torch.equal(a, b), f"{name}: the rows were not quantized"


def test_bf16_snapshots_of_a_bfloat16_bank_are_the_rows() -> None:
    inputs = REUSE.make(BF16)
    expected = values_and_gradients(call(REUSE), inputs)
    assert_same_bits(values_and_gradients(call(REUSE, snapshot_quant="bf16"), inputs), expected)
    assert not torch.equal(values_and_gradients(call(REUSE, snapshot_quant="fp8"), inputs)[3], expected[3])


@pytest.mark.parametrize("grad_bank_fp32", [False, True], ids=["its own dtype", "float32"])
@every_dtype
@several_cases
def test_recomputing_changes_no_bit(case: Case, dtype: torch.dtype, grad_bank_fp32: bool) -> None:
    inputs = case.make(dtype)
    settings = {"grad_bank_fp32": grad_bank_fp32}
    assert segments(inputs.memory.shape[0], inputs.k_idx, case.chunk_size) > 1 or case.tokens <= 2 * case.chunk_size
    expected = values_and_gradients(call(case, **settings), inputs)
    repeated_write_slots()
    assert_same_bits(values_and_gradients(call(case, snapshot_quant="recompute", **settings), inputs), expected)
    repeats = repeated_write_slots()
    values_and_gradients(call(case, **settings), inputs)
    assert repeats == repeated_write_slots(), "repeats are counted once"


def test_recomputing_keeps_least_where_banks_and_rows_balance() -> None:
    memory = torch.empty(16384, 256, device="meta")
    ids = torch.empty(2, 128 * 64, 64, dtype=torch.int32, device="meta")
    saved = empty_saved(memory, ids, ids, 64, "none")
    whole = sum(x.numel() * x.element_size() for x in saved)

    def kept(count: int) -> float:
        return count * memory.numel() * memory.element_size() + whole / count

    count = segments(memory.shape[0], ids, 64)
    assert kept(count) == min(kept(2**i) for i in range(8)) < whole / 4


def test_float32_gradient_bank_is_more_accurate() -> None:
    """Over many steps that each add to the same rows of a bfloat16 bank's gradient."""
    case = Case("", tokens=60, slots=4, chunk_size=1, head_dim=16, reads=2)
    inputs = case.make(BF16)
    inputs = inputs.to(F32)._replace(memory=inputs.memory)
    exact = values_and_gradients(reference.write_read, inputs.to(F64))[2:]
    calls = [values_and_gradients(call(case, grad_bank_fp32=wide), inputs) for wide in (False, True)]
    assert_same_bits(calls[1][:2], calls[0][:2])
    for name, narrow, wide, want in zip(FLOATS, calls[0][2:], calls[1][2:], exact, strict=True):
        if name == "q_val":  # its gradient reads no row of that bank
            assert_same_bits(wide, narrow)
        else:
            assert relative_error(wide, want) < 0.95 * relative_error(narrow, want), name


def test_float32_gradient_bank_changes_nothing_on_a_float32_bank() -> None:
    inputs = REUSE.make(F32)
    assert_same_bits(
        values_and_gradients(call(REUSE, grad_bank_fp32=True), inputs), values_and_gradients(call(REUSE), inputs)
    )


# The same bits


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


# Transforms, checkpointing, autocast


def scalar_loss(inputs: Inputs, **settings: Any) -> Callable[..., Tensor]:
    """A loss of the float inputs alone, to differentiate by function transforms."""
    given = upstream(inputs)

    def loss(*floats: Tensor) -> Tensor:
        outputs = sdm_write_read(*inputs._replace(**dict(zip(FLOATS, floats, strict=True))), chunk_size=4, **settings)
        return sum(((out * grad).sum() for out, grad in zip(outputs, given, strict=True)), start=given[0].new_zeros(()))

    return loss


@pytest.mark.parametrize("traced", [False, True], ids=["composite", "traced"])
def test_func_levels_nest(traced: bool) -> None:
    """A level outside differentiates too: to first order it gets its gradient, to second order it raises."""
    inputs = RAGGED.make(torch.float64)
    one = torch.ones((), dtype=torch.float64)

    def loss(v: Tensor) -> Tensor:
        return sdm_write_read(*inputs._replace(v=v), chunk_size=RAGGED.chunk_size, trace_steps=traced)[0].sin().sum()

    inside, outside = inputs.v.clone().requires_grad_(), inputs.v.clone().requires_grad_()
    _, value = torch.func.grad_and_value(lambda scale: loss(inside * scale))(one)
    value.backward()
    loss(outside).backward()
    assert_close(inside.grad, outside.grad)
    with pytest.raises(NotImplementedError, match="no derivative"):
        torch.func.grad(torch.func.grad(lambda scale: loss(inputs.v * scale)))(one)


@pytest.mark.parametrize("traced", [False, True], ids=["composite", "traced"])
def test_func_grad_and_vjp(traced: bool) -> None:
    inputs = RAGGED.make(F64)
    expected = values_and_gradients(call(RAGGED, trace_steps=traced), inputs)
    loss = scalar_loss(inputs, trace_steps=traced)
    assert_same_bits(torch.func.grad(loss, argnums=tuple(range(6)))(*inputs.floats()), expected[2:])
    outputs, pullback = torch.func.vjp(
        lambda m, v: call(RAGGED, trace_steps=traced)(m, *inputs[1:3], v, *inputs[4:]), inputs.memory, inputs.v
    )
    assert_same_bits(outputs, expected[:2])
    assert_same_bits(pullback(tuple(upstream(inputs))), (expected[2], expected[4]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_banks_is_a_loop() -> None:
    inputs = RAGGED.make(F64)
    banks = torch.stack([inputs.memory, -2 * inputs.memory, inputs.memory.flip(1)])
    loss = scalar_loss(inputs)

    def by_bank(bank: Tensor) -> Tensor:
        return loss(bank, *inputs.floats()[1:])

    gradient = torch.func.grad(by_bank)
    gate_gradient = torch.func.grad(lambda bank, g: loss(bank, *inputs.floats()[1:4], g, inputs.q_val), argnums=1)
    assert_same_bits(torch.vmap(by_bank)(banks), torch.stack([by_bank(bank) for bank in banks]))
    assert_same_bits(torch.vmap(gradient)(banks), torch.stack([gradient(bank) for bank in banks]))
    looped = torch.stack([gate_gradient(bank, inputs.g) for bank in banks])
    assert not torch.equal(looped[0], looped[1])
    assert_same_bits(torch.vmap(gate_gradient, in_dims=(0, None))(banks, inputs.g), looped)


@pytest.mark.parametrize("traced", [False, True], ids=["composite", "traced"])
def test_forward_mode_and_double_backward_raise(traced: bool) -> None:
    inputs = RAGGED.make(F64)
    loss = scalar_loss(inputs, trace_steps=traced)
    floats = inputs.floats()
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(loss, tuple(floats), tuple(torch.ones_like(x) for x in floats))
    leaves = inputs.requiring_grad().floats()
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        torch.autograd.grad(sum(x.square().sum() for x in first), leaves)


def test_in_place_refuses_forward_mode() -> None:
    inputs = RAGGED.make(F32)
    before = inputs.memory.clone()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda v: sdm_write_read_(*inputs._replace(v=v)), (inputs.v,), (inputs.v,))
    assert_same_bits(inputs.memory, before)


@pytest.mark.parametrize("traced", [False, True], ids=["composite", "traced"])
def test_activation_checkpointing(traced: bool) -> None:
    inputs = REUSE.make(F32)
    plain = call(REUSE, trace_steps=traced)

    def checkpointed(*args: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(plain, *args, use_reentrant=False)

    assert_same_bits(values_and_gradients(checkpointed, inputs), values_and_gradients(plain, inputs))


@pytest.mark.parametrize("traced", [False, True], ids=["composite", "traced"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype, traced: bool) -> None:
    """Active around the call and around its backward."""
    inputs = REUSE.make(dtype)
    expected = values_and_gradients(call(REUSE, trace_steps=traced), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(values_and_gradients(call(REUSE, trace_steps=traced), inputs), expected)
        bank = inputs.memory.clone()
        readings = sdm_write_read_(bank, *inputs[1:], chunk_size=REUSE.chunk_size)
    assert_same_bits((readings, bank), expected[:2])
