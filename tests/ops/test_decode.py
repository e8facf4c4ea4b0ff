"""The decode step: one token per stream, in place, against SPEC section 1's token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile import reference, repeated_write_slots, sdm_decode_step, sdm_write_read
from tests.bad_inputs import BAD_INPUTS, BadInput, assert_refused
from tests.cases import CASES, FLOATS, RAGGED, TANGLED, Case, Inputs
from tests.harness import LAYOUTS, assert_close, assert_same_bits, laid_out

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NAN = float("nan")
every_dtype = pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)


def one_token(inputs: Inputs, t: int) -> Inputs:
    """Token t of every stream: inputs [P, *]."""
    return Inputs(inputs.memory, *(x[:, t] for x in inputs[1:]))


def decode_all(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Readings [P, T, D] and the bank after T decode steps."""
    bank = inputs.memory.clone()
    readings = [sdm_decode_step(*one_token(inputs._replace(memory=bank), t)) for t in range(inputs.v.shape[1])]
    return torch.stack(readings, 1), bank


def rounded_token(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """One token in float64, its rows rounded to the bank's dtype before they are read."""
    dtype, exact = inputs.memory.dtype, inputs.to(F64)
    bank = reference.decode_step(*exact)[1].to(dtype)
    nothing = exact._replace(memory=bank.double(), k_idx=torch.full_like(inputs.k_idx, -1))
    return reference.decode_step(*nothing)[0], bank


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_steps_are_the_token_loop(case: Case, dtype: torch.dtype) -> None:
    """Rounded to the bank's dtype once per token, where the dtype rounds at all."""
    inputs = replace(case, tokens=min(case.tokens, 20)).make(dtype)
    bank, readings = inputs.memory, []
    for t in range(inputs.v.shape[1]):
        reading, bank = rounded_token(one_token(inputs._replace(memory=bank), t))
        readings.append(reading)
    assert_close(decode_all(inputs), (torch.stack(readings, 1), bank))
    if dtype != BF16:
        assert_close(decode_all(inputs), reference.write_read(*inputs.to(F64)))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_are_rounded_once_per_token(dtype: torch.dtype) -> None:
    """Every sum here is exact in float32, so the one rounding of each row and of each reading is all there is."""
    inputs = Case("", tokens=4, slots=5).make(F64)
    inputs = inputs._replace(
        memory=(inputs.memory * 8).round(),
        k_val=0.5 + 0.5 * (inputs.k_val > 0.3),
        v=(inputs.v * 8).round(),
        beta=0.5 + 0.5 * (inputs.beta > 0.5),
        g=torch.zeros_like(inputs.g),
        q_val=0.25 * (inputs.q_val * 8).round(),
    ).to(dtype)
    bank = inputs.memory
    for t in range(4):
        token = one_token(inputs._replace(memory=bank), t)
        reading, bank = rounded_token(token)
        after = token.memory.clone()
        got = sdm_decode_step(*token._replace(memory=after))
        assert_same_bits((got, after), (reading.to(dtype), bank))
    exact = reference.write_read(*inputs.to(F64))[1]
    assert torch.equal(bank.double(), exact) == (dtype == F32), "the numbers must make bfloat16 round, and float32 not"


@pytest.mark.parametrize("lead", [(), (1,), (6,), (2, 3), (3, 1, 2), (0,), (2, 0)], ids=str)
@every_dtype
def test_any_leading_dimensions(lead: tuple[int, ...], dtype: torch.dtype) -> None:
    """One token or many, none too, in any arrangement: the same as a flat batch of them."""
    streams = torch.Size(lead).numel()
    flat = one_token(replace(TANGLED, streams=streams).make(dtype), 0)
    shaped = Inputs(flat.memory.clone(), *(x.reshape(*lead, x.shape[-1]) for x in flat[1:]))
    got, expected = sdm_decode_step(*shaped), sdm_decode_step(*flat)
    assert got.shape == (*lead, RAGGED.head_dim)
    assert_same_bits((got.flatten(), shaped.memory), (expected.flatten(), flat.memory))
    assert got.is_contiguous()


@every_dtype
def test_a_reading_sees_the_write(dtype: torch.dtype) -> None:
    inputs = one_token(replace(RAGGED, writes=4, reads=4).make(dtype), 0)
    inputs = inputs._replace(q_idx=inputs.k_idx)
    expected, bank = reference.decode_step(*inputs.to(F64))
    before = (inputs.q_val.unsqueeze(-1) * inputs.memory[inputs.q_idx]).sum(-2)
    got = sdm_decode_step(*inputs)
    assert_close((got, inputs.memory), (expected, bank))
    assert (got - before).norm() > 0.1 * before.norm(), "the write must matter"


@every_dtype
def test_steps_have_the_values_of_chunks_of_one(dtype: torch.dtype) -> None:
    inputs = TANGLED.make(dtype)
    assert_close(decode_all(inputs), sdm_write_read(*inputs, chunk_size=1))


def test_inputs_are_rounded_to_the_bank_dtype_but_not_the_gates() -> None:
    wide = one_token(RAGGED.make(F32), 0)
    narrow = wide._replace(**{name: getattr(wide, name).to(BF16) for name in ("memory", "k_val", "v", "q_val")})

    def result(inputs: Inputs) -> tuple[Tensor, Tensor]:
        inputs = inputs._replace(memory=inputs.memory.clone())
        return sdm_decode_step(*inputs), inputs.memory

    assert_same_bits(result(narrow._replace(k_val=wide.k_val, v=wide.v, q_val=wide.q_val)), result(narrow))
    for name in ("beta", "g"):
        rounded = narrow._replace(**{name: getattr(wide, name).to(BF16)})
        assert not torch.equal(result(rounded)[1], result(narrow)[1]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs(layout: str) -> None:
    inputs = one_token(TANGLED.make(F32), 0)
    strided = Inputs(inputs.memory.clone(), *(laid_out(x, layout) for x in inputs[1:]))
    contiguous = Inputs(inputs.memory.clone(), *(x.contiguous() for x in strided[1:]))
    got, expected = sdm_decode_step(*strided), sdm_decode_step(*contiguous)
    assert got.is_contiguous()
    assert_same_bits((got, strided.memory), (expected, contiguous.memory))


def test_only_the_bank_is_written_and_readings_are_fresh() -> None:
    inputs = one_token(TANGLED.make(F32), 0)
    before, versions = [x.clone() for x in inputs], [x._version for x in inputs]
    readings = sdm_decode_step(*inputs)
    assert inputs.memory._version > versions[0]
    assert [x._version for x in inputs[1:]] == versions[1:]
    readings.fill_(7)
    assert_same_bits(inputs[1:], before[1:])
    own = torch.zeros(len(inputs.memory), dtype=torch.bool)
    own[inputs.k_idx[inputs.k_idx >= 0]] = True
    assert_same_bits(inputs.memory[~own], before[0][~own])


def test_repeated_runs_have_the_same_bits() -> None:
    inputs = TANGLED.make(BF16)
    first = decode_all(inputs)
    for _ in range(3):
        assert_same_bits(decode_all(inputs.clone()), first)


# What NaN reaches


@pytest.mark.parametrize("place", FLOATS)
@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_nan_stays_in_its_stream(place: str, stream: int, dtype: torch.dtype) -> None:
    inputs = TANGLED.make(dtype)
    clean = decode_all(inputs)
    rows = [slice(p * TANGLED.slots, (p + 1) * TANGLED.slots) for p in (0, 1)]
    getattr(inputs, place)[rows[stream] if place == "memory" else stream] = NAN
    readings, bank = decode_all(inputs)
    assert readings[stream].isnan().any(), "the stream itself must be hit"
    assert_same_bits(readings[1 - stream], clean[0][1 - stream])
    assert_same_bits(bank[rows[1 - stream]], clean[1][rows[1 - stream]])


@pytest.mark.parametrize("write_gates", [False, True], ids=["token gates", "write gates"])
@every_dtype
def test_nan_without_a_slot_reaches_nothing(dtype: torch.dtype, write_gates: bool) -> None:
    inputs = replace(TANGLED, write_gates=write_gates).make(dtype)
    clean = decode_all(inputs)
    no_write, no_read = inputs.k_idx < 0, inputs.q_idx < 0
    silent = no_write.all(-1, keepdim=True)
    masks = {"k_val": no_write, "v": silent, "beta": silent, "g": no_write if write_gates else silent, "q_val": no_read}
    assert all(mask.any() and not mask.all() for mask in masks.values())
    poisoned = inputs._replace(**{name: getattr(inputs, name).masked_fill(m, NAN) for name, m in masks.items()})
    assert_same_bits(decode_all(poisoned), clean)


@every_dtype
def test_tokens_without_any_slot_leave_the_bank_and_read_zero(dtype: torch.dtype) -> None:
    inputs = one_token(replace(RAGGED, no_slot=1.0).make(dtype), 0)
    inputs = inputs._replace(**{n: torch.full_like(getattr(inputs, n), NAN) for n in FLOATS[1:]})
    inputs.memory[0, 0], inputs.memory[1, 1] = NAN, -0.0
    before = inputs.memory.clone()
    readings = sdm_decode_step(*inputs)
    assert_same_bits((readings, inputs.memory), (torch.zeros_like(readings), before))
    assert inputs.memory[1, 1].signbit()


def test_empty_bank() -> None:
    """No streams, and a bank without rows; or streams whose tokens all lack slots."""
    inputs = one_token(replace(RAGGED, streams=0, spare_slots=0).make(F32), 0)
    assert sdm_decode_step(*inputs).shape == (0, 5)
    inputs = one_token(replace(RAGGED, no_slot=1.0).make(F32), 0)._replace(memory=torch.empty(0, 5))
    assert_same_bits(sdm_decode_step(*inputs), torch.zeros(2, 5))


# Repeated write slots


def test_repeated_write_slots_act_as_one_and_are_counted() -> None:
    inputs = Inputs(
        memory=torch.randn(6, 2, dtype=F64),
        k_idx=torch.tensor([[1, 2, 1, 1], [5, 5, -1, -1]]),
        k_val=torch.tensor([[0.25, 0.5, 0.125, 0.0625], [0.5, 0.25, 9.0, 9.0]], dtype=F64),
        v=torch.randn(2, 2, dtype=F64),
        beta=torch.tensor([[0.5], [0.25]], dtype=F64),
        g=-torch.rand(2, 4, dtype=F64),
        q_idx=torch.tensor([[1, 1], [5, 3]]),
        q_val=torch.rand(2, 2, dtype=F64),
    )
    once = inputs._replace(
        memory=inputs.memory.clone(),
        k_idx=torch.tensor([[1, 2], [5, -1]]),
        k_val=torch.tensor([[0.4375, 0.5], [0.75, 0.0]], dtype=F64),
        g=inputs.g[:, :2],
    )
    repeated_write_slots()
    readings = sdm_decode_step(*inputs)
    assert repeated_write_slots(reset=False) == 3
    assert_close((readings, inputs.memory), (sdm_decode_step(*once), once.memory))
    assert repeated_write_slots() == 3
    assert repeated_write_slots() == 0


# Errors


@pytest.mark.parametrize("bad", [b for b in BAD_INPUTS if "decode" not in b.not_for], ids=lambda b: b.name)
def test_bad_input(bad: BadInput) -> None:
    assert_refused(sdm_decode_step, bad)


@pytest.mark.parametrize("name", ["k_idx", "q_idx"])
def test_ids_need_a_width(name: str) -> None:
    inputs = one_token(RAGGED.make(F32), 0)
    with pytest.raises(ValueError, match=f"{name} is a scalar"):
        sdm_decode_step(*inputs._replace(**{name: torch.tensor(1)}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bank_that_is_not_contiguous(layout: str) -> None:
    inputs = one_token(RAGGED.make(F32), 0)
    bank = laid_out(inputs.memory, layout)
    before, version = bank.clone(), bank._version
    with pytest.raises(ValueError, match=r"memory has strides \(\d+, \d+\); an in-place call needs a contiguous bank"):
        sdm_decode_step(*inputs._replace(memory=bank))
    assert_same_bits(bank, before)
    assert bank._version == version


@pytest.mark.parametrize("name", FLOATS)
def test_it_refuses_to_be_differentiated(name: str) -> None:
    inputs = one_token(RAGGED.make(F32), 0).requiring_grad(name)
    before = inputs.memory.detach().clone()
    with pytest.raises(RuntimeError, match=r"decode_step_ writes in place and has no gradient.*torch\.no_grad"):
        sdm_decode_step(*inputs)
    assert_same_bits(inputs.memory.detach(), before)
    with torch.no_grad():
        sdm_decode_step(*inputs)
    assert not torch.equal(inputs.memory.detach(), before)


def test_it_refuses_forward_mode() -> None:
    inputs = one_token(RAGGED.make(F32), 0)
    before = inputs.memory.clone()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda v: sdm_decode_step(*inputs._replace(v=v)), (inputs.v,), (inputs.v,))
    assert_same_bits(inputs.memory, before)


def test_inference_mode() -> None:
    inputs = one_token(RAGGED.make(F32), 0)
    ordinary, expected = inputs.memory.clone(), inputs.memory.clone()
    readings = sdm_decode_step(*inputs._replace(memory=expected))
    with torch.inference_mode():
        made_inside = inputs.memory.clone()
        for bank in (ordinary, made_inside):
            assert_same_bits((sdm_decode_step(*inputs._replace(memory=bank)), bank), (readings, expected))
    with pytest.raises(RuntimeError, match=r"made under torch\.inference_mode"):
        sdm_decode_step(*inputs._replace(memory=made_inside))
    assert_same_bits(made_inside, expected)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    inputs = TANGLED.make(dtype)
    expected = decode_all(inputs)
    with torch.autocast("cpu", dtype=BF16):
        assert_same_bits(decode_all(inputs), expected)


def test_read_weights_may_lie_in_the_bank() -> None:
    memory = torch.rand(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    ids = torch.tensor([[0, 1, 2]])
    inputs = [ids, torch.rand(1, 3, dtype=F64), torch.rand(1, 3, dtype=F64), torch.rand(1, 1, dtype=F64)]
    inputs += [-torch.rand(1, 1, dtype=F64), ids]
    expected = sdm_decode_step(memory.clone(), *inputs, memory[:1].clone())
    assert_same_bits(sdm_decode_step(memory, *inputs, memory[:1]), expected)


class Unwrapped(Tensor):
    """Every torch function runs on the tensor inside, and its result is multiplied."""

    inner: Tensor
    factor: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.inner if isinstance(a, Unwrapped) else a for a in args]
        return func(*plain, **(kwargs or {})) * next(a.factor for a in args if isinstance(a, Unwrapped))


def unwrapped(inner: Tensor, factor: Tensor) -> Unwrapped:
    wrapper = torch.empty_like(inner.detach()).as_subclass(Unwrapped)
    wrapper.inner, wrapper.factor = inner, factor
    return wrapper


def test_arguments_with_functions_of_their_own() -> None:
    """They see the call first: a gradient wanted of what is inside raises, one of what they make of it stays."""
    inputs = one_token(TANGLED.make(F32), 1)
    before = inputs.memory.clone()
    wanted = unwrapped(inputs.v.clone().requires_grad_(), torch.ones(()))
    with pytest.raises(RuntimeError, match="writes in place and has no gradient"):
        sdm_decode_step(*inputs._replace(v=wanted))
    assert_same_bits(inputs.memory, before)
    factor = torch.full((), 2.0, requires_grad=True)
    readings = sdm_decode_step(*inputs._replace(v=unwrapped(inputs.v, factor)))
    assert readings.requires_grad
    readings.sum().backward()
    assert factor.grad is not None
