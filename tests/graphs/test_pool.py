"""A pool of states: its books, its copies, and requests that come and go against each request's run alone."""

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
from sdm_compile.lm import LanguageModel, LMConfig, LMState
from tests.harness import assert_close, assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BANKS = [torch.float32, torch.bfloat16]
CAPACITY, HEADS, SLOTS, DIM = 4, 2, 16, 6  # of the banks here; H * D is a layer's dim
CONFIG = LMConfig(
    dim=12, num_layers=2, hidden_dim=20, conv_width=3,
    num_heads=HEADS, slots_per_head=SLOTS, num_writes=3, num_reads=5, chunk_size=4,
)  # fmt: skip

Call = Callable[[Any, Any], Any]  # inputs [B, T, ...] and a state, which it advances, to outputs [B, T, ...]


def part(state: Any, entry: int, capacity: int = CAPACITY) -> list[Tensor]:
    """A copy of what an entry holds."""
    return [leaf.unflatten(0, (capacity, -1))[entry].clone() for leaf in pytree.tree_leaves(state)]


def make_layer(device: str) -> SparseDeltaMemory:
    torch.manual_seed(0)
    return SparseDeltaMemory(CONFIG.sdm()).to(device).eval()


def make_model(device: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(CONFIG).to(device).eval()


def with_banks(state: LMState, dtype: torch.dtype) -> LMState:
    return LMState([memory.to(dtype) for memory in state.memories], state.tails)


def numbered_pool(capacity: int = 5) -> StatePool[dict[str, Any]]:
    """Entry e holds e + 1 in every element, and starts from zeros; some of the tensors have several rows per entry."""
    numbers = torch.arange(1.0, capacity + 1)
    state = {
        "a": SDMState(numbers.repeat_interleave(6)[:, None].repeat(1, 3)),
        "position": numbers.long(),
    }
    return StatePool(state, {"a": SDMState(torch.zeros(6, 3)), "position": torch.zeros(1, dtype=torch.int64)})


def numbers(pool: StatePool[dict[str, Any]]) -> list[int]:
    """What each entry holds, of which all elements must be the same."""
    rows = pool.state["a"].bank.view(pool.capacity, -1)
    assert (rows == rows[:, :1]).all()
    assert torch.equal(rows[:, 0].long(), pool.state["position"])
    return pool.state["position"].tolist()


# The books and the copies


def test_entries_are_handed_out_and_taken_back() -> None:
    pool = numbered_pool()
    addresses = [leaf.data_ptr() for leaf in pytree.tree_leaves(pool.state)]
    assert pool.capacity == 5 and pool.held == ()
    assert [pool.acquire() for _ in range(3)] == [0, 1, 2]
    assert numbers(pool) == [0, 0, 0, 4, 5]  # an acquired entry starts from the initial rows
    pool.release(1)
    assert pool.held == (0, 2)
    assert pool.acquire() == 1 and pool.acquire() == 3 and pool.acquire() == 4
    with pytest.raises(RuntimeError, match="all 5 entries are in use"):
        pool.acquire()
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves(pool.state)] == addresses


def fill(pool: StatePool[dict[str, Any]], **values: int) -> None:
    """Puts a number into some entries."""
    for name, value in values.items():
        entry = int(name[1:])
        pool.state["a"].bank.view(pool.capacity, -1)[entry] = value
        pool.state["position"][entry] = value


def test_reset_copy_and_fork_touch_one_entry() -> None:
    pool = numbered_pool()
    for _ in range(3):
        pool.acquire()
    fill(pool, _0=7, _1=8, _2=9)
    pool.copy(2, 0)
    assert numbers(pool) == [9, 8, 9, 4, 5]
    assert pool.fork(1) == 3
    assert numbers(pool) == [9, 8, 9, 8, 5] and pool.held == (0, 1, 2, 3)
    pool.copy(1, 1)
    pool.reset(2, 3)
    assert numbers(pool) == [9, 8, 0, 0, 5]
    pool.reset()
    assert numbers(pool) == [9, 8, 0, 0, 5]


@torch.no_grad()
@pytest.mark.parametrize(
    "action, error, message",
    [
        (lambda pool: pool.release(3), ValueError, r"entry 3 is not in use; in use are \[0, 1, 2\]"),
        (lambda pool: pool.release(5), ValueError, "entry is 5; the pool's are the ints 0 to 4"),
        (lambda pool: pool.release(-1), ValueError, "entry is -1; the pool's are"),
        (lambda pool: pool.release(torch.tensor(1)), ValueError, r"entry is tensor\(1\); the pool's are the ints"),
        (lambda pool: pool.reset(0, 3), ValueError, "entry 3 is not in use"),
        (lambda pool: pool.copy(0, 4), ValueError, "entry 4 is not in use"),
        (lambda pool: pool.copy(4, 0), ValueError, "entry 4 is not in use"),
        (lambda pool: pool.fork(4), ValueError, "entry 4 is not in use"),
        (lambda pool: pool.get(4), ValueError, "entry 4 is not in use"),
        (lambda pool: pool.get(5), ValueError, "entry is 5; the pool's are"),
        (lambda pool: pool.at([0, 3]), ValueError, "entry 3 is not in use"),
        (lambda pool: pool.at([0, 5]), ValueError, "entry is 5"),
        (lambda pool: pool.at([2, -1, 0, 2]), ValueError, r"entries are \[2, -1, 0, 2\]; two rows of a batch"),
    ],
)
def test_misuse_is_refused_before_anything_is_written(
    action: Callable[[StatePool[Any]], Any], error: type[Exception], message: str
) -> None:
    pool = numbered_pool()
    for _ in range(3):
        pool.acquire()
    fill(pool, _0=7, _1=8, _2=9)
    with pytest.raises(error, match=message):
        action(pool)
    assert numbers(pool) == [7, 8, 9, 4, 5] and pool.held == (0, 1, 2)


def test_a_released_entry_is_released_once_and_a_fork_needs_room() -> None:
    pool = numbered_pool(2)
    pool.acquire()
    pool.acquire()
    fill(pool, _0=7, _1=8)
    for action in (pool.fork, lambda entry: pool.put(pool.get(entry))):
        with pytest.raises(RuntimeError, match="all 2 entries are in use"):
            action(0)
    assert numbers(pool) == [7, 8] and pool.held == (0, 1)
    pool.release(1)
    with pytest.raises(ValueError, match="entry 1 is not in use"):
        pool.release(1)
    assert numbers(pool) == [7, 8]


def test_a_copy_that_fails_takes_no_entry() -> None:
    with torch.inference_mode():
        state = torch.zeros(3, 2)
    pool = StatePool(state, torch.zeros(1, 2))
    for _ in range(4):
        with pytest.raises(RuntimeError, match=r"[Ii]nference"):
            pool.acquire()
        assert pool.held == ()


def test_at_is_for_calls_without_gradients() -> None:
    """With them, a model would leave the pool as it is, and say nothing."""
    model = make_model("cpu")
    pool = StatePool(model.init_state(2), model.init_state(1))
    entry, tokens = pool.acquire(), torch.tensor([[1, 2, 3]])
    before = part(pool.state, entry, 2)
    for entries in ([entry], torch.tensor([entry])):
        with pytest.raises(RuntimeError, match=r"with grad mode on, .*: serve under torch\.no_grad\(\)"):
            pool.at(entries)
    _, after = model(tokens, pool.state.at(torch.tensor([entry])))
    assert_same_bits(part(pool.state, entry, 2), before)
    for mode in (torch.no_grad, torch.inference_mode):
        pool.reset(entry)
        with mode():
            model(tokens, pool.at([entry]))
        assert_same_bits(part(pool.state, entry, 2), part(pytree.tree_map(torch.detach, after.at(None)), entry, 2))


@torch.no_grad()
def test_at_chooses_entries_of_every_state_in_the_tree() -> None:
    states = (SDMState(torch.zeros(8, 3)), [SDMState(torch.zeros(12, 2))])
    pool = StatePool(states, (SDMState(torch.zeros(2, 3)), [SDMState(torch.zeros(3, 2))]))
    one, two = pool.acquire(), pool.acquire()
    chosen = pool.at([two, -1, one])
    for state, whole in zip((chosen[0], chosen[1][0]), (pool.state[0], pool.state[1][0]), strict=True):
        assert state.entries.tolist() == [1, -1, 0] and state.entries.dtype == torch.int64
        assert state.bank is whole.bank and whole.entries is None
    entries = torch.tensor([3, 2])
    assert pool.at(entries)[1][0].entries is entries
    assert pool.at([])[0].entries.shape == (0,) and pool.at([])[0].entries.dtype == torch.int64
    with pytest.raises(TypeError, match="the state holds a Tensor outside any object with"):
        numbered_pool().at([-1])


def test_an_entry_is_got_and_put_back() -> None:
    pool = numbered_pool()
    for _ in range(3):
        pool.acquire()
    fill(pool, _0=7, _1=8, _2=9)
    kept = pool.get(1)
    assert [leaf.shape for leaf in pytree.tree_leaves(kept)] == [(6, 3), (1,)]
    assert isinstance(kept["a"], SDMState) and pool.held == (0, 1, 2)
    fill(pool, _1=5)  # as calls do that advance it
    pool.release(0)
    assert pool.put(kept) == 0 and pool.held == (0, 1, 2)
    assert numbers(pool) == [8, 5, 9, 4, 5]
    for leaf in pytree.tree_leaves(kept):
        leaf.fill_(3)
    assert numbers(pool) == [8, 5, 9, 4, 5]
    assert pool.put(kept) == 3 and numbers(pool) == [8, 5, 9, 3, 5]


def test_nothing_of_the_autograd_graph_comes_in_or_out() -> None:
    layer = make_layer("cpu")
    pool = StatePool(layer.init_state(2), layer.init_state(1))
    entry = pool.put(layer.init_state(1))  # requires a gradient
    assert_same_bits(part(pool.state, entry, 2), [layer.memory])
    with torch.inference_mode():
        kept = pool.get(entry)
        assert pool.put(SDMState(kept.bank + 1)) == 1
    assert not (kept.bank.requires_grad or kept.bank.is_inference() or pool.state.bank.requires_grad)


@pytest.mark.parametrize(
    "state, message",
    [
        ({"a": SDMState(torch.zeros(6, 3))}, "the state's structure is .*; expected the pool's, "),
        ({"a": SDMState(torch.zeros(6, 3)), "position": 4}, "leaf 1 of the state is a int; expected a tensor"),
        (
            {"a": SDMState(torch.zeros(12, 3)), "position": torch.zeros(2).long()},
            r"tensor 0 of the state has shape \(12, 3\) .*; an entry of this pool takes \(6, 3\)",
        ),
        (
            {"a": SDMState(torch.zeros(6, 3)), "position": torch.zeros(1)},
            "tensor 1 of the state has .* dtype torch.float32; an entry of this pool takes .* torch.int64",
        ),
        (
            {"a": SDMState(torch.zeros(6, 3), torch.tensor([0])), "position": torch.zeros(1).long()},
            r"the state is one of chosen entries; expected that of one sequence, as get\(entry\)",
        ),
    ],
)
def test_a_state_that_does_not_fit_takes_no_entry(state: Any, message: str) -> None:
    pool = numbered_pool()
    with pytest.raises(ValueError, match=message):
        pool.put(state)
    assert numbers(pool) == [1, 2, 3, 4, 5] and pool.held == ()


def state_of(*shape: int, **options: Any) -> SDMState:
    return SDMState(torch.zeros(*shape, **options))


@pytest.mark.parametrize(
    "state, initial, message",
    [
        (state_of(8, 3), [state_of(2, 3)], "differ in structure"),
        (state_of(8, 3), state_of(3, 3), r"tensor 0 of the state has shape \(8, 3\), initial's \(3, 3\)"),
        (state_of(8, 3), state_of(2, 4), r"initial's \(2, 4\): expected a multiple of its first dimension"),
        (state_of(8, 3), state_of(0, 3), "expected a multiple"),
        ([torch.zeros(())], [torch.zeros(())], "expected a multiple"),
        (state_of(8, 3), state_of(2, 3, dtype=torch.float64), "torch.float32 on cpu; initial's torch.float64 on cpu"),
        (state_of(8, 3), state_of(2, 3, device="meta"), "torch.float32 on cpu; initial's torch.float32 on meta"),
        (SDMState(torch.zeros(3, 8).T), state_of(2, 3), r"has strides \(1, 8\)"),
        ([torch.zeros(4, 1), torch.zeros(6, 1)], [torch.zeros(2, 1)] * 2, r"room for \[2, 3\] entries"),
        ([torch.zeros(0, 1)], [torch.zeros(2, 1)], r"room for \[0\] entries"),
        ([], [], r"room for \[\] entries"),
        ([torch.zeros(4), 1], [torch.zeros(2), 1], "leaf 1 of the state is a int"),
        (state_of(8, 3).at(torch.arange(4)), state_of(2, 3).at(torch.arange(1)), "chosen entries"),
    ],
)
def test_what_no_pool_can_be_made_of(state: Any, initial: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StatePool(state, initial)


def test_the_pool_keeps_its_own_initial_rows_outside_the_graph() -> None:
    layer = make_layer("cpu")
    initial, state = layer.init_state(1), layer.init_state(3)
    pool = StatePool(state, initial)
    assert initial.bank.requires_grad and not pool.state.bank.requires_grad
    assert pool.state.bank.data_ptr() == state.bank.data_ptr()
    with torch.no_grad():
        initial.bank.fill_(7)
    pool.acquire()
    pool.state.bank.fill_(9)
    with torch.inference_mode():
        assert pool.acquire() == 1
    assert_same_bits(part(pool.state, 1, 3), [layer.memory])
    assert (pool.state.bank.unflatten(0, (3, -1))[[0, 2]] == 9).all()


# Requests that come and go


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
