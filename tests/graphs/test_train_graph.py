"""Training steps through TrainGraph are the steps of a plain loop, bit for bit, in each way of `conftest.py`."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdm_compile.graphs import CaptureError, TrainGraph, train
from sdm_compile.graphs.capture import Captured
from sdm_compile.machine import why_not_compile
from tests.graph_training import WAYS, Model, Pair, Way, capturing, everything, loss_fn, plain_step, set_rates
from tests.harness import assert_same_bits


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


def test_reset(way: Way) -> None:
    pair = Pair(way)
    for batch in way.batches(3):
        pair.step(batch)
    pair.graph.reset()
    assert pair.graph.captured == 0
    for batch in way.batches(3):
        pair.step(batch)
    assert pair.graph.captured == way.captures


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
        ({"accumulate": 0}, "accumulate must be an int of at least 1, got 0"),
        ({"max_graphs": 0}, "max_graphs must be an int of at least 1, got 0"),
        ({"accumulate": 1.5}, "accumulate must be an int of at least 1, got 1.5"),
        ({"accumulate": True}, "accumulate must be an int of at least 1, got True"),
        ({"max_norm": 0.0}, "max_norm must be a number above 0"),
        ({"max_norm": float("nan")}, "max_norm must be a number above 0"),
        ({"max_norm": "1"}, "max_norm must be a number above 0, .* got '1'"),
        ({"autocast": "bf16"}, r"autocast is 'bf16'; expected torch\.bfloat16"),
        ({"autocast": torch.int8}, r"autocast is torch\.int8; expected torch\.bfloat16"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=message):
        TrainGraph(model, loss_fn, torch.optim.Adam(model.parameters()), **settings)


def test_arguments_of_other_types() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(TypeError, match=r"optimizer is a function; expected a torch\.optim\.Optimizer"):
        TrainGraph(model, optimizer, loss_fn)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer is LBFGS, whose step calls the model as often"):
        TrainGraph(model, loss_fn, torch.optim.LBFGS(model.parameters()))


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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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
