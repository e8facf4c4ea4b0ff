"""`trace_steps=True`: the same loop over the stage ops, each stage of each step a node of the captured graph."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from sdm_compile import reference, sdm_write_read
from tests.calls import call
from tests.cases import CASES, FLOATS, RAGGED, TANGLED, Case, Inputs, gradients, upstream, values_and_gradients
from tests.harness import TOLERANCES, assert_close, assert_same_bits

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
STEPS = 3  # of RAGGED
ONCE = ("stage_inputs", "phase1", "solve", "unstage_readings")
PER_STEP = ("token_gather", "dual_matmul", "decay_write")
FORWARD = {**dict.fromkeys(ONCE, 1), **dict.fromkeys(PER_STEP, STEPS)}
BACKWARD = {f"{name}_bwd": count for name, count in FORWARD.items()}


def traced(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    return call(case, trace_steps=True)


def sdm_nodes(*graphs: GraphModule) -> dict[str, int]:
    """How often the graphs call each op of ours."""
    targets = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    ours = [t for t in targets if isinstance(t, torch._ops.OpOverload) and t.namespace == "sdm"]
    return dict(Counter(t._opname for t in ours))


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_values_and_gradients(case: Case, dtype: torch.dtype) -> None:
    """The values are the composite op's, bit for bit; the gradients are the token loop's."""
    inputs = case.make(dtype).requiring_grad()
    exact = inputs.to(F64).requiring_grad()
    outputs = traced(case)(*inputs)
    with torch.no_grad():
        assert_same_bits(outputs, sdm_write_read(*inputs, chunk_size=case.chunk_size))
        assert_same_bits(traced(case)(*inputs), outputs)
    got = gradients(outputs, inputs, upstream(inputs))
    want = gradients(reference.write_read(*exact), exact, [grad.double() for grad in upstream(inputs)])
    if case.erased == 1:  # no gate has a gradient, but rounding noise may remain
        v, g = FLOATS.index("v"), FLOATS.index("g")
        assert not want[g].any()
        assert got[g].norm() < TOLERANCES[dtype] * got[v].norm()
        got[g].zero_()
    assert_close(got, want)
    assert [grad.dtype for grad in got] == [dtype] * len(FLOATS)


@pytest.mark.parametrize("output", [0, 1], ids=["readings", "bank"])
def test_gradients_of_one_output(output: int) -> None:
    inputs = TANGLED.make(F64).requiring_grad()
    exact = inputs.requiring_grad()
    given: list[Tensor | None] = [None, None]
    given[output] = upstream(inputs)[output]
    expected = gradients(reference.write_read(*exact), exact, given)
    assert_close(gradients(traced(TANGLED)(*inputs), inputs, given), expected)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_compiler_sees_every_stage(grad: bool) -> None:
    """One graph, with no break, and in it every stage of every step; also of the gradient."""
    captured: list[GraphModule] = []

    def backend(graph: GraphModule, example_inputs: Any) -> GraphModule:
        captured.append(graph)
        return graph

    inputs = RAGGED.make(F32).requiring_grad() if grad else RAGGED.make(F32)
    outputs = torch.compile(traced(RAGGED), fullgraph=True, backend=backend)(*inputs)
    assert len(captured) == 1
    assert sdm_nodes(*captured) == FORWARD
    assert_same_bits([x.detach() for x in outputs], [x.detach() for x in traced(RAGGED)(*inputs)])


def test_composite_is_one_node() -> None:
    """However many steps."""
    captured: list[GraphModule] = []

    def backend(graph: GraphModule, example_inputs: Any) -> GraphModule:
        captured.append(graph)
        return graph

    compiled = torch.compile(call(RAGGED), fullgraph=True, backend=backend)
    compiled(*RAGGED.make(F32))
    compiled(*RAGGED.make(F32).requiring_grad())
    assert [sdm_nodes(graph) for graph in captured] == [{"write_read": 1}, {"write_read_saving": 1}]


def test_fx_sees_every_stage_and_its_own_backward() -> None:
    def loss_gradients(*inputs: Tensor) -> list[Tensor]:
        return gradients(traced(RAGGED)(*inputs), Inputs(*inputs), upstream(Inputs(*inputs)))

    inputs = RAGGED.make(F64).requiring_grad()
    graph = make_fx(loss_gradients, tracing_mode="fake")(*inputs)
    assert sdm_nodes(graph) == {**FORWARD, **BACKWARD}
    other = replace(RAGGED, erased=0.3).make(F64, seed=3).requiring_grad()
    assert_same_bits(graph(*other), loss_gradients(*other))


@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)])
def test_compiled_values_and_gradients(backend: str, dynamic: bool) -> None:
    inputs = TANGLED.make(F32)
    compiled = torch.compile(traced(TANGLED), fullgraph=True, dynamic=dynamic, backend=backend)
    got, expected = values_and_gradients(compiled, inputs), values_and_gradients(traced(TANGLED), inputs)
    assert_same_bits(got[:2], expected[:2])
    assert_close(got, expected)


def test_export_sees_every_stage() -> None:
    class Module(torch.nn.Module):
        def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
            return traced(RAGGED)(*inputs)

    inputs = RAGGED.make(F32)
    exported = torch.export.export(Module(), (inputs,))
    assert sdm_nodes(exported.graph_module) == FORWARD
    assert_same_bits(exported.module()(inputs), traced(RAGGED)(*inputs))


def test_a_stage_may_be_saved_by_name_in_checkpointing() -> None:
    """Selective checkpointing addresses the stages: those that must be saved run once, the others again."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    runs: Counter[str] = Counter()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op in (torch.ops.sdm.token_gather.default, torch.ops.sdm.decay_write.default)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "sdm":
                runs[func._opname] += 1
            return func(*args, **(kwargs or {}))

    inputs = RAGGED.make(F64)
    expected = values_and_gradients(traced(RAGGED), inputs)

    def checkpointed(*args: Tensor) -> tuple[Tensor, Tensor]:
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(traced(RAGGED), *args, use_reentrant=False, context_fn=context)

    with Counting():
        got = values_and_gradients(checkpointed, inputs)
    assert_same_bits(got, expected)
    assert runs["token_gather"] == STEPS
    assert runs["dual_matmul"] > STEPS
