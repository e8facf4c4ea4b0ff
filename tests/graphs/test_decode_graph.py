"""DecodeGraph against the plain step, on the CPU, where it runs the step, and on a GPU, where it replays it.

Every test changes the inputs from call to call: a replay that used those of the capture would show.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sdm_compile import SDMState, SparseDeltaMemory, SparseDeltaMemoryConfig
from sdm_compile.graphs import CaptureError, DecodeGraph
from sdm_compile.graphs import decode as decode_module
from sdm_compile.graphs.reach import Reached
from sdm_compile.lm import LanguageModel, LMConfig, LMState
from tests.harness import assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = LMConfig(
    dim=16, num_layers=2, hidden_dim=24, conv_width=3, num_heads=2, slots_per_head=16, num_writes=3, num_reads=4
)


class Sums:
    """A pool of running sums [capacity, n]; no pytree, and nothing of this package."""

    def __init__(self, total: Tensor, entries: Tensor | None = None) -> None:
        self.total, self.entries = total, entries

    def at(self, entries: Tensor | None) -> Sums:
        return Sums(self.total, entries)


def add(x: Tensor, state: Sums) -> dict[str, Any]:
    """Adds x [B, n] to the entries' sums, by a matmul that is exact for small integers."""
    entries = state.entries
    chosen = (entries == torch.arange(len(state.total), device=x.device)[:, None]).to(x.dtype)  # [capacity, B]
    state.total.add_(chosen @ x)
    return {"sums": chosen.T @ state.total, "rows": x.sum(0), "state": state, "total": state.total, "name": "sums"}


def integers(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randint(-4, 5, shape, device=device).float()


def make_sums(device: str, capacity: int = 4) -> Sums:
    return Sums(integers(capacity, 3, device=device))


def make_model(device: str = "cpu") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(CONFIG).to(device).eval()


def random_tokens(batch: int, device: str) -> Tensor:
    return torch.randint(256, (batch, 1), device=device)


def tensors_of(state: Any) -> list[Tensor]:
    return [x.clone() for x in pytree.tree_leaves(state)]


# Values


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_many_steps_of_a_model(pooled: bool, device: str) -> None:
    """Bit by bit what the model gives without a graph, and so is the state."""
    model = make_model(device)
    state, plain = model.init_state(2), model.init_state(2)
    with torch.no_grad():
        prompt = torch.randint(256, (2, 9), device=device)
        model(prompt, state), model(prompt, plain)
    before = tensors_of(state)
    step = DecodeGraph(model, state, random_tokens(2, device), pooled=pooled)
    assert_same_bits(tensors_of(state), before)
    for _ in range(500 if device == "cuda" else 100):
        tokens = random_tokens(2, device)
        with torch.no_grad():
            expected, _ = model(tokens, plain)
        logits, returned = step(tokens)
        assert torch.equal(logits, expected)
        assert returned is state
    assert_same_bits(tensors_of(state), tensors_of(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_a_layer(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = SparseDeltaMemoryConfig(dim=32, num_heads=2, slots_per_head=16, num_writes=3, num_reads=4)
    layer = SparseDeltaMemory(config).to(device, dtype)
    state, plain = layer.init_state(3), layer.init_state(3)
    step = DecodeGraph(layer, state, torch.randn(3, 1, 32, device=device, dtype=dtype))
    for _ in range(5):
        x = torch.randn(3, 1, 32, device=device, dtype=dtype)
        with torch.no_grad():
            expected, _ = layer(x, plain)
        y, returned = step(x)
        assert torch.equal(y, expected) and returned is state
    assert torch.equal(state.bank, plain.bank)


@pytest.mark.parametrize("device", DEVICES)
def test_construction_changes_nothing(device: str) -> None:
    model = make_model(device)
    state, position = model.init_state(2), torch.tensor([3, 4], device=device)
    noise, count = torch.randn(2, device=device), torch.zeros((), device=device)
    for tail in state.tails:
        tail.normal_()

    def call(tokens: Tensor, state: tuple[LMState, Tensor]) -> Any:
        count.add_(1)
        state[1].add_(1)
        noise.copy_(torch.rand(2, device=device))
        return model(tokens, state[0])

    before = tensors_of([state, position, noise, count, list(model.parameters())])
    tokens = random_tokens(2, device)
    torch.manual_seed(5)
    expected = [torch.rand(3), torch.rand(3, device=device)]
    torch.manual_seed(5)
    step = DecodeGraph(call, (state, position), tokens, mutates=[noise, count])
    assert_same_bits([torch.rand(3), torch.rand(3, device=device)], expected)
    assert_same_bits(tensors_of([state, position, noise, count, list(model.parameters())]), before)
    step(tokens)
    assert count.item() == 1 and position.tolist() == [4, 5]
    assert not torch.equal(noise, before[5])


@pytest.mark.parametrize("device", DEVICES)
def test_padding_and_entries(device: str) -> None:
    state = make_sums(device, capacity=5)
    total = state.total.clone()
    step = DecodeGraph(add, state, integers(4, 3, device=device), batch_sizes=(4, 2))
    assert step.batch_sizes == (2, 4)
    chosen: list[list[int] | None] = [
        [3, 0, 4], None, [1], [2, 3, 1, 0], [4, -1, 2], [0, 4], None, [-1, -7, 3], [3, -1], [4, 3, 2, 1], None,
    ]  # fmt: skip
    for i, entries in enumerate(chosen):
        rows = i % 4 + 1 if entries is None else len(entries)
        x = integers(rows, 3, device=device)
        out = step(x, entries=None if entries is None else torch.tensor(entries, device=device))
        sums = []
        for row, entry in zip(x, range(rows) if entries is None else entries, strict=True):
            if entry >= 0:
                total[entry] += row
        for entry in range(rows) if entries is None else entries:
            sums.append(total[entry] if entry >= 0 else torch.zeros_like(total[0]))
        assert torch.equal(out["sums"], torch.stack(sums))
        assert torch.equal(out["rows"], x.sum(0))  # what pads the inputs is zero, whatever was there before
        assert torch.equal(state.total, total)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_with_padding_and_entries(device: str) -> None:
    """Rows of a padded batch equal rows of the same batch size without a graph, and other entries stay."""
    model = make_model(device)
    state, plain = model.init_state(5), model.init_state(5)
    step = DecodeGraph(model, state, random_tokens(4, device))
    with torch.no_grad():
        for entries in ([3, 0, 4], [1], [4, 3, 2, 1], [0, -1, 4]):
            tokens = random_tokens(len(entries), device)
            padding = 4 - len(entries)
            padded = torch.cat([tokens, tokens.new_zeros(padding, 1)])
            expected, _ = model(padded, plain.at(torch.tensor(entries + [-1] * padding, device=device)))
            logits, returned = step(tokens, entries=torch.tensor(entries, device=device))
            assert torch.equal(logits, expected[: len(entries)]) and returned is state
            assert_same_bits(tensors_of(state), tensors_of(plain))


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_has_nothing_to_do_with_sdm(device: str) -> None:
    """Plain tensors as the state, and a module's buffers."""
    norm = nn.BatchNorm1d(3).to(device).train()
    other = copy.deepcopy(norm)
    state, plain = {"h": torch.zeros(2, 3, device=device)}, {"h": torch.zeros(2, 3, device=device)}

    def call(module: nn.Module, x: Tensor, scale: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["h"].mul_(0.5).add_(module(x) * scale)
        return state["h"] + 1

    def with_norm(x: Tensor, scale: Tensor, state: dict[str, Tensor]) -> Tensor:
        return call(norm, x, scale, state)

    example = (torch.randn(2, 3, device=device), torch.randn(2, 1, device=device))
    step = DecodeGraph(with_norm, state, *example, mutates=norm.buffers())
    for _ in range(4):
        x, scale = torch.randn(2, 3, device=device), torch.randn(2, 1, device=device)
        with torch.no_grad():
            expected = call(other, x, scale, plain)
        assert torch.equal(step(x, scale), expected)
        assert torch.equal(state["h"], plain["h"])
        assert_same_bits(list(norm.buffers()), list(other.buffers()))
    with pytest.raises(ValueError, match=r"a batch of 1, for which there is no graph .*cannot be padded"):
        step(example[0][:1], example[1][:1])


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_state(device: str) -> None:
    step = DecodeGraph(lambda x, state: (x * 2, state), None, torch.zeros(3, 1, device=device), batch_sizes=(1, 3))
    for rows in (3, 1, 2, 3):
        x = torch.randn(rows, 1, device=device)
        doubled, state = step(x)
        assert torch.equal(doubled, x * 2) and state is None


@pytest.mark.parametrize("device", DEVICES)
def test_draws_on_the_device(device: str) -> None:
    """Replays go on in the generator's sequence, as the calls they stand for would."""
    state = {"x": torch.zeros(4, 3, device=device)}

    def draw(scale: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["x"].copy_(torch.rand_like(state["x"]) * scale)
        return state["x"] + torch.rand_like(state["x"])

    step = DecodeGraph(draw, state, torch.ones(4, 1, device=device))
    scales = [torch.full((4, 1), float(i), device=device) for i in range(1, 5)]
    torch.manual_seed(7)
    expected = [draw(scale, {"x": torch.zeros(4, 3, device=device)}) for scale in scales]
    torch.manual_seed(7)
    drawn = [step(scale).clone() for scale in scales]
    assert_same_bits(drawn, expected)
    assert len({x[0, 0].item() for x in drawn}) == 4


# What comes back


@pytest.mark.parametrize("device", DEVICES)
def test_what_comes_back(device: str) -> None:
    state = make_sums(device, capacity=4)
    step = DecodeGraph(add, state, integers(4, 3, device=device), batch_sizes=(2, 4))
    for rows in (4, 3, 2, 1):
        out = step(integers(rows, 3, device=device))
        assert out["sums"].shape == (rows, 3) and out["rows"].shape == (3,) and out["name"] == "sums"
        assert out["state"] is state and out["total"] is state.total  # whole, though it has as many rows as a batch
        out.clear()  # is the caller's own
    assert state.entries is None


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_the_state_come_back_as_the_callers_own(device: str) -> None:
    model = make_model(device)
    state = {"lm": model.init_state(2), "name": "a"}

    def call(tokens: Tensor, state: dict[str, Any]) -> Any:
        logits, lm = model(tokens, state["lm"])
        return [logits, state, lm, lm.memories, lm.memories[1], lm.tails[0], tokens]

    step = DecodeGraph(call, state, random_tokens(2, device))
    for rows in (2, 1):
        tokens = random_tokens(rows, device)
        _, own, lm, memories, memory, tail, given = step(tokens)
        assert own is state and lm is state["lm"] and lm.entries is None
        assert memories is lm.memories and memory is lm.memories[1] and tail is lm.tails[0]
        assert torch.equal(given, tokens)


# What it relies on


@pytest.fixture
def captures() -> Iterator[list[Any]]:
    """One element for each capture, or on the CPU, for each time that a step was made ready."""
    made: list[Any] = []
    make = decode_module._Step

    def counted(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    with mock.patch.object(decode_module, "_Step", counted):
        yield made


@pytest.mark.parametrize("device", DEVICES)
def test_a_moved_state_is_followed(device: str, captures: list[Any]) -> None:
    model = make_model(device)
    state, plain = model.init_state(2), model.init_state(2)
    step = DecodeGraph(model, state, random_tokens(2, device))

    def advance() -> None:
        tokens = random_tokens(2, device)
        with torch.no_grad():
            expected, _ = model(tokens, plain)
        assert torch.equal(step(tokens)[0], expected)
        assert_same_bits(tensors_of(state), tensors_of(plain))

    advance()
    assert len(captures) == 1
    kept = state.memories[1].bank
    state.memories[1].bank = kept.clone()
    before = kept.clone()
    advance()
    assert torch.equal(kept, before) and len(captures) == 2
    state.memories[0] = SDMState(state.memories[0].bank.clone())
    advance()
    state.tails[0] = state.tails[0].clone()
    advance()
    state.tails[1].data = state.tails[1].clone()
    advance()
    advance()
    assert len(captures) == 5


@pytest.mark.parametrize("device", DEVICES)
def test_another_form_of_the_state_is_refused(device: str) -> None:
    model = make_model(device)
    state = model.init_state(2)
    step = DecodeGraph(model, state, random_tokens(2, device))
    kept = state.memories[1]
    state.memories[1] = kept.to(torch.bfloat16)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"state\.memories\[1\]\.bank \[64, 8\] torch.float32 on .* became .*bfloat"
        ):
            step(random_tokens(2, device))
    state.memories[1] = model.init_state(3).memories[1]
    with pytest.raises(ValueError, match=r"became state\.memories\[1\]\.bank \[96, 8\].*: make a new DecodeGraph"):
        step(random_tokens(2, device))
    state.memories[1] = kept
    before = tensors_of(state)
    step(random_tokens(2, device))
    assert not torch.equal(tensors_of(state)[0], before[0])


def replace_parameter(model: LanguageModel) -> None:
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))


def move_parameter(model: LanguageModel) -> None:
    model.blocks[0].mlp.up.weight.data = torch.randn_like(model.blocks[0].mlp.up.weight)


def replace_module(model: LanguageModel) -> None:
    model.blocks[1].mlp_norm = nn.LayerNorm(16).to(model.head.weight.device)


def assign(model: LanguageModel) -> None:
    model.load_state_dict({name: x * 2 for name, x in model.state_dict().items()}, assign=True)


def write_parameter(model: LanguageModel) -> None:
    with torch.no_grad():
        model.head.weight.mul_(-1)


@pytest.mark.parametrize("change", [replace_parameter, move_parameter, replace_module, assign, write_parameter])
@pytest.mark.parametrize("device", DEVICES)
def test_a_changed_model_is_followed(device: str, change: Callable[[LanguageModel], None], captures: list[Any]) -> None:
    model = make_model(device)
    other = copy.deepcopy(model)
    state, plain = model.init_state(1), model.init_state(1)
    step = DecodeGraph(lambda tokens, state: model(tokens, state)[0], state, random_tokens(1, device))
    step(tokens := random_tokens(1, device))
    torch.manual_seed(1)
    change(model)
    torch.manual_seed(1)
    change(other)
    with torch.no_grad():
        model(tokens, plain)
        for tail, kept in zip(pytree.tree_leaves(plain), pytree.tree_leaves(state), strict=True):
            tail.copy_(kept)
    for _ in range(2):
        tokens = random_tokens(1, device)
        with torch.no_grad():
            expected, _ = other(tokens, plain)
        assert torch.equal(step(tokens), expected)
    assert len(captures) == (1 if device == "cpu" or change is write_parameter else 2)


@pytest.mark.parametrize("device", DEVICES)
def test_training_mode_is_followed(device: str) -> None:
    drop = nn.Dropout(0.5).to(device).train()
    step = DecodeGraph(lambda x, state: drop(x), None, torch.ones(64, 4, device=device))
    for training in (True, False, True):
        drop.train(training)
        y = step(torch.full((64, 4), 3.0, device=device))
        assert bool((y == 0).any()) == training and (y.max().item() == (6 if training else 3))


class Bound:
    """A step that is a method of something that holds a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor, state: None) -> Tensor:
        return self.module(x)

    def step(self, x: Tensor, state: None) -> Tensor:
        return self.module(x)


class Stateful(nn.Linear):
    def step(self, x: Tensor, state: None) -> Tensor:
        return self(x)


class Indirect(Bound):
    """Its method gets there by a property and another method."""

    @property
    def inner(self) -> nn.Module:
        return self.module

    def help(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def step(self, x: Tensor, state: None) -> Tensor:
        return self.help(x)


GLOBAL = Stateful(3, 3)
HOLDER = types.SimpleNamespace(module=GLOBAL, unused=nn.Linear(3, 3))


def global_helper(x: Tensor) -> Tensor:
    return global_module(x)


def global_module(x: Tensor) -> Tensor:
    return GLOBAL(x)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(function)


WAYS: dict[str, Callable[[Stateful], Callable[..., Any]]] = {
    "method": lambda module: module.step,
    "closure": lambda module: lambda x, state: module(x),
    "list": lambda module: (lambda modules: lambda x, state: modules[0](x))([module]),
    "default": lambda module: lambda x, state, module=module: module(x),
    "global": lambda module: lambda x, state: (lambda: GLOBAL(x))(),
    "global function": lambda module: lambda x, state: global_helper(x),
    "global object": lambda module: lambda x, state: HOLDER.module(x),
    "object in a closure": lambda module: (lambda holder: lambda x, state: holder.module(x))(Bound(module)),
    "callable in a closure": lambda module: (lambda holder: lambda x, state: holder(x, state))(Bound(module)),
    "nested objects": lambda module: (lambda outer: lambda x, state: outer.holders[0]["a"].module(x))(
        types.SimpleNamespace(holders=[{"a": Bound(module)}], unused=nn.Linear(3, 3))
    ),
    "other methods": lambda module: Indirect(module).step,
    "partial": lambda module: functools.partial(lambda m, x, state: m(x), module),
    "object": lambda module: Bound(module),
    "object's method": lambda module: Bound(module).step,
    "decorated": lambda module: decorated(lambda x, state: module(x)),
    "nested": lambda module: lambda x, state: (lambda: module(x))(),
    "parameter": lambda module: (lambda w, b: lambda x, state: x @ w.T + b)(module.weight, module.bias),
}


@pytest.mark.parametrize("way", WAYS)
def test_modules_are_found(way: str) -> None:
    module = GLOBAL if way.startswith("global") else Stateful(3, 3)
    watched = Reached(WAYS[way](module))
    assert {id(x) for x in watched.tensors} == {id(x) for x in module.parameters()}
    module.weight.data = module.weight.data.clone()
    assert not watched.unchanged()


class Places:
    """Each a step, and what puts another module in the place of the one that it finds."""

    @staticmethod
    def closure(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        def rebind() -> None:
            nonlocal module
            module = other

        return lambda x, state: module(x), rebind

    @staticmethod
    def emptied_closure(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        def empty() -> None:
            nonlocal module
            del module

        return lambda x, state: module(x), empty

    @staticmethod
    def dict_in_a_closure(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        modules = {"a": module}
        return lambda x, state: modules["a"](x), lambda: modules.update(a=other)

    @staticmethod
    def attribute(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        holder = Bound(module)
        return holder.step, lambda: setattr(holder, "module", other)

    @staticmethod
    def attribute_of_an_object_in_a_closure(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        holder = Bound(module)
        return lambda x, state: holder.module(x), lambda: setattr(holder, "module", other)

    @staticmethod
    def object_in_an_object(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        outer = types.SimpleNamespace(holder=Bound(module))
        return lambda x, state: outer.holder.module(x), lambda: setattr(outer, "holder", Bound(other))

    @staticmethod
    def global_variable(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        return lambda x, state: GLOBAL(x), lambda: globals().update(GLOBAL=other)

    @staticmethod
    def global_variable_of_a_helper(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        return lambda x, state: global_helper(x), lambda: globals().update(GLOBAL=other)

    @staticmethod
    def global_function(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        return lambda x, state: global_helper(x), lambda: globals().update(global_module=lambda x: other(x))

    @staticmethod
    def method(module: nn.Module, other: nn.Module) -> tuple[Any, Any]:
        kind = type("Kind", (Bound,), {"run": lambda self, x: self.module(x)})
        holder = kind(module)
        return lambda x, state: holder.run(x), lambda: setattr(kind, "run", lambda self, x: other(x))


PLACES = [name for name, value in vars(Places).items() if isinstance(value, staticmethod)]


@pytest.fixture
def kept_globals() -> Iterator[None]:
    with mock.patch.dict(globals()):
        yield


@pytest.mark.usefixtures("kept_globals")
@pytest.mark.parametrize("place", PLACES)
def test_another_module_in_the_same_place_is_seen(place: str) -> None:
    fn, rebind = getattr(Places, place)(Stateful(3, 3), Stateful(3, 3))
    watched = Reached(fn)
    assert watched.unchanged()
    rebind()
    assert not watched.unchanged()


@pytest.mark.gpu
@pytest.mark.usefixtures("kept_globals")
@pytest.mark.parametrize("place", [place for place in PLACES if place != "emptied_closure"])
def test_another_module_in_the_same_place_is_used(place: str) -> None:
    GLOBAL.cuda()
    fn, rebind = getattr(Places, place)(Stateful(3, 3).cuda(), Stateful(3, 3).cuda())
    step = DecodeGraph(fn, None, torch.ones(2, 3, device="cuda"))
    for _ in range(2):
        x = torch.randn(2, 3, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(step(x), fn(x, None))
        rebind()


def test_what_no_code_names_may_change() -> None:
    """Results that an object keeps, of which its step knows nothing, mean no new capture."""
    holder = Bound(Stateful(3, 3))
    holder.latest = torch.zeros(3)  # type: ignore[attr-defined]
    watched = Reached(holder.step)
    holder.latest = torch.ones(3)  # type: ignore[attr-defined]
    holder.module(torch.ones(1, 3))
    assert watched.unchanged()


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_modules_that_are_found_are_followed(way: str) -> None:
    module = (GLOBAL if way.startswith("global") else Stateful(3, 3)).cuda()
    step = DecodeGraph(WAYS[way](module), None, torch.ones(2, 3, device="cuda"))
    for _ in range(2):
        module.weight.data = torch.randn(3, 3, device="cuda")
        x = torch.randn(2, 3, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(step(x), module(x))


@pytest.mark.gpu
def test_the_settings_are_followed(captures: list[Any]) -> None:
    weight = torch.randn(512, 512, device="cuda")
    step = DecodeGraph(
        lambda x, state: torch.nn.functional.linear(x, weight), None, torch.randn(64, 512, device="cuda")
    )

    def check() -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(64, 512, device="cuda")
        expected, y = torch.nn.functional.linear(x, weight), step(x)
        assert y.dtype == expected.dtype and torch.equal(y, expected)
        return y.float().clone()

    first = check()
    check()
    assert len(captures) == 1
    old = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert not torch.equal(check(), first) and len(captures) == 2
    finally:
        torch.set_float32_matmul_precision(old)
    assert torch.equal(check(), first) and len(captures) == 3
    with torch.autocast("cuda", torch.bfloat16):
        assert not torch.equal(check(), first) and len(captures) == 4
    check()
    assert len(captures) == 5


def test_autocast_on_the_cpu() -> None:
    weight = torch.randn(8, 8)
    step = DecodeGraph(lambda x, state: torch.nn.functional.linear(x, weight), None, torch.randn(2, 8))
    for enabled in (False, True, False):
        x = torch.randn(2, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert torch.equal(step(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("modes", [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.enable_grad)])
def test_any_grad_mode(device: str, modes: tuple[Any, Any]) -> None:
    model = make_model(device)
    state, plain = model.init_state(2), model.init_state(2)
    with modes[0]():
        step = DecodeGraph(model, state, random_tokens(2, device))
    for mode in (*modes, nullcontext):
        tokens = random_tokens(2, device)
        with torch.no_grad():
            expected, _ = model(tokens, plain)
        with mode():
            logits, _ = step(tokens)
            assert torch.equal(logits, expected) and not logits.requires_grad


class Replay:
    """What stands for a CUDA graph whose replay writes to a tensor, unseen by PyTorch."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def replay(self) -> None:
        self.target.numpy()[:] += 1


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_replay_counts_as_a_write(mode: Any) -> None:
    """To those who look at a tensor's version: autograd, of what it saved, and the commit of an older draft."""
    state, count, scale = {"h": torch.zeros(2)}, torch.zeros(2), torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        state["inference"] = torch.zeros(2)
        step = DecodeGraph(lambda x, state: x, state, torch.zeros(2), mutates=[count])
    step(torch.ones(2))
    step._steps[2].graph = Replay(state["h"])  # type: ignore[assignment]
    products = [scale * state["h"], scale * count]
    with mode():
        step(torch.ones(2))
    assert state["h"].tolist() == [1, 1]
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_draft_from_before_a_step_is_refused(device: str) -> None:
    model = make_model(device)
    state = model.init_state(2)
    step = DecodeGraph(model, state, random_tokens(2, device))
    _, pending = model.draft(torch.randint(256, (2, 3), device=device), state)
    step(random_tokens(2, device))
    before = tensors_of(state)
    with pytest.raises(RuntimeError, match="written to since the draft"):
        model.commit_(state, pending, torch.tensor([1, 2], device=device))
    assert_same_bits(tensors_of(state), before)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_draft_of_a_padded_batch_is_committed_whole(device: str) -> None:
    """What a pending holds is of the captured size: padding rows are committed nowhere."""
    model = make_model(device)
    state, plain = model.init_state(5), model.init_state(5)
    draft = DecodeGraph(model.draft, state, torch.randint(256, (4, 3), device=device), batch_sizes=(1, 4))
    for entries, accepted in (([4, 0, 2], [3, 0, 2]), ([1, 2], [1, 3])):
        tokens = torch.randint(256, (len(entries), 3), device=device)
        chosen = torch.tensor(entries, device=device)
        padding = 4 - len(entries)
        padded, counts = torch.cat([tokens, tokens.new_zeros(padding, 3)]), torch.tensor(accepted + [3] * padding)
        rows = torch.tensor(entries + [-1] * padding, device=device)
        logits, pending = draft(tokens, entries=chosen)
        expected, other = model.draft(padded, plain.at(rows))
        assert torch.equal(logits, expected[: len(entries)])
        model.commit_(state, pending, counts.to(device))
        model.commit_(plain, other, counts.to(device))
        assert_same_bits(tensors_of(state), tensors_of(plain))


# Errors


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_calls(device: str) -> None:
    state = make_sums(device)
    step = DecodeGraph(add, state, integers(2, 3, device=device), batch_sizes=(1, 2))
    before, x = state.total.clone(), integers(2, 3, device=device)
    ids = torch.tensor([0, 1], device=device)
    for error, message, inputs, entries in [
        (ValueError, "got 2 inputs; expected 1", (x, x), None),
        (TypeError, "input 0 is a list; expected a tensor", ([1.0],), None),
        (ValueError, r"input 0 has shape \[2, 4\], torch.float32, .*; expected \[2, 3\]", (x.new_zeros(2, 4),), None),
        (ValueError, r"input 0 has shape \[2, 3\], torch.float64, .*; expected .* torch.float32", (x.double(),), None),
        (ValueError, r"on meta; expected \[2, 3\], torch.float32, on ", (x.to("meta"),), None),
        (ValueError, r"input 0 has shape \[\]", (x.sum(),), None),
        (ValueError, "a batch of 3, for which there is no graph .captured sizes: 1, 2.", (x.new_zeros(3, 3),), None),
        (ValueError, "a batch of 0, for which there is no graph", (x[:0],), None),
        (ValueError, r"entries have shape \[1\], torch.int64, .*; expected \[2\]", (x,), ids[:1]),
        (ValueError, "entries have shape .* torch.int32, on .*; expected .* torch.int64", (x,), ids.int()),
        (ValueError, "entries have shape .*, on meta; expected", (x,), ids.to("meta")),
        (TypeError, "entries 0 is a list; expected a tensor", (x,), [0, 1]),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            step(*inputs, entries=entries)
        assert torch.equal(state.total, before)
    with pytest.raises(ValueError, match=r"entries were given, but nothing in the state has a method `at\(entries\)`"):
        DecodeGraph(lambda x, state: x, None, x)(x, entries=ids)
    with pytest.raises(ValueError, match=r"entries were given, but .*, or not pooled"):
        DecodeGraph(lambda x, state: state.total[:2] + x, state, x, pooled=False)(x, entries=ids)
    with pytest.raises(ValueError, match=r"input 1 has shape \[1, 3\].*; expected \[2, 3\]"):
        DecodeGraph(lambda x, y, state: x, None, x, x)(x, x[:1])
    assert torch.equal(step(x)["sums"], state.total[:2])


def test_wrong_constructions() -> None:
    x, state = torch.zeros(2, 3), {"h": torch.zeros(2, 3)}

    def unused(*args: Any) -> None:
        raise NotImplementedError

    for error, message, arguments, options in [
        (ValueError, "at least one input", (None,), {}),
        (TypeError, "example input 1 is a int", (None, x, 3), {}),
        (TypeError, "mutates 0 is a str", (None, x), {"mutates": ["weight"]}),
        (ValueError, r"example input 1 has shape \[3, 1\] .* it has shape \[2, 3\]", (None, x, torch.zeros(3, 1)), {}),
        (ValueError, r"example input 0 has shape \[\]", (None, torch.zeros(())), {}),
        (ValueError, r"example input 0 has shape \[0, 3\]", (None, x[:0]), {}),
        (ValueError, r"batch_sizes are \(\); expected at least one int", (None, x), {"batch_sizes": ()}),
        (ValueError, r"batch_sizes are \[0\]; expected", (None, x), {"batch_sizes": [0]}),
        (ValueError, r"batch_sizes are \(1, 2\); .*be padded: .* example, 2", (state, x), {"batch_sizes": (1, 2)}),
        (ValueError, "not pooled. and cannot be", (Sums(x), x), {"batch_sizes": (1, 2), "pooled": False}),
        (ValueError, r"is one of chosen entries.*state\.at\(None\)", (SDMState(x, torch.tensor([0, 1])), x), {}),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            DecodeGraph(unused, *arguments, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_failing_step_leaves_the_state(device: str) -> None:
    state, calls = {"h": torch.zeros(2, device=device)}, []

    def call(x: Tensor, state: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        state["h"].add_(x)
        if failing:
            raise KeyError("fn's own")
        return state["h"] * 2

    failing = True
    torch.manual_seed(2)
    with pytest.raises(KeyError, match="fn's own"):
        DecodeGraph(call, state, torch.ones(2, device=device))
    assert calls == [1] and state["h"].tolist() == [0, 0]
    failing = False
    step = DecodeGraph(call, state, torch.ones(2, device=device))
    assert step(torch.full((2,), 3.0, device=device)).tolist() == [6, 6]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_replaces_its_state_is_refused(device: str) -> None:
    """Replays would start from the same tensor each time."""
    kept = torch.zeros(2, device=device)
    state = {"h": kept}

    def call(x: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["h"] = state["h"] + x
        return state["h"]

    with pytest.raises(ValueError, match=r"fn put another tensor into the state; .* copy_\(\)"):
        DecodeGraph(call, state, torch.ones(2, device=device))
    assert state["h"] is kept and kept.tolist() == [0, 0]


@pytest.mark.gpu
def test_a_mutated_buffer_that_was_replaced() -> None:
    norm = nn.BatchNorm1d(3).cuda()
    step = DecodeGraph(lambda x, state: norm(x), None, torch.randn(4, 3, device="cuda"), mutates=norm.buffers())
    step(torch.randn(4, 3, device="cuda"))
    norm.running_mean = torch.zeros(3, device="cuda")
    with pytest.raises(ValueError, match=r"norm\.running_mean of the module was replaced, and is in `mutates`"):
        step(torch.randn(4, 3, device="cuda"))


@pytest.mark.gpu
def test_a_failed_capture_leaves_model_and_state() -> None:
    model = make_model("cuda")
    state, plain = model.init_state(2), model.init_state(2)
    before = tensors_of([state, list(model.parameters())])

    def waits(tokens: Tensor, state: LMState) -> Any:
        logits, state = model(tokens, state)
        if logits.sum().item() > 0:
            logits = -logits
        return logits, state

    tokens = random_tokens(2, "cuda")
    torch.cuda.manual_seed(3)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(3)
    with pytest.raises(CaptureError, match=r"cannot be captured into a CUDA graph: .*\.item\(\)") as raised:
        DecodeGraph(waits, state, tokens, batch_sizes=(1, 2))
    assert "capturing" in str(raised.value.__cause__)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert_same_bits(tensors_of([state, list(model.parameters())]), before)
    step = DecodeGraph(model, state, random_tokens(2, "cuda"))
    for _ in range(3):
        tokens = random_tokens(2, "cuda")
        with torch.no_grad():
            logits, _ = model(tokens, plain)
        assert torch.equal(step(tokens)[0], logits)


@pytest.mark.gpu
def test_a_capture_that_fails_later_can_be_tried_again() -> None:
    module, waiting = nn.Linear(3, 3).cuda(), False

    def call(x: Tensor, state: dict[str, Tensor]) -> Tensor:
        y = module(x)
        if waiting:
            y.sum().item()
        return state["h"].add_(y)

    state = {"h": torch.zeros(2, 3, device="cuda")}
    step = DecodeGraph(call, state, torch.zeros(2, 3, device="cuda"))
    module.weight.data = torch.ones(3, 3, device="cuda")
    module.bias.data.zero_()
    waiting = True
    for _ in range(2):
        with pytest.raises(CaptureError):
            step(torch.ones(2, 3, device="cuda"))
        assert state["h"].tolist() == [[0.0] * 3] * 2
    waiting = False
    assert step(torch.ones(2, 3, device="cuda")).tolist() == [[3.0] * 3] * 2


@pytest.mark.gpu
def test_refused_while_capturing() -> None:
    state, x = make_sums("cuda"), integers(2, 3, device="cuda")
    step = DecodeGraph(add, state, x)
    graph, total = torch.cuda.CUDAGraph(), state.total.clone()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(CaptureError, match="cannot be made or called while the current stream is being captured"):
            step(x)
        with pytest.raises(CaptureError, match="while the current stream is being captured"):
            DecodeGraph(add, state, x)
    graph.replay()
    assert torch.equal(y, x + 1) and torch.equal(state.total, total)
    step(x)
    total[:2] += x
    assert torch.equal(state.total, total)


# Streams, threads, memory


@pytest.mark.gpu
def test_two_runners_on_two_streams() -> None:
    models = [make_model("cuda"), make_model("cuda")]
    states, plain = ([model.init_state(2) for model in models] for _ in range(2))
    steps = [DecodeGraph(m, s, random_tokens(2, "cuda")) for m, s in zip(models, states, strict=True)]
    tokens = torch.randint(256, (2, 100, 2, 1), device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    logits: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()
    for i in range(100):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                logits[k].append(steps[k](tokens[k, i])[0].clone())
    torch.cuda.synchronize()
    with torch.no_grad():
        for k in range(2):
            expected = [models[k](tokens[k, i], plain[k])[0] for i in range(100)]
            assert_same_bits(logits[k], expected)
    assert_same_bits(tensors_of(states), tensors_of(plain))


@pytest.mark.gpu
def test_one_runner_on_several_streams() -> None:
    """A call waits on the device for the one before, whose buffers it writes to."""
    state = make_sums("cuda")
    total, streams = state.total.clone(), [torch.cuda.Stream() for _ in range(3)]

    def slow(x: Tensor, state: Sums) -> Tensor:
        torch.cuda._sleep(1_000_000)
        return add(x, state)["sums"]

    step = DecodeGraph(slow, state, integers(4, 3, device="cuda"), batch_sizes=(2, 4))
    inputs = [integers(i % 4 + 1, 3, device="cuda") for i in range(30)]
    torch.cuda.synchronize()
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            step(x)
    torch.cuda.synchronize()
    for x in inputs:
        total[: len(x)] += x
    assert torch.equal(state.total, total)


@pytest.mark.parametrize("device", DEVICES)
def test_threads(device: str) -> None:
    state = make_sums(device)
    total, inputs = state.total.clone(), [integers(i % 4 + 1, 3, device=device) for i in range(40)]
    step = DecodeGraph(add, state, integers(4, 3, device=device), batch_sizes=(2, 4))

    def work(k: int) -> None:
        for x in inputs[k::4]:
            step(x)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x in inputs:
        total[: len(x)] += x
    assert torch.equal(state.total, total)


@pytest.mark.parametrize("device", DEVICES)
def test_freed_when_dropped(device: str) -> None:
    """Without the garbage collector's help."""
    model = make_model(device)
    state = model.init_state(2)

    def call(tokens: Tensor, state: LMState) -> Any:
        return model(tokens, state)

    step = DecodeGraph(call, state, random_tokens(2, device), batch_sizes=(1, 2))
    out = step(random_tokens(1, device))
    dropped = [weakref.ref(x) for x in (step, call, *step._steps.values(), *step._steps[1].inputs)]
    gc.disable()
    try:
        del step, call, out
        assert [ref() for ref in dropped] == [None] * len(dropped)
    finally:
        gc.enable()


@pytest.mark.gpu
def test_1000_captures_and_drops_keep_no_memory() -> None:
    weight = torch.randn(64, 64, device="cuda")
    state = Sums(torch.zeros(4, 64, device="cuda"))

    def call(x: Tensor, state: Sums) -> Tensor:
        return add(x @ weight, state)["sums"] + torch.rand_like(x)

    def once() -> None:
        step = DecodeGraph(call, state, torch.ones(2, 64, device="cuda"), batch_sizes=(1, 2))
        step(torch.ones(1, 64, device="cuda"))

    for _ in range(3):
        once()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(500):  # of two sizes each
        once()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() <= reserved + 64 * 2**20
    assert torch.cuda.mem_get_info()[0] >= free - 256 * 2**20  # graphs themselves take memory as well


@pytest.mark.gpu
def test_the_check_before_a_replay_waits_for_nothing() -> None:
    model = make_model("cuda")
    state = model.init_state(2)
    step = DecodeGraph(model, state, random_tokens(2, "cuda"), batch_sizes=(1, 2))
    tokens, entries = random_tokens(2, "cuda"), torch.tensor([1, 0], device="cuda")
    before = tensors_of(state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(tokens)
            step(tokens, entries=entries)
            step(tokens[:1], entries=entries[:1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(tensors_of(state)[0], before[0])


@pytest.mark.gpu
def test_a_compiled_model() -> None:
    model = make_model("cuda")
    state, plain = model.init_state(1), model.init_state(1)
    step = DecodeGraph(torch.compile(model, fullgraph=True, dynamic=False), state, random_tokens(1, "cuda"))
    for _ in range(5):
        tokens = random_tokens(1, "cuda")
        with torch.no_grad():
            expected, _ = model(tokens, plain)
        torch.testing.assert_close(step(tokens)[0], expected, rtol=1e-3, atol=1e-3)
