"""Staging: what it cleans away, what it rounds, what it counts and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_compile import UnsupportedConfigurationError, repeated_write_slots
from sdm_compile.ops.layout import Staged
from sdm_compile.ops.staging import stage_inputs, unstage_readings
from tests.cases import Case, Inputs
from tests.harness import assert_same_bits, normal_like

EDGES = Case("edges", tokens=23, chunk_size=7, write_gates=True, no_slot=0.3, no_token=0.2)


def stage(inputs: Inputs, dtype: torch.dtype = torch.float32, chunk_size: int = 7, **settings: bool) -> Staged:
    return stage_inputs(*inputs[1:], num_slots=len(inputs.memory), dtype=dtype, chunk_size=chunk_size, **settings)


def poisoned(inputs: Inputs) -> tuple[Inputs, dict[str, Tensor]]:
    """The inputs with NaN wherever there is no slot, and where that is."""
    no_write, no_read = inputs.k_idx < 0, inputs.q_idx < 0
    silent = no_write.all(-1, keepdim=True)
    where = {
        "k_val": no_write,
        "v": silent.expand(inputs.v.shape),
        "beta": silent,
        "g": no_write if inputs.g.shape[-1] > 1 else silent,
        "q_val": no_read,
    }
    assert all(x.any() and not x.all() for x in where.values())
    return inputs._replace(**{name: getattr(inputs, name).masked_fill(x, math.nan) for name, x in where.items()}), where


@pytest.mark.parametrize("write_gates", [False, True])
def test_what_has_no_slot_reaches_nothing(write_gates: bool) -> None:
    clean = replace(EDGES, write_gates=write_gates).make(torch.float32)
    dirty, where = poisoned(clean)
    expected = stage(clean)
    assert all(x.isfinite().all() for x in expected)
    assert_same_bits(stage(dirty), expected)

    leaves = {name: getattr(dirty, name).requires_grad_() for name in where}
    staged = stage(dirty._replace(**leaves))
    floats = [x for x in staged if x.is_floating_point()]
    # NaN arrives at every staged entry that stands for no slot: it must not come back either.
    given = [torch.where(x == 0, math.nan, normal_like(x)) for x in floats]
    grads = torch.autograd.grad(floats, list(leaves.values()), given)
    for (name, nowhere), grad in zip(where.items(), grads, strict=True):
        assert not grad[nowhere].any(), name
        assert grad[~nowhere].isfinite().all(), name


def test_padding_touches_nothing() -> None:
    inputs = Case("ragged", tokens=9).make(torch.float32)
    staged = stage(inputs)
    assert staged.k_idx.shape == (2, 2, 7, 3)
    for x in staged:
        assert (x[1, :, 2:] == (0 if x.is_floating_point() else -1)).all()


def test_every_negative_id_becomes_minus_one() -> None:
    inputs = EDGES.make(torch.float32)
    staged = stage(inputs)
    assert inputs.k_idx.min() < -1
    assert staged.k_idx.min() == staged.q_idx.min() == -1
    assert not staged.k_val[staged.k_idx < 0].any() and not staged.q_val[staged.q_idx < 0].any()


def one_token(k_val: list[float], ids: list[int], g: list[float]) -> Inputs:
    def last(*values: float) -> Tensor:
        return torch.tensor(values).view(1, 1, -1)

    one = last(1.0)
    return Inputs(torch.zeros(9, 1), last(*ids), last(*k_val), one, one, last(*g), one.long(), one)


def test_repeats_add_up_and_the_first_gate_counts() -> None:
    inputs = one_token([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [5, -1, 3, 5, 3, 5], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    staged = stage(inputs, chunk_size=1)
    assert staged.k_idx.flatten().tolist() == [5, -1, 3, -1, -1, -1]
    assert staged.k_val.flatten().tolist() == [41, 0, 20, 0, 0, 0]
    assert staged.g.flatten().tolist() == [-1, 0, -3, 0, 0, 0]


def test_weights_are_rounded_to_the_bank_then_summed_in_float32() -> None:
    """1 + 2**-9 rounds to 1; 256 + 1 + 1 is 258, though 256 + 1 rounds to 256. The gate keeps its float32 bits."""
    staged = stage(one_token([1 + 2**-9, 256, 1, 1], [1, 2, 2, 2], [-0.1]), torch.bfloat16, chunk_size=1)
    assert staged.k_val.dtype == staged.v.dtype == staged.q_val.dtype == torch.bfloat16
    assert staged.k_val.flatten().tolist() == [1, 258, 0, 0]
    assert staged.g.dtype == staged.beta.dtype == torch.float32
    assert staged.g.item() == torch.tensor(-0.1).item()


def test_counting_repeats() -> None:
    inputs = replace(EDGES, repeated=0.5).make(torch.float64)
    ids = [[i for i in token if i >= 0] for token in inputs.k_idx.flatten(0, 1).tolist()]
    expected = sum(len(token) - len(set(token)) for token in ids)
    assert expected > 5
    repeated_write_slots()
    stage(inputs, count_repeats=False)
    assert repeated_write_slots() == 0
    leaf = inputs.k_val.requires_grad_()
    staged = stage(inputs._replace(k_val=leaf))
    assert repeated_write_slots(reset=False) == expected
    staged.k_val.sum().backward()
    assert repeated_write_slots() == expected  # the backward has counted nothing
    assert repeated_write_slots() == 0


@pytest.mark.parametrize("name", ["k_idx", "q_idx"])
def test_ids_beyond_the_bank_raise(name: str) -> None:
    inputs = EDGES.make(torch.float32)
    rows = len(inputs.memory)
    getattr(inputs, name)[1, 3, 0] = rows
    with pytest.raises(IndexError, match=f"{name} holds slot id {rows}, but memory has {rows} rows"):
        stage(inputs)


def test_settings_out_of_range_are_refused() -> None:
    inputs = EDGES.make(torch.float32)
    for chunk_size in (0, 257):
        with pytest.raises(UnsupportedConfigurationError, match=f"chunk_size is {chunk_size}; supported are 1 to 256"):
            stage(inputs, chunk_size=chunk_size)
    with pytest.raises(UnsupportedConfigurationError, match=r"memory has dtype torch\.float16"):
        stage(inputs, torch.float16)
    with pytest.raises(ValueError, match=r"k_idx has dtype torch\.float32; slot ids are int32, int64"):
        stage(inputs._replace(k_idx=inputs.k_idx.float()))


@pytest.mark.parametrize("tokens", [0, 4, 13, 30])
def test_readings_of_another_number_of_steps_are_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens is {tokens}, which .* steps of 4 hold; readings has 3"):
        unstage_readings(torch.zeros(3, 2, 4, 5), tokens)
