"""Decode steps that are known: as the op would do them, without the dispatcher. On a GPU, where they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile import last_dispatch, sdm_decode_step
from sdm_compile.ops import decode, dispatch
from sdm_compile.ops.registry import OPS, _in_place_entry, _in_place_kernel, _known_entry
from sdm_compile.ops.situation import Situation
from tests.cases import TANGLED, Inputs
from tests.harness import assert_same_bits
from tests.observers import Watching

pytestmark = pytest.mark.gpu


def one_token() -> Inputs:
    inputs = TANGLED.make(torch.float32)
    return Inputs(inputs.memory.cuda(), *(x[:, 0].contiguous().cuda() for x in inputs[1:]))


class Counting(dict[Any, Any]):
    """Of the calls that were admitted: how often it is asked, which a known call does not."""

    asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """One token's call has been made before, and nothing else is known."""
    op = OPS["decode_step_"]
    entry = _known_entry(_in_place_entry(op.overload, _in_place_kernel(op)), decode._decode_step_again)
    monkeypatch.setattr(decode, "decode_step_op", entry)
    sdm_decode_step(*one_token())
    counting = Counting(decode._admitted)
    monkeypatch.setattr(decode, "_admitted", counting)
    return counting


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
def test_a_known_decode_step(admitted: Counting, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    inputs = one_token()
    expected_bank = inputs.memory.clone()
    expected = torch.ops.sdm.decode_step_(expected_bank, *inputs[1:])
    done = last_dispatch().decode
    assert done is not None
    dispatch.record("decode", replace(done, op="another"))
    before, asked = inputs.memory._version, admitted.asked
    with mode():
        assert_same_bits(sdm_decode_step(*inputs), expected)
    assert admitted.asked == asked
    assert_same_bits(inputs.memory, expected_bank)
    assert inputs.memory._version == before + 1
    assert last_dispatch().decode == done


def test_decode_steps_under_inference_mode(admitted: Counting) -> None:
    inputs = one_token()
    with torch.inference_mode():
        own = Inputs(*(x.clone() for x in inputs))
        before = inputs.memory._version
        for tensors in (inputs, own):
            readings = [sdm_decode_step(*tensors._replace(memory=tensors.memory.clone())) for _ in range(3)]
            assert_same_bits(readings[1:], [readings[0]] * 2)
        for _ in range(2):
            sdm_decode_step(*inputs)
    assert inputs.memory._version == before + 2
    with pytest.raises(RuntimeError, match="inference_mode"):
        sdm_decode_step(*own)


def test_bad_calls_after_good_ones(admitted: Counting) -> None:
    inputs = one_token()
    bank = inputs.memory.clone()
    with pytest.raises(RuntimeError, match="writes in place and has no gradient"):
        sdm_decode_step(*inputs._replace(v=inputs.v.clone().requires_grad_()))
    with pytest.raises(ValueError, match="beta"):
        sdm_decode_step(*inputs._replace(beta=inputs.beta[..., 0]))
    with pytest.raises(ValueError, match="q_idx is on cpu"):
        sdm_decode_step(*inputs._replace(q_idx=inputs.q_idx.cpu()))
    with pytest.raises(ValueError, match="in-place call needs a contiguous bank"):
        sdm_decode_step(*inputs._replace(memory=inputs.memory.t().contiguous().t()))
    assert_same_bits(inputs.memory, bank)
    wanting = inputs._replace(v=inputs.v.clone().requires_grad_())
    for _ in range(2):
        with torch.no_grad():
            sdm_decode_step(*wanting)
        with pytest.raises(RuntimeError, match="writes in place and has no gradient"):
            sdm_decode_step(*wanting)


def test_other_layouts_after_contiguous_ones(admitted: Counting) -> None:
    inputs = one_token()

    def step(**changed: Tensor) -> Tensor:
        return sdm_decode_step(*inputs._replace(memory=inputs.memory.clone(), **changed))

    expected = step()
    spaced = {name: torch.stack([x, x], -1)[..., 0] for name, x in inputs._asdict().items() if name != "memory"}
    assert not spaced["v"].is_contiguous()
    asked = admitted.asked
    for _ in range(3):
        assert_same_bits(step(**spaced), expected)
    assert admitted.asked == asked + 2  # in the first call, and where it became known
    for _ in range(2):
        assert_same_bits(step(v=torch._neg_view(-inputs.v)), expected)
    for _ in range(2):
        assert_same_bits(
            step(q_idx=inputs.k_idx, k_idx=inputs.k_idx, q_val=inputs.k_val),
            step(q_idx=inputs.k_idx.clone(), q_val=inputs.k_val.clone()),
        )


def test_observers_see_known_steps(admitted: Counting) -> None:
    inputs = one_token()
    with torch.no_grad(), Watching() as mode:
        sdm_decode_step(*inputs)
    assert mode.seen.count("sdm.decode_step_.default") == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdm_decode_step(*inputs)
    assert [event.name for event in profile.events()].count("sdm::decode_step_") == 1


def test_a_known_step_is_captured(admitted: Counting) -> None:
    inputs = one_token()
    bank = inputs.memory.clone()
    graph = torch.cuda.CUDAGraph()
    asked = admitted.asked
    with torch.cuda.graph(graph):
        readings = sdm_decode_step(*inputs)
    assert admitted.asked == asked
    done = last_dispatch().decode
    assert done is not None and done.situation is Situation.CAPTURING
    inputs.v.mul_(2)
    expected = sdm_decode_step(*inputs._replace(memory=bank))
    graph.replay()
    assert_same_bits([readings, inputs.memory], [expected, bank])
