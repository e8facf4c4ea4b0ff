"""Requests that come and go in a pool of states, or move between pools, against each request's run alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sdm_compile import SDMState, SparseDeltaMemory, sdm_decode_step, sdm_write_read_
from sdm_compile import layer as layer_module
from sdm_compile.graphs import StatePool
from tests.harness import assert_close, assert_same_bits
from tests.pool_models import BANKS, CAPACITY, DEVICES, DIM, HEADS, SLOTS, make_layer, make_model, part, with_banks

Call = Callable[[Any, Any], Any]  # inputs [B, T, ...] and a state, which it advances, to outputs [B, T, ...]


@dataclass
class Request:
    """A sequence that is prefilled in one call and then decoded.

    Args:
        arrival: when.
        prompt: number of tokens that are prefilled.
        tokens: its inputs, a pytree of [length, ...].
        parent: the request of which it is a fork: it shares the `arrival` first tokens, and begins when the parent has
            done those.
    """

    arrival: int
    prompt: int
    tokens: Any
    parent: str | None = None

    @property
    def length(self) -> int:
        return pytree.tree_leaves(self.tokens)[0].shape[0]


def requests(draw: Callable[[int], Any]) -> dict[str, Request]:
    """The same arrivals for every kind of inputs; `draw(length)` makes some."""

    def after(prefix: Any, start: int, length: int) -> Any:
        return pytree.tree_map(lambda a, b: torch.cat([a[:start], b]), prefix, draw(length))

    long = draw(13)
    return {
        "long": Request(0, 5, long),
        "short": Request(1, 3, draw(6)),
        "no prompt": Request(2, 1, draw(11)),
        "fork": Request(8, 5, after(long, 8, 6), "long"),
        "in an entry that was used": Request(5, 9, draw(15)),
        "late": Request(12, 2, draw(5)),
    }


def piece(tokens: Any, start: int, stop: int) -> Any:
    return pytree.tree_map(lambda x: x[start:stop], tokens)


def stacked(rows: Sequence[Any]) -> Any:
    """A batch of the inputs of each row; None: padding, whose floats are NaN."""
    like = next(row for row in rows if row is not None)
    padding = pytree.tree_map(lambda x: torch.full_like(x, float("nan") if x.is_floating_point() else 0), like)
    return pytree.tree_map(lambda *xs: torch.stack(xs), *(padding if row is None else row for row in rows))


def serve(call: Call, pool: StatePool[Any], waiting: dict[str, Request], batch: int = 5) -> dict[str, Any]:
    """Each request's outputs [length, ...] and the state that it leaves."""
    waiting, live, done, outs, left, used = dict(waiting), {}, {}, {}, {}, []

    def begins(request: Request, now: int) -> bool:
        return request.arrival == (now if request.parent is None else done.get(request.parent))

    def take(name: str, out: Any, stop: int) -> None:
        outs.setdefault(name, []).append(out)
        done[name] = stop

    now, everyone = 0, dict(waiting)
    while waiting or live:
        for name in [name for name, request in waiting.items() if begins(request, now)]:
            request = waiting.pop(name)
            if request.parent is not None:
                live[name] = pool.fork(live[request.parent])
                outs[name], done[name] = list(outs[request.parent]), request.arrival
                continue
            live[name] = pool.acquire()
            out = call(stacked([piece(request.tokens, 0, request.prompt)]), pool.at([live[name]]))
            take(name, pytree.tree_map(lambda x: x[0], out), request.prompt)
        used += live.values()

        names: list[str | None] = [None] * batch
        for name, entry in live.items():
            names[(entry + now) % batch] = name  # another row in every step
        rows = [None if n is None else piece(everyone[n].tokens, done[n], done[n] + 1) for n in names]
        out = call(stacked(rows), pool.at([-1 if n is None else live[n] for n in names]))
        for b, name in enumerate(names):
            if name is not None:
                take(name, pytree.tree_map(lambda x, b=b: x[b], out), done[name] + 1)
                if done[name] == everyone[name].length:
                    entry = live.pop(name)
                    left[name] = part(pool.state, entry)
                    pool.release(entry)
        now += 1
    assert set(used) == set(range(CAPACITY)), "every entry was in use, fewer than there were requests"
    return {name: (pytree.tree_map(lambda *xs: torch.cat(xs), *outs[name]), left[name]) for name in everyone}


def alone(call: Call, state: Any, request: Request) -> Any:
    """The same of one request, on a state of its own without entries."""
    cuts = [0, *range(request.prompt, request.length + 1)]
    outs = [call(stacked([piece(request.tokens, start, stop)]), state) for start, stop in pairwise(cuts)]
    return pytree.tree_map(lambda *xs: torch.cat(xs, 1)[0], *outs), part(state, 0, 1)


def op_inputs(length: int, device: str) -> tuple[Tensor, ...]:
    """k_idx, k_val, v, beta, g, q_idx, q_val as [length, H, *], the slots counted from the head's first row."""
    slots = torch.rand(length, HEADS, SLOTS).argsort(-1)
    k_val, q_val = torch.rand(length, HEADS, 3).softmax(-1), torch.rand(length, HEADS, 4).softmax(-1)
    v, beta, g = torch.randn(length, HEADS, DIM), torch.rand(length, HEADS, 1), -torch.rand(length, HEADS, 1)
    return tuple(x.to(device) for x in (slots[..., :3], k_val, v, beta, g, slots[..., 2:6], q_val))


def call_ops(inputs: tuple[Tensor, ...], state: SDMState) -> Tensor:
    """The ops on slot ids that are moved to the entries' rows."""
    batch, tokens, heads = inputs[0].shape[:3]
    entries = torch.arange(batch) if state.entries is None else state.entries.cpu()
    first_row = ((entries[:, None] * heads + torch.arange(heads)) * SLOTS).to(state.bank.device)[:, None, :, None]
    ids = [torch.where(first_row < 0, -1, x + first_row) for x in (inputs[0], inputs[5])]
    moved = (ids[0], *inputs[1:5], ids[1], inputs[6])
    streams = [x.transpose(1, 2).flatten(0, 1) for x in moved]  # [B * H, T, *]
    if tokens == 1:
        readings = sdm_decode_step(state.bank, *streams)
    else:
        readings = sdm_write_read_(state.bank, *streams, chunk_size=4)
    return readings.unflatten(0, (batch, heads)).transpose(1, 2)


def call_module(module: torch.nn.Module) -> Call:
    """The module's outputs, and the slots that its layers chose, counted from each head's first row."""

    def call(inputs: Tensor, state: Any) -> tuple[Tensor, list[Tensor]]:
        chosen = []

        def spy(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(memory: Tensor, *streams: Tensor, **settings: Any) -> Tensor:
                chosen.extend([streams[0], streams[5]])
                return op(memory, *streams, **settings)

            return run

        ops = {name: spy(getattr(layer_module, name)) for name in ("sdm_decode_step", "sdm_write_read_")}
        with mock.patch.multiple(layer_module, **ops):
            y, after = module(inputs, state)
        assert after is state
        batch = inputs.shape[0]
        return y, [(ids % SLOTS).unflatten(0, (batch, HEADS)).transpose(1, 2) for ids in chosen]

    return call


def emptied(state: Any) -> Any:
    """The same with NaN everywhere, which no request may see."""
    return pytree.tree_map(lambda x: torch.full_like(x, float("nan")), state)


@pytest.mark.parametrize("dtype", BANKS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_ops_serve_each_request_as_if_it_were_alone(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    initial = SDMState(torch.randn(HEADS * SLOTS, DIM).to(device, dtype))
    pool = StatePool(emptied(SDMState(initial.bank.repeat(CAPACITY, 1))), initial)
    all_requests = requests(lambda length: op_inputs(length, device))
    results = serve(call_ops, pool, all_requests)
    for name, request in all_requests.items():
        assert_same_bits(results[name], alone(call_ops, initial.clone(), request))


@pytest.mark.parametrize("dtype", BANKS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["layer", "model"])
@torch.no_grad()
def test_modules_serve_each_request_as_if_it_were_alone(kind: str, device: str, dtype: torch.dtype) -> None:
    """To rounding, as library matmuls depend on the size of the batch; the chosen slots agree exactly."""
    if kind == "layer":
        module = make_layer(device)
        initial, state = (module.init_state(batch, dtype) for batch in (1, CAPACITY))
    else:
        module = make_model(device)
        initial, state = (with_banks(module.init_state(batch), dtype) for batch in (1, CAPACITY))

    def draw(length: int) -> Tensor:
        x = torch.randn(length, 12) if kind == "layer" else torch.randint(256, (length,))
        return x.to(device)

    torch.manual_seed(1)
    all_requests = requests(draw)
    results = serve(call_module(module), StatePool(emptied(state), initial), all_requests)
    for name, request in all_requests.items():
        expected = alone(call_module(module), pytree.tree_map(torch.clone, initial), request)
        assert_close(results[name], expected, dtype)


def bits_of(state: Any) -> list[Tensor]:
    return [leaf.detach().cpu() for leaf in pytree.tree_leaves(state)]


@pytest.mark.parametrize("dtype", BANKS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["layer", "model"])
@torch.no_grad()
def test_a_request_moves_between_pools_and_files(kind: str, device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """From one pool to a file, to a state of its own on the CPU, to another pool: the bits are those of staying."""
    module: torch.nn.Module = make_layer(device) if kind == "layer" else make_model(device)
    if isinstance(module, SparseDeltaMemory):
        initial, state = (module.init_state(batch, dtype) for batch in (1, CAPACITY))
    else:
        initial, state = (with_banks(module.init_state(batch), dtype) for batch in (1, CAPACITY))
    pools = [StatePool(pytree.tree_map(torch.clone, state), initial) for _ in range(2)]
    stays = initial.clone()

    def advance(*states: Any) -> None:
        x = torch.randn(1, 3, 12) if kind == "layer" else torch.randint(256, (1, 3))
        outputs = [module(x.to(device), state)[0] for state in states]
        assert_same_bits(outputs[1:], outputs[:1] * (len(outputs) - 1))

    other, entry = pools[0].acquire(), pools[0].acquire()
    advance(pools[0].at([other]))
    advance(stays, pools[0].at([entry]))
    kept = pools[0].get(entry)
    pools[0].release(entry)
    assert_same_bits(bits_of(kept), bits_of(stays))
    pools[0].reset(other)
    assert_same_bits(bits_of(kept), bits_of(stays))
    advance(stays, kept)
    torch.save(kept.to("cpu"), tmp_path / "request")
    loaded = torch.load(tmp_path / "request", weights_only=True)
    assert type(loaded) is type(state) and pytree.tree_leaves(loaded)[0].device.type == "cpu"
    pools[1].acquire()
    entry = pools[1].put(loaded)
    advance(stays, pools[1].at([entry]))
    assert_same_bits(bits_of(pools[1].get(entry)), bits_of(stays))
    assert_same_bits(part(pools[1].state, 0), part(initial, 0, 1))


# One captured step


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BANKS, ids=str)
@pytest.mark.parametrize("kind", ["layer", "model"])
@torch.no_grad()
def test_one_captured_step_serves_every_entry(kind: str, dtype: torch.dtype) -> None:
    """Entries and inputs change between replays, entries are reset, copied and forked: the bits are those of eager."""
    device = "cuda"
    module: torch.nn.Module = make_layer(device) if kind == "layer" else make_model(device)
    if isinstance(module, SparseDeltaMemory):
        initial, state = (module.init_state(batch, dtype) for batch in (1, CAPACITY))
    else:
        initial, state = (with_banks(module.init_state(batch), dtype) for batch in (1, CAPACITY))
    pool, other = StatePool(state, initial), StatePool(pytree.tree_map(torch.clone, state), initial)

    def draw(tokens: int) -> Tensor:
        x = torch.randn(3, tokens, 12) if kind == "layer" else torch.randint(256, (3, tokens))
        return x.to(device)

    def both(act: Callable[[StatePool[Any]], Any]) -> None:
        assert act(pool) == act(other)
        assert_same_bits(pytree.tree_leaves(pool.state), pytree.tree_leaves(other.state))

    entries, inputs = torch.full((3,), -1, device=device), draw(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            module(inputs, pool.at(entries))  # padding alone
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs, _ = module(inputs, pool.at(entries))
    assert_same_bits(pytree.tree_leaves(pool.state), pytree.tree_leaves(other.state))

    def steps(rows: list[int], count: int) -> None:
        entries.copy_(torch.tensor(rows))
        for _ in range(count):
            inputs.copy_(draw(1))
            graph.replay()
            expected, _ = module(inputs, other.at(rows))
            assert_same_bits(outputs, expected)
            assert_same_bits(pytree.tree_leaves(pool.state), pytree.tree_leaves(other.state))

    both(lambda pool: (pool.acquire(), pool.acquire()))
    prompt = draw(6)[:1]
    for p in (pool, other):
        module(prompt, p.at([1]))
    steps([0, -1, 1], 3)
    both(lambda pool: pool.fork(1))
    steps([2, 1, 0], 3)
    both(lambda pool: pool.copy(0, 2))
    both(lambda pool: pool.release(0))
    steps([-1, -1, 2], 2)
    both(lambda pool: pool.put(pool.get(1)))
    steps([1, 0, 2], 3)
    both(lambda pool: pool.reset(1, 2))
    steps([2, 0, 1], 2)
    steps([-1, -1, -1], 2)


@pytest.mark.gpu
@torch.no_grad()
def test_copies_do_not_wait_for_the_device() -> None:
    module = make_model("cuda")
    pool = StatePool(module.init_state(CAPACITY), module.init_state(1))
    entries = torch.tensor([0, -1], device="cuda")
    tokens = [torch.randint(256, (2, n), device="cuda") for n in (1, 6)]
    for x in tokens * 3:
        module(x, pool.at(entries))  # compiles kernels and captures the loop over chunks
    torch.cuda.set_sync_debug_mode("error")
    try:
        entry = pool.acquire()
        other = pool.fork(entry)
        pool.copy(other, entry)
        pool.reset(entry, other)
        pool.release(other)
        other = pool.put(pool.get(entry))
        pool.release(entry)
        for x in tokens:
            module(x, pool.at(entries))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 6])
@torch.no_grad()
def test_an_entry_beyond_the_pool_is_padding_on_cuda(tokens: int) -> None:
    module = make_model("cuda")
    pool, other = (StatePool(module.init_state(CAPACITY), module.init_state(1)) for _ in range(2))
    x = torch.randint(256, (5, tokens), device="cuda")
    beyond = torch.tensor([2, CAPACITY, 2**31, 2**62, 2**63 - 1], device="cuda")
    logits, _ = module(x, pool.at(beyond))
    expected, _ = module(x, other.at(beyond.where(beyond < CAPACITY, -1)))
    assert_same_bits(logits, expected)
    assert_same_bits(pytree.tree_leaves(pool.state), pytree.tree_leaves(other.state))
