"""The public write/read's gradients: of which inputs, what is kept for them, how exact, and under which transforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sdm_compile import reference, repeated_write_slots, sdm_write_read, sdm_write_read_
from sdm_compile.ops.saved import empty_saved
from sdm_compile.ops.write_read_recompute import segments
from tests.calls import call
from tests.cases import FLOATS, RAGGED, REUSE, SEVERAL, Case, Inputs, gradients, upstream, values_and_gradients
from tests.harness import assert_close, assert_same_bits

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

several_cases = pytest.mark.parametrize("case", SEVERAL, ids=lambda c: c.name)
every_dtype = pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)


# Which gradients, how often


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


def test_expanded_gradients() -> None:
    """The zero-stride ones that `sum().backward()` makes."""
    inputs = RAGGED.make(F64).requiring_grad()
    outputs = call(RAGGED)(*inputs)
    got = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), inputs.floats(), retain_graph=True)
    assert_same_bits(got, gradients(outputs, inputs, [torch.ones_like(out) for out in outputs]))


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
    with pytest.raises(NotImplementedError, match="does not support forward-mode AD; reverse mode works"):
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
