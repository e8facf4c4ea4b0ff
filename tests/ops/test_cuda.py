"""The ops on a GPU, on the samples of the CPU tests: values, bits, strides, capture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_compile import last_dispatch, product_key_topk, sdm_decode_step, sdm_write_read, sdm_write_read_
from sdm_compile.ops import slabs, write_read_cuda
from sdm_compile.ops.launch import captured_loops, free_captured_loops
from tests.cases import SEVERAL, Case
from tests.harness import OpCase, Sample, assert_close, assert_same_bits, tensors
from tests.samples import CASES

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16)


def _runs_on_cuda(sample: Sample, dtype: torch.dtype) -> bool:
    """Float64 is for the CPU."""
    return not any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in sample.args(dtype))


SAMPLES = [
    pytest.param(case, sample, dtype, id=f"{case.op}-{sample.name}-{str(dtype)[6:]}")
    for case in CASES
    for sample in case.samples
    for dtype in DTYPES
    if dtype in sample.dtypes and _runs_on_cuda(sample, dtype)
]


def on_gpu(args: Any) -> list[Any]:
    return [x.cuda() if isinstance(x, Tensor) else x for x in args]


def exactly(args: Any) -> list[Tensor]:
    return [x.cpu().double() if x.is_floating_point() else x.cpu() for x in args]


@pytest.mark.parametrize(("case", "sample", "dtype"), SAMPLES)
def test_values_and_bits(case: OpCase, sample: Sample, dtype: torch.dtype) -> None:
    args = sample.args(dtype)
    got = case.run(on_gpu(args))
    assert_close([x.cpu() for x in got], case.expected(args), dtype)  # the matmuls of a bfloat16 bank may be TF32
    for _ in range(3):
        assert_same_bits(case.run(on_gpu(args)), got)


@pytest.mark.parametrize(("case", "sample", "dtype"), SAMPLES)
def test_strides_equal_the_cpu_kernels(case: OpCase, sample: Sample, dtype: torch.dtype) -> None:
    args = sample.args(dtype)
    for x, y in zip(tensors(case(*on_gpu(args))), tensors(case(*args)), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def call(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], dict[str, Any]]:
    return on_gpu(case.make(dtype, seed=seed)), {"chunk_size": case.chunk_size}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: case.name)
def test_every_way_to_run_a_call_gives_the_same_bits(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    (memory, *inputs), settings = call(case, dtype)
    with torch.no_grad():
        expected = sdm_write_read(memory, *inputs, **settings)
        assert_close([x.cpu() for x in expected], sdm_write_read(*exactly((memory, *inputs)), **settings))

        bank = memory.clone()
        assert_same_bits((sdm_write_read_(bank, *inputs, **settings), bank), expected)
        assert_same_bits(sdm_write_read(memory, *inputs, **settings, trace_steps=True), expected)

        graph, bank = torch.cuda.CUDAGraph(), memory.clone()
        with torch.cuda.graph(graph):
            readings = sdm_write_read_(bank, *inputs, **settings)
        bank.copy_(memory)
        graph.replay()
        assert_same_bits((readings, bank), expected)

        odd = torch.empty(memory.numel() + 1, dtype=dtype, device="cuda")[1:].view_as(memory).copy_(memory)
        assert_close(sdm_write_read(odd, *inputs, **settings), expected)

        monkeypatch.setattr(slabs, "SLABS", 1)
        assert_same_bits(sdm_write_read(memory, *inputs, **settings), expected)
        monkeypatch.setattr(slabs, "working_bytes", lambda *args: 1)
        assert_same_bits(sdm_write_read(memory, *inputs, **settings), expected)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert_same_bits(sdm_write_read(memory, *inputs, **settings), expected)
    torch.cuda.synchronize()


# Aligned, so that launches are bound; several tiles of Phase 1 to merge, and rows of writes that take two loads.
MANY_STEPS = Case("many steps", streams=4, tokens=1273, writes=40, reads=33, head_dim=16, slots=200, chunk_size=32)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_many_steps_in_any_slabs_launched_either_way(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    (memory, *inputs), settings = call(MANY_STEPS, dtype)
    with torch.no_grad():
        expected = sdm_write_read(memory, *inputs, **settings)
        assert_close([x.cpu() for x in expected], sdm_write_read(*exactly((memory, *inputs)), **settings))
        for by_step in (False, True):
            monkeypatch.setattr(write_read_cuda, "runs_by_step", lambda *_, chosen=by_step: chosen)
            for least, steps in ((1, 64), (4, 64), (1, 4), (1, 1)):
                monkeypatch.setattr(slabs, "SLABS", least)
                monkeypatch.setattr(slabs, "SLAB_STEPS", steps)
                free_captured_loops()  # and what is known of calls like this one
                for _ in range(15):
                    assert_same_bits(sdm_write_read(memory, *inputs, **settings), expected)
                record = last_dispatch().forward
                assert record is not None and record.route == "triton " + ("by step" if by_step else "in one launch")
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    got = sdm_write_read(memory, *inputs, **settings)
                graph.replay()
                assert_same_bits(got, expected)


@pytest.mark.parametrize("mode", ["none", "fp8"])
@pytest.mark.parametrize(("chunk", "head_dim"), [(33, 64), (64, 64), (256, 1024)])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_large_chunks_launched_either_way(
    dtype: torch.dtype, chunk: int, head_dim: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the products of the two take other instructions; in float32 through tf32, which shows every bit of them."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    (memory, *inputs), settings = call(replace(MANY_STEPS, tokens=600, chunk_size=chunk, head_dim=head_dim), dtype)
    inputs[2].requires_grad_(mode == "fp8")
    expected = sdm_write_read(memory, *inputs, **settings)
    monkeypatch.setattr(write_read_cuda, "runs_by_step", lambda *_: True)
    free_captured_loops()
    assert_same_bits(sdm_write_read(memory, *inputs, **settings | {"snapshot_quant": mode}), expected)


def test_a_stream_does_not_depend_on_its_batch() -> None:
    (memory, *inputs), settings = call(MANY_STEPS, torch.bfloat16)
    with torch.no_grad():
        readings, bank = sdm_write_read(memory, *inputs, **settings)
        for p in range(MANY_STEPS.streams):
            alone, advanced = sdm_write_read(memory, *(x[p : p + 1] for x in inputs), **settings)
            rows = slice(p * MANY_STEPS.slots, (p + 1) * MANY_STEPS.slots)
            assert_same_bits((alone, advanced[rows]), (readings[p : p + 1], bank[rows]))


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("k", [32, 40, 100, 200])
def test_top_k_with_ties_and_infinities(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.randn(64, 48, generator=generator)
    scores[16:48] = scores[16:48].mul(3).round()
    scores[32:][torch.rand(32, 48, generator=generator) < 0.2] = float("inf")
    scores[40:][torch.rand(24, 48, generator=generator) < 0.2] = -float("inf")
    scores[56:][torch.rand(8, 48, generator=generator) < 0.1] = float("nan")
    scores = scores.to(dtype)
    got = product_key_topk(scores.cuda(), (32, 16), k)
    assert_same_bits([x.cpu() for x in got], product_key_topk(scores, (32, 16), k))


def test_a_replay_serves_other_inputs_and_other_banks() -> None:
    case = SEVERAL[0]
    free_captured_loops()
    kept = set()
    with torch.no_grad():
        for seed in range(3):
            (memory, *inputs), settings = call(case, torch.float32, seed)
            got = sdm_write_read(memory, *inputs, **settings)
            assert_close([x.cpu() for x in got], sdm_write_read(*exactly((memory, *inputs)), **settings))
            kept.add(captured_loops())
    assert len(kept) == 1 and kept != {0}
    free_captured_loops()
    assert captured_loops() == 0


def test_ids_beyond_the_bank_touch_nothing() -> None:
    (memory, *inputs), settings = call(SEVERAL[0], torch.float32)
    fence = torch.full((memory.shape[0] + 64, memory.shape[1]), 7.0, device="cuda")
    bank = fence[32:-32].copy_(memory)
    for i in (0, 5):
        inputs[i] = torch.where(inputs[i] == inputs[i].max(), 2**30, inputs[i])
    with torch.no_grad():
        readings = sdm_write_read_(bank, *inputs, **settings)
    assert readings.isfinite().all()
    assert (fence[:32] == 7).all() and (fence[-32:] == 7).all()


def test_hooks_see_every_launch_and_change_no_bit() -> None:
    triton = pytest.importorskip("triton")
    (memory, *inputs), settings = call(SEVERAL[0], torch.bfloat16)
    token = [x[:, 0].contiguous() for x in inputs]
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    def decoded() -> list[Tensor]:
        bank = memory.clone()
        return [sdm_decode_step(bank, *token), bank]

    with torch.no_grad():
        expected, expected_token = sdm_write_read(memory, *inputs, **settings), decoded()
        assert_same_bits(decoded(), expected_token)
        triton.knobs.runtime.launch_enter_hook.add(hook)
        try:
            assert_same_bits(decoded(), expected_token)
            assert seen == ["_decode_step_kernel"]
            assert_same_bits(sdm_write_read(memory, *inputs, **settings), expected)
            slabs = seen.count("_step_flow_kernel")
            assert slabs
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = sdm_write_read(memory, *inputs, **settings)
            assert seen.count("_step_flow_kernel") == 2 * slabs
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(hook)
        graph.replay()
        assert_same_bits(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_on_a_device_that_is_not_the_current_one() -> None:
    (memory, *inputs), settings = call(SEVERAL[0], torch.bfloat16)
    scores = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)).cuda()

    def results(device: str) -> list[Tensor]:
        bank, *others = (x.to(device, copy=True) for x in (memory, *inputs))
        reading = sdm_decode_step(bank, *(x[:, 0].contiguous() for x in others))
        eager = [sdm_write_read(bank, *others, **settings) for _ in range(2)]  # the second one is a replay
        assert_same_bits(*eager)
        return [reading, bank, *eager[0], *product_key_topk(scores.to(device), (16, 8), 5)]

    with torch.no_grad():
        expected = results("cuda:0")
        elsewhere = results("cuda:1")
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in elsewhere)
    assert_same_bits([x.cpu() for x in elsewhere], [x.cpu() for x in expected])
