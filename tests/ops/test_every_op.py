"""What holds for every registered op, over the samples of `tests.samples`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from sdm_compile.machine import why_not_compile
from sdm_compile.ops.checks import UnsupportedConfigurationError
from tests.harness import (
    DTYPES,
    LAYOUTS,
    OpCase,
    Sample,
    as_fakes,
    assert_close,
    assert_fake_agrees,
    assert_same_bits,
    float_positions,
    in_float64,
    laid_out,
    normal_like,
    opcheck_utils,
    requiring_grad,
    tensors,
    vjp,
)
from tests.samples import CASES

FORMULAS = [case for case in CASES if case.registered.differentiable]
IN_PLACE = [case for case in CASES if case.registered.mutated]
SEVERAL = [c for c in CASES if sum("Tensor" in str(a.type) for a in c.registered.overload._schema.arguments) > 1]
EDGES = ("every edge at once", "every edge at once, int4", "no streams", "no rows")  # samples unlike the first two


def each(cases: Sequence[OpCase], choose: Callable[[OpCase], Sequence[Sample]]) -> pytest.MarkDecorator:
    """Parametrizes over cases and the samples chosen of each."""
    pairs = [(case, sample) for case in cases for sample in choose(case)]
    return pytest.mark.parametrize(("case", "sample"), pairs, ids=[f"{c.op}-{s.name}" for c, s in pairs])


def every(case: OpCase) -> Sequence[Sample]:
    return case.samples


def some(case: OpCase) -> Sequence[Sample]:
    return [*case.samples[:2], *(s for s in case.samples[2:] if s.name in EDGES)]


def first(case: OpCase) -> Sequence[Sample]:
    return case.samples[:1]


def refusal(case: OpCase, args: Sequence[Any], error: type[Exception]) -> str:
    """What the kernel and the fake kernel say, both before anything is written."""
    mode, fakes = as_fakes(args)
    with_values = [x for x in args if isinstance(x, Tensor) and not x.is_meta]
    before = [x.clone() for x in with_values]
    with pytest.raises(error) as real:
        case(*args)
    with mode, pytest.raises(error) as fake:
        case(*fakes)
    assert str(real.value) == str(fake.value)
    assert_same_bits(with_values, before)
    return str(real.value)


def argument_name(case: OpCase, position: int) -> str:
    return case.registered.overload._schema.arguments[position].name


def outputs_with_gradient(case: OpCase, args: Sequence[Any]) -> list[Tensor]:
    outputs = tensors(case(*args))
    assert [i for i, x in enumerate(outputs) if x.requires_grad] == list(case.differentiable)
    return [outputs[i] for i in case.differentiable]


def gradients(outputs: Sequence[Tensor], args: Sequence[Any], given: Sequence[Tensor | None]) -> list[Tensor]:
    """Of every argument that requires one, given those of some outputs; zeros where nothing depends on it."""
    outs, grads = zip(*((o, g) for o, g in zip(outputs, given, strict=True) if g is not None), strict=True)
    wanted = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    return list(torch.autograd.grad(outs, wanted, grads, retain_graph=True, materialize_grads=True))


# --- values ---


@each(CASES, every)
def test_values(case: OpCase, sample: Sample) -> None:
    for dtype in sample.dtypes:
        args = sample.args(dtype)
        untouched = [x.clone() if isinstance(x, Tensor) else x for x in args]
        got = case.run(args)
        assert_close(got, case.expected(args), case.tolerance_dtype(dtype))
        assert_same_bits(case.run(args), got)
        # `run` gives clones to what an op may write to, so nothing here may have changed.
        assert_same_bits([x for x in args if isinstance(x, Tensor)], [x for x in untouched if isinstance(x, Tensor)])


@each(CASES, some)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_inputs_do_not_matter(case: OpCase, sample: Sample, layout: str) -> None:
    """Real outputs equal those of contiguous inputs, and fake ones have their shape, dtype, device and strides."""
    dtype = sample.dtypes[0]
    args = sample.args(dtype)
    for i, x in enumerate(args):
        if isinstance(x, Tensor) and i not in case.registered.mutated:
            args[i] = laid_out(x, layout)
    assert_close(case.run(args), case.run([x.contiguous() if isinstance(x, Tensor) else x for x in args]))
    assert_fake_agrees(case.registered.overload, args)


@each(CASES, every)
def test_fresh_outputs(case: OpCase, sample: Sample) -> None:
    """No output shares memory with an argument or with another output."""
    args = sample.args(sample.dtypes[0])
    outputs = tensors(case(*args))
    storages = [x.untyped_storage() for x in (*outputs, *args) if isinstance(x, Tensor)]
    addresses = [s.data_ptr() for s in storages if s.nbytes()]
    assert len(set(addresses)) == len(addresses)


@each(CASES, first)
def test_inference_mode(case: OpCase, sample: Sample) -> None:
    args = sample.args(sample.dtypes[0])
    expected = case.run(args)
    with torch.inference_mode():
        outputs = tensors(case(*args))
    assert all(x.is_inference() for x in outputs)
    assert_same_bits([*outputs, *(args[i] for i in case.registered.mutated)], expected)


@each(CASES, first)
def test_autocast_changes_nothing(case: OpCase, sample: Sample) -> None:
    args = sample.args(torch.float32)
    expected = case.run(args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(case.run(args), expected)


@each(CASES, first)
def test_float16_is_refused(case: OpCase, sample: Sample) -> None:
    """All at once and of each argument alone."""

    def halved(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.half() if x.dtype == torch.float32 else x
        return torch.float16 if x == torch.float32 else x

    args = sample.args(torch.float32)
    # The solve knows float32 and float64 alone, whatever the bank is.
    error = ValueError if case.op in ("solve", "solve_bwd") else UnsupportedConfigurationError
    assert "float16" in refusal(case, [halved(x) for x in args], error)
    for i in float_positions(args):
        one = [halved(x) if j == i else x for j, x in enumerate(args)]
        assert refusal(case, one, ValueError).startswith(f"{argument_name(case, i)} has dtype torch.float16")


@each(CASES, first)
def test_ids_of_another_dtype_are_refused(case: OpCase, sample: Sample) -> None:
    """Whoever takes int32 in these samples takes nothing else: int64 is for a caller's ids."""
    for i, x in enumerate(sample.args(torch.float32)):
        if isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64):
            for dtype in (torch.int16, torch.int64) if x.dtype == torch.int32 else (torch.int16,):
                args = sample.args(torch.float32)
                args[i] = x.to(dtype)
                assert refusal(case, args, ValueError).startswith(f"{argument_name(case, i)} has dtype {dtype}")


@each(SEVERAL, first)
def test_a_tensor_on_another_device_is_refused(case: OpCase, sample: Sample) -> None:
    """By its name, or by those of another and of itself where it is the one that the others are measured by."""
    for i, x in enumerate(sample.args(torch.float32)):
        if isinstance(x, Tensor):
            args = sample.args(torch.float32)
            args[i] = x.to("meta")
            message, name = refusal(case, args, ValueError), argument_name(case, i)
            if not message.startswith(f"{name} is on meta; expected cpu, where "):
                assert message.endswith(f" is on cpu; expected meta, where {name} is")


@each([case for case in CASES if case.op != "product_key_topk"], first)  # its scores have any leading dimensions
def test_a_dimension_too_many_is_refused(case: OpCase, sample: Sample) -> None:
    for i, x in enumerate(sample.args(torch.float32)):
        if isinstance(x, Tensor):
            args = sample.args(torch.float32)
            args[i] = x.unsqueeze(0)
            refusal(case, args, ValueError)


@each(CASES, first)
def test_kernel_and_fake_refuse_the_same(case: OpCase, sample: Sample) -> None:
    """One element less along any dimension of an argument: what is legal for one is legal for the other."""
    for i, x in enumerate(sample.args(torch.float32)):
        for d in range(x.dim() if isinstance(x, Tensor) and x.numel() else 0):
            args = sample.args(torch.float32)
            args[i] = x.narrow(d, 0, x.shape[d] - 1).clone()
            mode, fakes = as_fakes(args)
            try:
                with mode:
                    case(*fakes)
            except ValueError as error:
                assert refusal(case, args, type(error)) == str(error)
            else:
                with contextlib.suppress(IndexError):  # the bank has lost a row that an id names: only values tell
                    case(*args)


# --- gradients ---


@each(FORMULAS, every)
def test_gradients(case: OpCase, sample: Sample) -> None:
    """Of all outputs together, against autograd of the float64 reference; each in its input's dtype."""
    for dtype in sample.dtypes:
        args = requiring_grad(sample.args(dtype))
        outputs = outputs_with_gradient(case, args)
        given = [normal_like(x, seed) for seed, x in enumerate(outputs)]
        got = gradients(outputs, args, given)
        assert [x.dtype for x in got] == [args[i].dtype for i in float_positions(args)]
        wide = in_float64(sample.args(dtype))
        by_output = dict(zip(case.differentiable, in_float64(given), strict=True))
        expected = vjp(case.reference, wide, [by_output.get(i) for i in range(len(tensors(case.reference(*wide))))])
        assert_close(got, expected, case.tolerance_dtype(dtype))


@each(FORMULAS, some)
def test_gradients_of_some_outputs_for_some_inputs(case: OpCase, sample: Sample) -> None:
    """Each output's gradient alone adds up to that of all; each input alone gets what it gets among all."""
    args = requiring_grad(sample.args(torch.float64))
    outputs = outputs_with_gradient(case, args)
    given = [normal_like(x, seed) for seed, x in enumerate(outputs)]
    together = gradients(outputs, args, given)
    alone = [
        gradients(outputs, args, [g if i == j else None for j, g in enumerate(given)]) for i in range(len(outputs))
    ]
    assert_close([torch.stack(grads).sum(0) for grads in zip(*alone, strict=True)], together)
    for position, expected in zip(float_positions(args), together, strict=True):
        one = requiring_grad(sample.args(torch.float64), [position])
        outs = tensors(case(*one))
        pairs = [(outs[i], g) for i, g in zip(case.differentiable, given, strict=True) if outs[i].requires_grad]
        got = torch.autograd.grad([o for o, _ in pairs], one[position], [g for _, g in pairs], materialize_grads=True)
        assert_close(got, [expected])


@each(FORMULAS, some)
def test_gradients_with_stride_zero(case: OpCase, sample: Sample) -> None:
    args = requiring_grad(sample.args(torch.float64))
    outputs = outputs_with_gradient(case, args)
    expanded = gradients(outputs, args, [x.new_ones(()).expand(x.shape) for x in outputs])
    assert_close(expanded, gradients(outputs, args, [torch.ones_like(x) for x in outputs]))


@pytest.mark.parametrize("case", FORMULAS, ids=lambda case: case.op)
def test_gradcheck(case: OpCase) -> None:
    """Over the samples without a gate of -inf, around which there is no finite difference."""

    def outputs(*args: Any) -> tuple[Tensor, ...]:
        return tuple(outputs_with_gradient(case, args))

    checked = 0
    for sample in case.samples:
        args = requiring_grad(sample.args(torch.float64)) if torch.float64 in sample.dtypes else []
        floats = [args[i] for i in float_positions(args)]
        if floats and all(x.dtype == torch.float64 and x.isfinite().all() for x in floats):
            assert torch.autograd.gradcheck(outputs, args, fast_mode=sum(x.numel() for x in floats) > 40)
            checked += 1
    assert checked >= 5


@each(FORMULAS, first)
def test_func_grad_and_vjp(case: OpCase, sample: Sample) -> None:
    args = sample.args(torch.float64)
    positions = float_positions(args)

    def outputs(*floats: Tensor) -> tuple[Tensor, ...]:
        filled = dict(zip(positions, floats, strict=True))
        outs = tensors(case(*(filled.get(i, x) for i, x in enumerate(args))))
        return tuple(outs[i] for i in case.differentiable)

    def loss(*floats: Tensor) -> Tensor:
        return torch.stack([(x * normal_like(x, seed)).sum() for seed, x in enumerate(outputs(*floats))]).sum()

    leaves = requiring_grad(args)
    outs = outputs_with_gradient(case, leaves)
    given = [normal_like(x, seed) for seed, x in enumerate(outs)]
    expected = gradients(outs, leaves, given)
    floats = [args[i] for i in positions]
    assert_close(torch.func.grad(loss, argnums=tuple(range(len(floats))))(*floats), expected)
    assert_close(torch.func.vjp(outputs, *floats)[1](tuple(given)), expected)


@each(FORMULAS, first)
def test_double_backward_raises(case: OpCase, sample: Sample) -> None:
    args = requiring_grad(sample.args(torch.float64))
    outputs = outputs_with_gradient(case, args)
    given = [normal_like(x).requires_grad_() for x in outputs]
    wanted = [args[i] for i in float_positions(args)]
    grads = torch.autograd.grad(outputs, wanted, given, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        sum(grad.sum() for grad in grads).backward()


@each([case for case in CASES if not (case.registered.differentiable or case.registered.mutated)], first)
def test_without_a_formula_backward_raises(case: OpCase, sample: Sample) -> None:
    args = requiring_grad(sample.args(torch.float32))
    outputs = [x for x in tensors(case(*args)) if x.is_floating_point()]
    assert outputs and all(x.requires_grad for x in outputs)
    with pytest.raises(NotImplementedError, match=f"sdm::{case.op} has no derivative"):
        sum(x.float().sum() for x in outputs).backward()


@each(CASES, first)
def test_forward_mode_raises(case: OpCase, sample: Sample) -> None:
    args = sample.args(torch.float32)
    for i in float_positions(args):
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward"):
            dual = forward_ad.make_dual(args[i], torch.ones_like(args[i]))
            case(*(dual if j == i else x for j, x in enumerate(args)))


# --- what in-place ops owe ---


@each(IN_PLACE, some)
def test_versions_go_up(case: OpCase, sample: Sample) -> None:
    args = sample.args(sample.dtypes[0])
    before = [x._version if isinstance(x, Tensor) else None for x in args]
    case(*args)
    for i, version in enumerate(before):
        if version is not None:
            assert (args[i]._version > version) == (i in case.registered.mutated)


@each(IN_PLACE, first)
def test_a_stale_saved_tensor_is_noticed(case: OpCase, sample: Sample) -> None:
    args = sample.args(torch.float32)
    weight = torch.ones((), requires_grad=True)
    product = args[0] * weight
    case(*args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@each(IN_PLACE, first)
def test_a_wanted_gradient_raises_before_anything_is_written(case: OpCase, sample: Sample) -> None:
    for i in float_positions(sample.args(torch.float32)):
        args = requiring_grad(sample.args(torch.float32), [i])
        before = [x.detach().clone() for x in args if isinstance(x, Tensor)]
        with pytest.raises(RuntimeError, match="has no gradient, but grad mode is on"):
            case(*args)
        assert_same_bits([x.detach() for x in args if isinstance(x, Tensor)], before)
        with torch.no_grad():
            case(*args)


@each(IN_PLACE, first)
def test_inference_tensors_are_not_written_to_outside(case: OpCase, sample: Sample) -> None:
    """Also where no other argument is an ordinary tensor."""
    with torch.inference_mode():
        inference = sample.args(torch.float32)
    before = [inference[i].clone() for i in case.registered.mutated]
    mixed = sample.args(torch.float32)
    for i in case.registered.mutated:
        mixed[i] = inference[i]
    for args in (mixed, inference):
        with pytest.raises(RuntimeError, match=r"torch.inference_mode\(\) cannot be updated outside it"):
            case(*args)
        assert_same_bits([args[i] for i in case.registered.mutated], before)


# --- as operators ---


@each(CASES, every)
def test_opcheck_schema_and_fake(case: OpCase, sample: Sample) -> None:
    for dtype in sample.dtypes[1:]:
        args = sample.args(dtype)
        torch.library.opcheck(case.registered.overload, args, test_utils=opcheck_utils(args))


@each(CASES, some)
def test_opcheck(case: OpCase, sample: Sample) -> None:
    op, args = case.registered.overload, sample.args(torch.float32)
    torch.library.opcheck(op, args)
    if case.registered.differentiable and case.op != "stage_inputs":  # its check adds floats to a first integer output
        torch.library.opcheck(op, requiring_grad(args))


def between_others(case: OpCase) -> Callable[..., list[Tensor]]:
    """The op with another one before and after it, which a compiler works out from shapes, dtypes and strides."""

    def twice(x: Any) -> Any:
        return x + x if isinstance(x, Tensor) and x.dtype in DTYPES else x

    return lambda *args: [twice(x) for x in case.run([twice(x) for x in args])]


@each(CASES, some)
def test_compiles(case: OpCase, sample: Sample) -> None:
    args = sample.args(torch.float32)
    eager = between_others(case)
    call = torch.compile(eager, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_close(call(*args), eager(*args))
    if case.registered.differentiable:
        given = [normal_like(x, i) if i in case.differentiable else None for i, x in enumerate(eager(*args))]
        leaves = requiring_grad(args)
        assert_close(gradients(call(*leaves), leaves, given), gradients(eager(*leaves), leaves, given))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_one_dynamic_graph_serves_other_sizes(case: OpCase) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    eager = between_others(case)
    call = torch.compile(eager, fullgraph=True, dynamic=True, backend=counter)
    for sample in case.samples[:2]:
        args = sample.args(torch.float32)
        assert_close(call(*args), eager(*args))
    assert counter.frame_count == 1


@pytest.mark.skipif(why_not_compile() is not None, reason=str(why_not_compile()))
@pytest.mark.parametrize("op", ["decay_write", "decay_write_", "phase1", "snapshot_dequantize"])
@torch._inductor.config.patch(fx_graph_cache=False)  # its key does not hold what a fake kernel returns
def test_compiles_through_inductor(op: str) -> None:
    case = next(case for case in CASES if case.op == op)
    args = case.samples[0].args(torch.float32)
    eager = between_others(case)
    assert_close(torch.compile(eager, fullgraph=True)(*args), eager(*args))
