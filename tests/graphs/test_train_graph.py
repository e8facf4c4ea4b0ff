"""Training steps through TrainGraph are the steps of a plain loop, bit for bit, whatever changes between them.

They run eagerly on the CPU, captured on a GPU, and on the CPU through graphs that are made of Python: those capture
by a run whose effects are undone, and replay by another run.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdm_compile import SparseDeltaMemory, SparseDeltaMemoryConfig
from sdm_compile.graphs import CaptureError, TrainGraph, host_state, train
from sdm_compile.graphs.capture import Captured
from sdm_compile.graphs.host_state import cut_spent_graphs
from sdm_compile.machine import why_not_compile
from tests.harness import assert_same_bits

DIM = 12
needs_gpu = pytest.mark.gpu


class Model(nn.Module):
    """A layer between two norms, asked for the stream one token earlier; it has a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        config = SparseDeltaMemoryConfig(
            dim=DIM, num_heads=2, slots_per_head=16, num_writes=3, num_reads=4, chunk_size=8
        )
        self.norm = nn.BatchNorm1d(DIM)
        self.layer = SparseDeltaMemory(config)
        self.dropout = nn.Dropout(0.1)
        self.scales = [torch.ones(DIM)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        self.scales = [fn(x) for x in self.scales]
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.dropout(self.layer(x)[0])


def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


@dataclass
class Way:
    """How TrainGraph runs a step: the device, whether it captures, and whether graphs are made of Python."""

    device: str
    captures: bool
    models: list[nn.Module] = field(default_factory=list)  # what a capture of Python leaves as it was

    def model(self, seed: int = 0) -> Model:
        torch.manual_seed(seed)
        model = Model().to(self.device)
        self.models.append(model)
        return model

    def optimizer(self, model: nn.Module, kind: str = "AdamW", lr: float = 0.02) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {
            "AdamW": {"fused": True, "weight_decay": 0.1},
            "Adam": {"foreach": self.device == "cuda"},
            "SGD": {"fused": True, "momentum": 0.9, "dampening": 0.5},
            "RMSprop": {"foreach": self.device == "cuda"},
        }[kind]
        if self.device == "cuda" and kind != "SGD":
            settings["capturable"] = True
        # A number is rounded once more where it becomes a tensor: the twin, which has no TrainGraph, begins with one.
        rate = torch.tensor(lr, device=self.device) if self.captures else lr
        return getattr(torch.optim, kind)(model.parameters(), lr=rate, **settings)

    def batches(self, number: int, tokens: int = 10, batch: int = 4) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(7)
        xs = [torch.randn(batch, tokens, DIM, generator=generator) for _ in range(number)]
        return [{"x": x.to(self.device), "y": x.roll(1, 1).to(self.device)} for x in xs]


@contextmanager
def uncached() -> Iterator[None]:
    """As captures are: autocast keeps no copies of parameters."""
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


class PythonGraph:
    """What stands for a CUDA graph: replays by a run."""

    def __init__(self, call: Callable[[], Any], result: Any) -> None:
        self.call, self.result = call, result

    def pool(self) -> None: ...

    def replay(self) -> None:
        with uncached():
            results = self.call()
        for old, new in zip(self.result, results, strict=True):
            if old is not None:
                old.copy_(new)


WAYS = ["eager", "python graphs", pytest.param("cuda graphs", marks=needs_gpu)]
capturing = pytest.mark.parametrize("way", WAYS[1:], indirect=True)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    if request.param != "python graphs":
        return Way("cuda" if request.param == "cuda graphs" else "cpu", request.param == "cuda graphs")
    way = Way("cpu", True)
    optimizers: list[torch.optim.Optimizer] = []

    def capture(call: Callable[[], Any], device: torch.device, pool: None) -> Captured[Any]:
        states = [x for o in optimizers for s in o.state.values() for x in s.values() if isinstance(x, Tensor)]
        tensors = [x for m in way.models for x in (*m.parameters(), *m.buffers())] + states
        before, random = [x.detach().clone() for x in tensors], torch.get_rng_state()
        try:
            with uncached():
                result = call()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        finally:
            torch.set_rng_state(random)
            for x, old in zip(tensors, before, strict=True):
                x.data.copy_(old)
        return Captured(PythonGraph(call, result), result)

    def init(self: TrainGraph, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        original(self, model, loss, optimizer, **settings)
        optimizers.append(optimizer)
        self._captures = True
        self._hold_learning_rates()

    original = TrainGraph.__init__
    monkeypatch.setattr(TrainGraph, "__init__", init)
    monkeypatch.setattr(TrainGraph, "_follow_stream", lambda self: None)
    monkeypatch.setattr(train, "capture", capture)
    monkeypatch.setattr(train, "refuse_while_capturing", lambda device, what: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(host_state, "_on_host", lambda x: False)
    monkeypatch.setattr(host_state, "numeric_settings", lambda device: torch.are_deterministic_algorithms_enabled())
    return way


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    accumulate: int = 1,
    max_norm: float | None = None,
    autocast: torch.dtype | None = None,
) -> list[Tensor]:
    """The step as one writes it: the loss, and the norm where there is one."""
    optimizer.zero_grad()
    size = len(batch["x"]) // accumulate
    losses = []
    for i in range(accumulate):
        part = {name: x[i * size : (i + 1) * size] for name, x in batch.items()}
        with torch.autocast(batch["x"].device.type, autocast) if autocast else nullcontext():
            loss = loss_fn(model, part)
        (loss / accumulate if accumulate > 1 else loss).backward()
        losses.append(loss.detach())
    norm = [] if max_norm is None else [nn.utils.clip_grad_norm_(model.parameters(), max_norm)]
    optimizer.step()
    return [torch.stack(losses).mean() if accumulate > 1 else losses[0], *norm]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [x for p in model.parameters() for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    return [x.detach().clone() for x in (*model.parameters(), *model.buffers(), *states)]


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """As a scheduler does it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Pair:
    """A TrainGraph and a twin that takes the same steps plainly, both with random numbers of the same seeds."""

    def __init__(self, way: Way, kind: str = "AdamW", **settings: Any) -> None:
        self.settings = {name: value for name, value in settings.items() if name != "max_graphs"}
        self.model, self.twin = way.model(), way.model()
        self.optimizer, self.twins = way.optimizer(self.model, kind), way.optimizer(self.twin, kind)
        self.graph = TrainGraph(self.model, loss_fn, self.optimizer, **settings)
        self.steps = 0

    def both(self, change: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
        change(self.model, self.optimizer)
        change(self.twin, self.twins)

    def step(self, batch: dict[str, Tensor]) -> None:
        """One step of both, with the same result."""
        self.steps += 1
        torch.manual_seed(self.steps)
        got = [self.graph.step(batch)]
        random = torch.cuda.get_rng_state() if batch["x"].is_cuda else torch.get_rng_state()
        got += [] if self.graph.grad_norm is None else [self.graph.grad_norm]
        torch.manual_seed(self.steps)
        assert_same_bits(got, plain_step(self.twin, self.twins, batch, **self.settings))
        assert torch.equal(random, torch.cuda.get_rng_state() if batch["x"].is_cuda else torch.get_rng_state())

    def check(self) -> None:
        assert_same_bits(everything(self.model, self.optimizer), everything(self.twin, self.twins))
        assert all(p.grad is None for p in self.model.parameters())


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "RMSprop"])
def test_every_step_equals_the_plain_one(way: Way, kind: str) -> None:
    pair = Pair(way, kind)
    for i, batch in enumerate(way.batches(20)):
        pair.both(lambda model, optimizer, i=i: set_rates(optimizer, 0.02 / (i + 1)))
        pair.step(batch)
        assert pair.graph.captured == (way.captures and i > 0)
    pair.check()


@pytest.mark.parametrize(
    "settings",
    [{"accumulate": 2}, {"max_norm": 0.1}, {"accumulate": 4, "max_norm": 0.1}, {"autocast": torch.bfloat16}],
    ids=str,
)
def test_accumulation_clipping_and_autocast(way: Way, settings: dict[str, Any]) -> None:
    pair = Pair(way, **settings)
    for batch in way.batches(6):
        pair.step(batch)
    pair.check()
    assert (pair.graph.grad_norm is None) == ("max_norm" not in settings)


@pytest.mark.parametrize("scheduler", ["LambdaLR", "CosineAnnealingLR", "StepLR", "before"])
def test_schedulers(way: Way, scheduler: str) -> None:
    """Made after TrainGraph or before, they set the rate of the next step."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        if scheduler == "CosineAnnealingLR":
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        if scheduler == "StepLR":
            return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    models = [way.model(), way.model()]
    optimizers = [way.optimizer(model) for model in models]
    before = [make(optimizer) for optimizer in optimizers] if scheduler == "before" else []
    graph = TrainGraph(models[0], loss_fn, optimizers[0])
    schedulers = before or [make(optimizer) for optimizer in optimizers]
    for i, batch in enumerate(way.batches(8)):
        torch.manual_seed(i)
        loss = graph.step(batch)
        torch.manual_seed(i)
        assert_same_bits([loss], plain_step(models[1], optimizers[1], batch))
        for each in schedulers:
            each.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    assert graph.captured == way.captures
    assert_same_bits(everything(models[0], optimizers[0]), everything(models[1], optimizers[1]))


def test_a_rate_that_is_put_in_place_of_the_tensor(way: Way) -> None:
    pair = Pair(way)
    held = pair.optimizer.param_groups[0]["lr"]
    rates: list[Any] = [0.3, torch.tensor(0.2), torch.tensor([0.1]), torch.tensor(0.05, device=way.device), 1]
    for rate, batch in zip([None, None, *rates], way.batches(7), strict=True):
        if rate is not None:
            pair.optimizer.param_groups[0]["lr"] = rate
            set_rates(pair.twins, float(rate))
        pair.step(batch)
        if way.captures:
            assert pair.optimizer.param_groups[0]["lr"] is held
            assert pair.graph.captured == (pair.steps > 1)
    pair.check()


def test_shapes_take_turns(way: Way) -> None:
    pair = Pair(way, max_graphs=2)
    wide, long, short = way.batches(5), way.batches(5, tokens=17), way.batches(5, batch=2)
    for i in range(3):
        pair.step(wide[i])
        pair.step(long[i])
    assert pair.graph.captured == 2 * way.captures
    with pytest.warns(UserWarning, match="max_graphs=2") if way.captures else nullcontext():
        pair.step(short[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pair.step(short[1])
        pair.step(wide[3])
        pair.step(short[2])
        pair.step(long[3])
    assert pair.graph.captured == 2 * way.captures
    pair.check()


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


def test_reset(way: Way) -> None:
    pair = Pair(way)
    for batch in way.batches(3):
        pair.step(batch)
    pair.graph.reset()
    assert pair.graph.captured == 0
    for batch in way.batches(3):
        pair.step(batch)
    assert pair.graph.captured == way.captures


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


def test_two_of_them_take_turns(way: Way) -> None:
    pairs = [Pair(way), Pair(way, "SGD", max_norm=0.5)]
    for batch in way.batches(5):
        for pair in pairs:
            pair.step(batch)
    for pair in pairs:
        pair.check()


def test_a_loss_is_a_tensor_of_its_own(way: Way) -> None:
    pair = Pair(way, max_norm=1.0)
    losses, norms, copies = [], [], []
    for batch in way.batches(5):
        losses.append(pair.graph.step(batch))
        norms.append(pair.graph.grad_norm)
        copies.append([losses[-1].clone(), norms[-1].clone()])
    assert_same_bits([*losses, *norms], [x for pair in zip(*copies, strict=True) for x in pair])
    assert len({x.item() for x in losses}) == len({x.item() for x in norms}) == 5
    assert not any(x.requires_grad for x in losses)


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


@capturing
def test_a_failed_capture_leaves_everything_usable(way: Way) -> None:
    pair = Pair(way)
    batches = way.batches(6)
    pair.step(batches[0])
    fails = True

    def waiting_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_fn(model, batch)
        if fails and not torch.cuda.is_available():
            raise RuntimeError("no .item() here")
        if fails:
            loss.item()
        return loss

    pair.graph._loss_fn = waiting_loss
    before = everything(pair.model, pair.optimizer)
    for _ in range(2):
        with pytest.raises(CaptureError, match="item"):
            pair.graph.step(batches[1])
        assert_same_bits(everything(pair.model, pair.optimizer), before)
        assert pair.graph.captured == 0
    torch.manual_seed(9)
    expected = copy.deepcopy(pair.model)(batches[1]["x"])
    torch.manual_seed(9)
    assert_same_bits([copy.deepcopy(pair.model)(batches[1]["x"])], [expected])
    fails = False
    for batch in batches[1:]:
        pair.step(batch)
    long = way.batches(3, tokens=17)
    pair.step(long[0])
    fails = True
    with pytest.raises(CaptureError, match="item"):  # beside a graph, in the same pool
        pair.graph.step(long[1])
    fails = False
    assert pair.graph.captured == 1
    pair.step(batches[0])
    for batch in (long[2], batches[1], long[1]):
        pair.step(batch)
    assert pair.graph.captured == 2
    pair.check()


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


def test_a_failed_step_leaves_no_gradients(way: Way) -> None:
    pair = Pair(way, accumulate=2)
    batch = way.batches(1)[0]
    with pytest.raises(RuntimeError):
        pair.graph.step({"x": batch["x"], "y": batch["y"][:, :3]})
    assert all(p.grad is None for p in pair.model.parameters())
    pair.step(batch)


def test_numbers_in_a_batch_are_part_of_its_shape(way: Way) -> None:
    model = way.model()
    parameter_steps = TrainGraph(
        model, lambda m, batch: loss_fn(m, batch[0]) * batch[1], way.optimizer(model), accumulate=2, max_graphs=2
    )
    batch = way.batches(1)[0]
    for scale in (1.0, 2.0, 1.0, 2.0, 1.0, 2.0):
        model.eval()
        with torch.no_grad():
            expected = scale * loss_fn(model, batch)
        torch.testing.assert_close(parameter_steps.step((batch, scale)), expected)
    assert parameter_steps.captured == 2 * way.captures


@pytest.mark.skipif(why_not_compile() is not None, reason=str(why_not_compile()))
def test_a_compiled_model(way: Way) -> None:
    model = way.model()
    twin = copy.deepcopy(model)
    optimizers = [way.optimizer(m) for m in (model, twin)]
    way.models.append(twin)
    graph = TrainGraph(torch.compile(model, dynamic=False), loss_fn, optimizers[0])
    plain = torch.compile(twin, dynamic=False)
    for m in (model, twin):
        m.dropout.p = 0.0
    compilations = []
    for batch in way.batches(6):
        assert_same_bits([graph.step(batch)], plain_step(plain, optimizers[1], batch))
        compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compilations == compilations[:1] * 6
    assert graph.captured == way.captures
    assert_same_bits(everything(model, optimizers[0]), everything(twin, optimizers[1]))


def test_what_a_capture_has_taken_cannot_be_set(way: Way) -> None:
    """What is public is looked at in every step."""
    public = {name for name in vars(Pair(way).graph) if not name.startswith("_")}
    assert public == {"model", "optimizer", "max_graphs", "device"}


class Silent:
    """What stands for a CUDA graph, of whose writes PyTorch sees nothing."""

    def replay(self) -> None: ...


@pytest.mark.parametrize("way", WAYS[1:2], indirect=True)
def test_a_replay_counts_as_a_write(way: Way) -> None:
    """So that autograd does not take what it saved before the step for what is there after it."""
    pair = Pair(way)
    for batch in way.batches(2):
        pair.step(batch)
    shape = next(iter(pair.graph._shapes.values()))
    shape.step = Captured(Silent(), shape.step.result)
    read = [pair.model.layer.Wo.weight, pair.model.norm.running_mean]
    x = torch.ones(12, requires_grad=True)
    products = [x * y for y in read]
    pair.graph.step(batch)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


class Recorded(Tensor):
    """A tensor that tells on which streams it is said to be used."""

    streams: list[Any]

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_what_a_step_reads_is_kept_for_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is not taken by others while the step still runs on another stream than it was made on."""
    waited: list[tuple[Any, Any]] = []

    @dataclass
    class Stream:
        name: str

        def wait_stream(self, other: Any) -> None:
            waited.append((self.name, other.name))

    model = Model()
    graph = TrainGraph(model, loss_fn, torch.optim.SGD(model.parameters()))
    used = [torch.zeros(2).as_subclass(Recorded) for _ in range(2)]
    for x in used:
        x.streams = []
    graph._shapes = {1: None, 2: train._Shape([used[0], "text"], [], Captured(Silent(), ()))}
    graph._rates = [used[1]]
    for name in "aab":
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, name=name: Stream(name))
        graph._follow_stream()
    assert waited == [("b", "a")] and [x.streams for x in used] == [[Stream("b")]] * 2


# What is refused


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"max_graphs": 0}, "max_graphs must be at least 1, got 0"),
        ({"max_norm": 0.0}, "max_norm must be above 0"),
        ({"max_norm": float("nan")}, "max_norm must be above 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=message):
        TrainGraph(model, loss_fn, torch.optim.Adam(model.parameters()), **settings)


def test_parameters_on_several_devices() -> None:
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match="on one device, got cpu, meta"):
        TrainGraph(model, loss_fn, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "SGD", "NAdam"])
def test_optimizers_that_cannot_be_captured(kind: str) -> None:
    optimizer = getattr(torch.optim, kind)(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="fused=True" if kind == "SGD" else "capturable=True"):
        train._check_capturable(optimizer)


@needs_gpu
def test_an_optimizer_is_refused_before_anything_happens() -> None:
    model = Model().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="capturable=True"):
        TrainGraph(model, loss_fn, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_bad_batches_and_losses(way: Way) -> None:
    model = way.model()
    batch = way.batches(1)[0]
    optimizer = way.optimizer(model)
    with pytest.raises(ValueError, match=r"accumulate=3 does not divide .* \(4, 10, 12\)"):
        TrainGraph(model, loss_fn, optimizer, accumulate=3).step(batch)
    with pytest.raises(TypeError, match="tensors, numbers and strings, got device"):
        TrainGraph(model, loss_fn, optimizer).step([batch["x"], torch.device("cpu")])
    for loss, message in [
        (lambda m, batch: m(batch["x"]), r"got shape \(4, 10, 12\)"),
        (lambda m, batch: 1.0, "got float"),
        (lambda m, batch: loss_fn(m, batch).detach(), "got one that requires no gradient"),
    ]:
        with pytest.raises(ValueError, match=message):
            TrainGraph(model, loss, optimizer).step(batch)
    with pytest.raises(RuntimeError, match=r"autocast=torch\.bfloat16"), torch.autocast(way.device, torch.bfloat16):
        TrainGraph(model, loss_fn, optimizer).step(batch)


def test_steps_without_grad_mode(way: Way) -> None:
    pair = Pair(way)
    for i, batch in enumerate(way.batches(4)):
        torch.manual_seed(i)
        with torch.no_grad() if i % 2 else torch.inference_mode():
            loss = pair.graph.step(batch)
        torch.manual_seed(i)
        assert_same_bits([loss], plain_step(pair.twin, pair.twins, batch))


# What only a GPU can show


@pytest.fixture
def gpu() -> Iterator[Way]:
    yield Way("cuda", True)
    torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("source", ["device", "pinned"])
def test_nothing_synchronises(gpu: Way, source: str) -> None:
    pair = Pair(gpu, max_norm=1.0, accumulate=2)
    batches = gpu.batches(6)
    if source == "pinned":
        batches = [{name: x.cpu().pin_memory() for name, x in batch.items()} for batch in batches]
    pair.graph.step(batches[0])
    pair.graph.step(batches[1])
    torch.cuda.set_sync_debug_mode("error")
    for i, batch in enumerate(batches):
        pair.optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
        pair.graph.step(batch)
    assert pair.graph.captured == 1


@needs_gpu
def test_a_batch_on_the_host(gpu: Way) -> None:
    graphs = []
    for host in (False, True):
        model = gpu.model()
        graph = TrainGraph(model, loss_fn, gpu.optimizer(model))
        torch.manual_seed(1)
        losses = []
        for batch in gpu.batches(5):
            batch = {name: x.cpu() for name, x in batch.items()} if host else batch
            losses.append(graph.step(batch))
            for x in batch.values():
                x.fill_(float("nan"))  # taken by now
        graphs.append([*losses, *model.parameters()])
    assert_same_bits(graphs[0], graphs[1])


@needs_gpu
def test_steps_on_several_streams(gpu: Way) -> None:
    pair = Pair(gpu)
    streams = [torch.cuda.Stream() for _ in range(3)]
    losses = []
    for i, batch in enumerate(gpu.batches(12)):
        torch.manual_seed(i)
        with torch.cuda.stream(streams[i % 3]):
            losses.append(pair.graph.step(batch))
    torch.cuda.synchronize()
    for i, batch in enumerate(gpu.batches(12)):
        torch.manual_seed(i)
        assert_same_bits([losses[i]], plain_step(pair.twin, pair.twins, batch))
    pair.check()


@needs_gpu
def test_within_another_capture(gpu: Way) -> None:
    pair = Pair(gpu)
    batch = gpu.batches(1)[0]
    pair.step(batch)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(CaptureError, match="is being captured"):
            pair.graph.step(batch)
        with pytest.raises(CaptureError, match="is being captured"):
            TrainGraph(pair.model, loss_fn, pair.optimizer)
    pair.step(batch)


@needs_gpu
def test_a_graph_is_freed_when_it_is_dropped(gpu: Way) -> None:
    def train_a_little() -> None:
        model = gpu.model()
        gpu.models.clear()
        graph = TrainGraph(model, loss_fn, gpu.optimizer(model), max_norm=1.0)
        for tokens in (10, 17):
            for batch in gpu.batches(4, tokens):
                graph.step(batch)
        assert graph.captured == 2

    used = []
    for _ in range(10):
        train_a_little()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert used[2:] == used[2:3] * 8
