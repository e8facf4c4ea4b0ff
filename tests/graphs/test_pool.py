"""A pool of states: its books and its copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from sdm_compile import SDMState
from sdm_compile.graphs import StatePool
from tests.harness import assert_same_bits
from tests.pool_models import make_layer, make_model, part


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
        (lambda pool: pool.release(True), ValueError, "entry is True; the pool's are the ints"),
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


@torch.no_grad()
def test_a_state_of_one_entry_is_taken_out_of_its_pool(tmp_path: Path) -> None:
    pool, other = numbered_pool(), numbered_pool()
    pool.acquire()
    entry = pool.acquire()
    pool.state["a"].bank[:] = torch.arange(30.0)[:, None]
    torch.save(pool.state["a"].at(torch.tensor([entry])), tmp_path / "state")
    loaded = {"a": torch.load(tmp_path / "state"), "position": pool.state["position"]}
    put = other.put(loaded)
    assert_same_bits(part(other.state["a"], put, 5), part(pool.state["a"], entry, 5))
    assert other.state["position"][put] == pool.state["position"][entry]


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
            {"a": SDMState(torch.zeros(12, 3), torch.tensor([0, 1])), "position": torch.zeros(2).long()},
            r"the state is of the entries \[0, 1\]; expected that of one sequence",
        ),
        (
            {"a": SDMState(torch.zeros(12, 3), torch.tensor([-1])), "position": torch.zeros(2).long()},
            r"the state is of the entries \[-1\]",
        ),
        (
            {"a": SDMState(torch.zeros(12, 3), torch.tensor([2])), "position": torch.zeros(2).long()},
            r"tensor 0 of the state has shape \(12, 3\)",
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


def test_an_entry_is_one_sequence() -> None:
    """As far as a state tells how many it is of: two that share an entry would share its rows."""
    model = make_model("cpu")
    with pytest.raises(ValueError, match=r"initial is a state of 2 sequences; expected one, as init_state\(1\) gives"):
        StatePool(model.init_state(4), model.init_state(2))


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


def test_entries_for_a_decode_graph_are_checked() -> None:
    pool = numbered_pool()
    first, second = pool.acquire(), pool.acquire()
    assert torch.equal(pool.entries([second, -1, first]), torch.tensor([second, -1, first]))
    with pytest.raises(ValueError, match="two rows of a batch"):
        pool.entries([first, first])
    with pytest.raises(ValueError, match="entry 4 is not in use"):
        pool.entries([first, 4])
    with pytest.raises(TypeError, match=r"entries is 0; expected one for each row of the batch, such as \[0\]"):
        pool.entries(0)  # type: ignore[arg-type]
