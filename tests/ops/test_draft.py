"""Draft and commit: the bits of decode steps for any accepted counts, and a bank that nothing else touches."""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

from sdm_compile import (
    SDMPending,
    UnsupportedConfigurationError,
    last_dispatch,
    repeated_write_slots,
    sdm_commit_,
    sdm_decode_step,
    sdm_draft,
)
from sdm_compile.ops import draft
from sdm_compile.ops.draft import MAX_TOKENS
from tests.bad_inputs import BAD_INPUTS, BadInput, assert_refused
from tests.cases import CASES, FLOATS, RAGGED, TANGLED, Case, Inputs
from tests.harness import LAYOUTS, assert_close, assert_same_bits, laid_out

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NAN = float("nan")
every_dtype = pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
DRAFTED = 4


def decoded(inputs: Inputs, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Readings [P, T, D] of decode steps, and the bank after each stream's first `counts` tokens (all of them)."""
    bank, tokens = inputs.memory.clone(), inputs.v.shape[1]
    k_idx = inputs.k_idx
    if counts is not None:
        rejected = torch.arange(tokens).unsqueeze(-1) >= counts[:, None, None]
        k_idx = k_idx.masked_fill(rejected, -1)
    tokenwise = (k_idx, *inputs[2:])
    readings = [sdm_decode_step(bank, *(x[:, t] for x in tokenwise)) for t in range(tokens)]
    return torch.stack(readings, 1) if readings else inputs.v.new_zeros(inputs.v.shape), bank


def counts_of(case: Case, tokens: int) -> list[Tensor]:
    """None, half and all of the tokens, and another number for each stream."""
    same = [torch.full((case.streams,), n) for n in (0, tokens // 2, tokens)]
    return [*same, (torch.arange(case.streams) * 3 + 1) % (tokens + 1)]


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bits_of_decode_steps(case: Case, dtype: torch.dtype) -> None:
    """Drafted, committed in part, and decoded further."""
    inputs = replace(case, tokens=DRAFTED + 3).make(dtype)
    few, later = inputs.tokens(0, DRAFTED), inputs.tokens(DRAFTED, DRAFTED + 3)
    expected, _ = decoded(few)
    for counts in counts_of(case, DRAFTED):
        bank = inputs.memory.clone()
        readings, pending = sdm_draft(bank, *few[1:])
        assert_same_bits((readings, bank), (expected, inputs.memory))
        sdm_commit_(bank, pending, counts)
        _, advanced = decoded(few, counts)
        assert_same_bits(bank, advanced)
        assert_same_bits(decoded(later._replace(memory=bank)), decoded(later._replace(memory=advanced)))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_nothing_drifts_over_many_rounds(dtype: torch.dtype) -> None:
    inputs = replace(TANGLED, streams=3, tokens=DRAFTED * 60).make(dtype)
    bank, sequential = inputs.memory.clone(), inputs.memory.clone()
    generator = torch.Generator().manual_seed(0)
    for start in range(0, DRAFTED * 60, DRAFTED):
        few = inputs.tokens(start, start + DRAFTED)
        counts = torch.randint(DRAFTED + 1, (3,), generator=generator)
        readings, pending = sdm_draft(bank, *few[1:])
        sdm_commit_(bank, pending, counts)
        expected, _ = decoded(few._replace(memory=sequential))
        _, sequential = decoded(few._replace(memory=sequential), counts)
        assert_same_bits((readings, bank), (expected, sequential))


def test_as_many_tokens_as_there_may_be() -> None:
    inputs = replace(RAGGED, tokens=MAX_TOKENS).make(F32)
    readings, pending = sdm_draft(*inputs)
    expected, bank = decoded(inputs)
    sdm_commit_(inputs.memory, pending, torch.full((2,), MAX_TOKENS))
    assert_same_bits((readings, inputs.memory), (expected, bank))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_counts_are_cut_off(dtype: torch.dtype) -> None:
    inputs = replace(RAGGED, tokens=DRAFTED).make(F32)
    _, pending = sdm_draft(*inputs)
    _, bank = decoded(inputs, torch.tensor([0, DRAFTED]))
    sdm_commit_(inputs.memory, pending, torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype))
    assert_same_bits(inputs.memory, bank)


def test_no_count_leaves_every_bit() -> None:
    inputs = TANGLED.make(F32)
    inputs.memory[0, 0], inputs.memory[1, 1] = NAN, -0.0
    before = inputs.memory.clone()
    _, pending = sdm_draft(*inputs)
    sdm_commit_(inputs.memory, pending, torch.zeros(2, dtype=torch.int64))
    assert_same_bits(inputs.memory, before)


def test_pending_lies_in_memory_of_its_own() -> None:
    """A caller may overwrite what was drafted from before the commit."""
    inputs = replace(TANGLED, tokens=DRAFTED).make(F32)
    _, bank = decoded(inputs)
    versions = [x._version for x in inputs]
    readings, pending = sdm_draft(*inputs)
    assert [x._version for x in inputs] == versions
    for x in (readings, *inputs[1:]):
        x.fill_(1)
    sdm_commit_(inputs.memory, pending, torch.tensor([DRAFTED, DRAFTED]))
    assert_same_bits(inputs.memory, bank)
    assert inputs.memory._version > versions[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_inputs(layout: str) -> None:
    inputs = replace(TANGLED, tokens=DRAFTED).make(F32)
    strided = Inputs(inputs.memory.clone(), *(laid_out(x, layout) for x in inputs[1:]))
    (readings, pending), (expected, other) = sdm_draft(*strided), sdm_draft(*(x.contiguous() for x in strided))
    assert_same_bits((readings, pending.new_rows), (expected, other.new_rows))


@every_dtype
def test_nan_without_a_slot_reaches_nothing(dtype: torch.dtype) -> None:
    inputs = replace(TANGLED, tokens=DRAFTED).make(dtype)
    no_write, no_read = inputs.k_idx < 0, inputs.q_idx < 0
    silent = no_write.all(-1, keepdim=True)
    masks = {"k_val": no_write, "v": silent, "beta": silent, "g": no_write, "q_val": no_read}
    poisoned = inputs._replace(**{name: getattr(inputs, name).masked_fill(m, NAN) for name, m in masks.items()})
    got, expected = sdm_draft(*poisoned), sdm_draft(*inputs)
    assert_same_bits(pytree.tree_leaves(got), pytree.tree_leaves(expected))


def test_repeats_are_counted_when_they_are_drafted() -> None:
    inputs = replace(RAGGED, repeated=0.5).make(F32)
    repeated_write_slots()
    decoded(inputs)
    expected = repeated_write_slots()
    assert expected > 0
    _, pending = sdm_draft(*inputs)
    assert repeated_write_slots() == expected
    sdm_commit_(inputs.memory, pending, torch.tensor([2, 2]))
    assert repeated_write_slots() == 0


def test_it_is_recorded() -> None:
    sdm_draft(*TANGLED.make(F32))
    record = last_dispatch().decode
    assert record is not None
    assert (record.op, record.route, record.streams, record.tokens, record.steps) == ("draft", "cpu", 2, 23, 23)


def test_pending_is_a_pytree() -> None:
    inputs = RAGGED.make(F32)
    _, pending = sdm_draft(*inputs)
    leaves, spec = pytree.tree_flatten(pending)
    assert [x.shape for x in leaves] == [(2, 11, 3, 5), (2, 11, 3)]
    rebuilt = pytree.tree_unflatten([x.clone() for x in leaves], spec)
    assert isinstance(rebuilt, SDMPending)
    _, bank = decoded(inputs, torch.tensor([5, 7]))
    sdm_commit_(inputs.memory, rebuilt, torch.tensor([5, 7]))
    assert_same_bits(inputs.memory, bank)
    with pytest.raises(RuntimeError, match="written to since"):
        sdm_commit_(inputs.memory, rebuilt, torch.tensor([5, 7]))


def test_pending_goes_through_files_and_keys() -> None:
    """As its leaves and a serialized structure, as torch.export needs it."""
    inputs = RAGGED.make(F32)
    _, pending = sdm_draft(*inputs)
    leaves, spec = pytree.tree_flatten(pending)
    rebuilt = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert rebuilt.mark is None
    named, _ = pytree.tree_flatten_with_path(pending)
    assert [pytree.keystr(path) for path, _ in named] == [".new_rows", ".slots"]
    assert all(x is leaf for (_, x), leaf in zip(named, leaves, strict=True))
    for same in (rebuilt, pickle.loads(pickle.dumps(pending))):
        bank = inputs.memory.clone()
        sdm_commit_(bank, same, torch.tensor([5, 7]))
        assert_same_bits(bank, decoded(inputs, torch.tensor([5, 7]))[1])


def test_a_copy_of_a_pending_knows_the_bank() -> None:
    inputs = RAGGED.make(F32)
    _, pending = sdm_draft(*inputs)
    for same in (copy.copy(pending), copy.deepcopy(pending)):
        assert_no_commit(inputs.memory.clone(), same, ValueError, "is not the bank of the draft")
    copied = copy.deepcopy(pending)
    sdm_commit_(inputs.memory, copied, torch.tensor([1, 1]))
    assert_no_commit(inputs.memory, pending, RuntimeError, "written to since")


def test_under_vmap() -> None:
    """Whole models drafted side by side: with banks of their own."""
    calls = [replace(TANGLED, tokens=DRAFTED).make(F64, seed=seed) for seed in (0, 1)]
    stacked = [torch.stack(pair) for pair in zip(*calls, strict=True)]
    got = torch.func.vmap(lambda *inputs: sdm_draft(*inputs)[0])(*stacked)
    assert_same_bits(list(got), [sdm_draft(*inputs)[0] for inputs in calls])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_write_that_pytorch_does_not_see_is_noticed(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a Triton kernel."""

    def store_unseen(bank: Tensor, slots: Tensor, rows: Tensor) -> None:
        bank.detach().numpy()[slots.long().numpy()] = rows.numpy()

    monkeypatch.setattr(draft, "store_rows_", store_unseen)
    inputs = replace(TANGLED, tokens=DRAFTED).make(F32)
    counts = torch.tensor([DRAFTED, DRAFTED])
    _, bank = decoded(inputs)
    with mode():
        _, pending = sdm_draft(*inputs)
        sdm_commit_(inputs.memory, pending, counts)
        assert_same_bits(inputs.memory, bank)
        with pytest.raises(RuntimeError, match="written to since"):
            sdm_commit_(inputs.memory, pending, counts)
    assert_same_bits(inputs.memory, bank)


# The bank of the draft


def assert_no_commit(bank: Tensor, pending: SDMPending, error: type[Exception], message: str) -> None:
    before, version = bank.clone(), bank._version
    with pytest.raises(error, match=message) as caught:
        sdm_commit_(bank, pending, torch.ones(pending.slots.shape[0], dtype=torch.int64))
    assert caught.type is error
    assert bank._version == version
    assert_same_bits(bank, before)


CHANGES: dict[str, Callable[[Inputs, SDMPending], object]] = {
    "a commit of the same draft": lambda i, pending: sdm_commit_(i.memory, pending, torch.tensor([0, 0])),
    "a decode step": lambda i, pending: sdm_decode_step(i.memory, *(x[:, 0] for x in i[1:])),
    "PyTorch": lambda i, pending: i.memory.mul_(1),
    "a view": lambda i, pending: i.memory[2:].zero_(),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_a_bank_that_has_changed(change: str, mode: Callable[[], AbstractContextManager[object]]) -> None:
    inputs = RAGGED.make(F32)
    with mode():
        _, pending = sdm_draft(*inputs)
        CHANGES[change](inputs, pending)
        assert_no_commit(inputs.memory, pending, RuntimeError, "memory has been written to since the draft")


def test_another_bank() -> None:
    inputs = RAGGED.make(F32)
    _, pending = sdm_draft(*inputs)
    assert_no_commit(inputs.memory.clone(), pending, ValueError, "is not the bank of the draft")
    assert_no_commit(inputs.memory[:-1], pending, ValueError, "is not the bank of the draft")
    sdm_commit_(inputs.memory.view_as(inputs.memory), pending, torch.tensor([1, 1]))


class Freed:
    """A bank in a piece of memory that outlives it, and comes to hold another one."""

    def __init__(self, bank: Tensor) -> None:
        self.memory = bank.contiguous().numpy().copy()

    def make(self) -> Tensor:
        return torch.from_numpy(self.memory)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_another_bank_at_the_same_address(mode: Any) -> None:
    inputs = RAGGED.make(F32)
    freed = Freed(inputs.memory)
    with mode():
        bank = freed.make()
        _, pending = sdm_draft(bank, *inputs[1:])
        view, address = bank[:], bank.data_ptr()
        del bank
        sdm_commit_(view, pending, torch.tensor([0, 0]))  # a view keeps the bank
        _, pending = sdm_draft(view, *inputs[1:])
        both = freed.make()  # another tensor of the same memory, whose writes are counted apart
        assert both.data_ptr() == address
        with pytest.raises(ValueError, match="is another tensor than the draft's bank"):
            sdm_commit_(both, pending, torch.tensor([1, 1]))
        del view, both
        other = freed.make()
        assert other.data_ptr() == address
        before = other.clone()
        with pytest.raises(ValueError, match="is not the bank of the draft, which has been freed: draft again"):
            sdm_commit_(other, pending, torch.tensor([1, 1]))
        assert_same_bits(other, before)


def test_a_pending_keeps_no_bank() -> None:
    inputs = RAGGED.make(F32)
    bank = inputs.memory.clone()
    storage = weakref.ref(bank.untyped_storage())
    _, pending = sdm_draft(bank, *inputs[1:])
    del bank
    assert storage() is None and pending.new_rows.isfinite().any()


def test_a_bank_made_in_inference_mode() -> None:
    """Nobody counts its versions; its address is checked all the same."""
    inputs = RAGGED.make(F32)
    _, expected = decoded(inputs, torch.tensor([3, 4]))
    with torch.inference_mode():
        bank = inputs.memory.clone()
        _, pending = sdm_draft(bank, *inputs[1:])
        with pytest.raises(ValueError, match="is not the bank of the draft"):
            sdm_commit_(bank.clone(), pending, torch.tensor([3, 4]))
        sdm_commit_(bank, pending, torch.tensor([3, 4]))
    assert_same_bits(bank.clone(), expected)


# Compiled


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_graph_each_over_many_rounds(mode: Callable[[], AbstractContextManager[object]]) -> None:
    """Nothing of the bank's version is guarded, and any mixture of compiled and eager calls works."""
    inputs = replace(TANGLED, tokens=DRAFTED).make(F32)
    counters = [CompileCounterWithBackend("aot_eager") for _ in range(2)]
    draft, commit = (
        torch.compile(f, fullgraph=True, backend=c) for f, c in zip((sdm_draft, sdm_commit_), counters, strict=True)
    )
    bank, expected = inputs.memory.clone(), inputs.memory
    with mode():
        for i, (d, c) in enumerate([(draft, commit), (sdm_draft, commit), (draft, sdm_commit_), (draft, commit)]):
            counts = torch.tensor([i, DRAFTED - i])
            readings, pending = d(bank, *inputs[1:])
            c(bank, pending, counts)
            before = inputs._replace(memory=expected)
            _, expected = decoded(before, counts)
            assert_same_bits((readings, bank), (decoded(before)[0], expected))
    assert [c.frame_count for c in counters] == [1, 1]


# Errors


@pytest.mark.parametrize("bad", [b for b in BAD_INPUTS if "draft" not in b.not_for], ids=lambda b: b.name)
def test_bad_input(bad: BadInput) -> None:
    assert_refused(sdm_draft, bad)


def test_too_many_tokens() -> None:
    inputs = replace(RAGGED, tokens=MAX_TOKENS + 1).make(F32)
    with pytest.raises(UnsupportedConfigurationError, match=r"drafted tokens T .* is 65; supported are 0 to 64"):
        sdm_draft(*inputs)


def test_a_bank_that_is_not_contiguous() -> None:
    inputs = RAGGED.make(F32)
    with pytest.raises(ValueError, match=r"memory has strides \(\d+, \d+\); an in-place call needs a contiguous bank"):
        sdm_draft(inputs.memory.T.contiguous().T, *inputs[1:])


@pytest.mark.parametrize(
    ("accepted", "message"),
    [
        (torch.ones(3, dtype=torch.int64), "accepted has shape (3,); expected [P] = (2,)"),
        (torch.ones(2, 1, dtype=torch.int64), "accepted has shape (2, 1); expected [P] = (2,)"),
        (torch.tensor(1), "accepted has shape (); expected [P] = (2,)"),
        (torch.ones(2), "accepted has dtype torch.float32"),
        (torch.ones(2, dtype=torch.bool), "accepted has dtype torch.bool"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "accepted is on meta; expected cpu"),
    ],
)
def test_bad_counts(accepted: Tensor, message: str) -> None:
    inputs = RAGGED.make(F32)
    _, pending = sdm_draft(*inputs)
    before, version = inputs.memory.clone(), inputs.memory._version
    with pytest.raises(ValueError, match=re.escape(message)):
        sdm_commit_(inputs.memory, pending, accepted)
    assert_same_bits(inputs.memory, before)
    assert inputs.memory._version == version


@pytest.mark.parametrize("name", FLOATS)
def test_it_has_no_derivative(name: str) -> None:
    inputs = RAGGED.make(F32).requiring_grad(name)
    readings, pending = sdm_draft(*inputs)
    with pytest.raises(NotImplementedError, match="sdm::draft has no derivative"):
        readings.sum().backward()
    with pytest.raises(RuntimeError, match=r"commit_ writes in place and has no gradient.*torch\.no_grad"):
        sdm_commit_(inputs.memory, pending, torch.tensor([1, 1]))
    _, expected = decoded(Inputs(*(x.detach() for x in inputs)), torch.tensor([1, 1]))
    with torch.no_grad():
        sdm_commit_(inputs.memory, pending, torch.tensor([1, 1]))
    assert_close(inputs.memory.detach(), expected)
