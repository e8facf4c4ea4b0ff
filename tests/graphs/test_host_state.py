"""What a training step takes from Python, or leaves there, may change between steps: through TrainGraph they are the
steps of a plain loop all the same. A captured step that would change it itself is refused.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdm_compile.graphs import CaptureError, TrainGraph
from sdm_compile.graphs.host_state import cut_spent_graphs
from tests.graph_training import Model, Pair, Way, capturing, everything, loss_fn, plain_step
from tests.harness import assert_same_bits


def of_groups(name: str, value: Any) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group[name] = value

    return change


def replace_weight(model: Any, optimizer: torch.optim.Optimizer) -> None:
    weight = model.layer.Wo.weight
    weight.data = weight.detach() * 2


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "evaluation mode": lambda model, optimizer: model.eval(),
    "an attribute": lambda model, optimizer: setattr(model.dropout, "p", 0.5),
    "weight decay": of_groups("weight_decay", 0.5),
    "betas": of_groups("betas", (0.5, 0.9)),
    "a parameter's memory": replace_weight,
    "a frozen parameter": lambda model, optimizer: model.layer.Wo.weight.requires_grad_(False),
    "a buffer": lambda model, optimizer: setattr(model.norm, "running_mean", model.norm.running_mean + 1),
    "a submodule": lambda model, optimizer: setattr(model, "dropout", nn.Identity()),
    "the optimizer's state": lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "a tensor in an attribute": lambda model, optimizer: model.scales.insert(0, model.scales[0] * 2),
    "a new attribute": lambda model, optimizer: setattr(model, "mask", [torch.ones(3)]),
    "determinism": lambda model, optimizer: torch.use_deterministic_algorithms(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(way: Way, change: str) -> None:
    pair = Pair(way)
    batches = way.batches(8)
    for batch in batches[:4]:
        pair.step(batch)
    try:
        pair.both(CHANGES[change])
        pair.step(batches[4])
        assert pair.graph.captured == 0
        for batch in batches[5:]:
            pair.step(batch)
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
    assert pair.graph.captured == way.captures
    pair.check()


def test_loaded_weights_need_no_capture(way: Way) -> None:
    pair = Pair(way)
    start = copy.deepcopy(pair.model.state_dict())
    batches = way.batches(6)
    for batch in batches[:3]:
        pair.step(batch)
    pair.both(lambda model, optimizer: model.load_state_dict(start))
    for batch in batches[3:]:
        assert pair.graph.captured == way.captures
        pair.step(batch)
    pair.check()


def test_what_changes_before_every_step_is_named(way: Way) -> None:
    pair = Pair(way)
    found: list[str] = []
    for i, batch in enumerate(way.batches(8)):
        pair.both(of_groups("betas", (0.9 - i / 100, 0.9)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pair.step(batch)
        found += [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert ["a setting of the optimizer's group 0" in message for message in found] == [True] * way.captures
    pair.check()


class Counting(Model):
    """Its forward leaves something in Python, as a captured one cannot."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Replacing(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.norm.running_var = self.norm.running_var * 0.5
        return super().forward(x)


@capturing
@pytest.mark.parametrize("kind", [Counting, Replacing])
def test_a_step_that_changes_python_is_refused(way: Way, kind: type[Model]) -> None:
    model = kind().to(way.device)
    optimizer = way.optimizer(model)
    way.models.append(model)
    graph = TrainGraph(model, loss_fn, optimizer)
    first, second = way.batches(2)
    graph.step(first)
    before, kept = everything(model, optimizer), vars(model).copy()
    with pytest.raises(CaptureError, match="the step itself changes a parameter, buffer or attribute of"):
        graph.step(second)
    assert_same_bits(everything(model, optimizer), before)
    assert vars(model) == kept
    plain_step(model, optimizer, second)


def test_an_eager_step_may_make_other_graphs_stale(way: Way) -> None:
    """The first batch of another shape replaces a buffer: the graph that there was had the one before."""

    class Growing(Model):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and x.shape[1] != 10 and not self.grown:
                self.norm.running_var = self.norm.running_var * 0.5
                self.grown = True
            return super().forward(x) * self.norm.running_var.mean()

        grown = False

    models = [Growing().to(way.device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    way.models += models
    optimizers = [way.optimizer(model) for model in models]
    graph = TrainGraph(models[0], loss_fn, optimizers[0])
    long = way.batches(2, tokens=17)
    for i, batch in enumerate([*way.batches(3), *long, *way.batches(3)]):
        torch.manual_seed(i)
        loss = graph.step(batch)
        torch.manual_seed(i)
        assert_same_bits([loss], plain_step(models[1], optimizers[1], batch))
    assert graph.captured == 2 * way.captures


def test_a_table_that_grows_makes_other_graphs_stale(way: Way) -> None:
    class Tables(Model):
        table = torch.zeros(0)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > len(self.table):
                self.table = torch.arange(x.shape[1], device=x.device)[:, None] / 10
            return super().forward(x + self.table[: x.shape[1]])

    model = Tables().to(way.device)
    way.models.append(model)
    graph = TrainGraph(model, loss_fn, way.optimizer(model))
    short, long = way.batches(3), way.batches(3, tokens=17)
    captured = []
    for batch in (*short[:2], *long[:2], *short, *long):
        graph.step(batch)
        captured.append(graph.captured)
    assert captured == [n * way.captures for n in (0, 1, 0, 1, 1, 2, 2, 2, 2, 2)]


class Leaving(Model):
    """Its forward leaves results in attributes: for the loss, and for others to look at."""

    penalty = latest = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.penalty, self.latest = y.square().mean(), y.detach()
        return y + self.penalty


def test_a_step_may_leave_tensors_in_attributes(way: Way) -> None:
    models = [Leaving().to(way.device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    way.models += models
    optimizers = [way.optimizer(model) for model in models]
    graph = TrainGraph(models[0], loss_fn, optimizers[0])
    captured = []
    for i, batch in enumerate([x for pair in zip(way.batches(4), way.batches(4, 17), strict=True) for x in pair]):
        torch.manual_seed(i)
        loss = graph.step(batch)
        torch.manual_seed(i)
        assert_same_bits([loss], plain_step(models[1], optimizers[1], batch))
        captured.append(graph.captured)
    assert captured == [n * way.captures for n in (0, 0, 1, 2, 2, 2, 2, 2)]
    assert_same_bits([models[0].latest], [models[1].latest])


def test_spent_graphs_are_cut_from_what_a_step_has_left() -> None:
    """By themselves, in lists and in dicts; parameters, and what has no graph, are what they were."""
    model, x = Leaving(), torch.ones((), requires_grad=True)
    plain = torch.zeros(3)
    model.penalty, model.latest, model.losses, model.named = x * 2, plain, [x * 3, plain], {"a": (x * 4,), "b": x}
    parameters = list(model.parameters())
    cut_spent_graphs(model.modules())
    assert [float(t) for t in (model.penalty, model.losses[0], model.named["a"][0])] == [2, 3, 4]
    assert all(t.grad_fn is None for t in (model.penalty, model.losses[0], model.named["a"][0]))
    assert model.latest is model.losses[1] is plain and model.named["b"] is x
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
