"""The state as a value: copies, views, pytree, files, export."""

import io

import pytest
import torch
from torch.utils import _pytree as pytree

from sdm_compile import SDMState, SparseDeltaMemory, SparseDeltaMemoryConfig


@pytest.fixture
def state():
    return SDMState(torch.randn(12, 5, generator=torch.Generator().manual_seed(0)))


def test_detach_shares_the_bank_without_its_graph(state):
    weight = torch.ones(5, requires_grad=True)
    detached = SDMState(state.bank * weight).detach()
    assert not detached.bank.requires_grad
    assert torch.equal(detached.bank, state.bank)
    view = state.detach()
    view.bank[3] = 7.0
    assert (state.bank[3] == 7.0).all()


def test_clone_is_independent_and_differentiable(state):
    leaf = SDMState(state.bank.clone().requires_grad_())
    copy = leaf.clone()
    with torch.no_grad():
        copy.bank[3] = 7.0
    assert torch.equal(leaf.bank, state.bank)
    leaf.clone().bank.sum().backward()
    assert (leaf.bank.grad == 1).all()


def test_to(state):
    assert torch.equal(state.to(torch.bfloat16).bank, state.bank.bfloat16())
    assert state.to(device="meta").bank.is_meta
    assert state.to(torch.float32).bank is state.bank


def test_pytree(state):
    nested = {"layers": [state, state.clone()], "position": 3}
    leaves, spec = pytree.tree_flatten(nested)
    assert [type(leaf) for leaf in leaves] == [torch.Tensor, torch.Tensor, int]
    again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert again["layers"][0].bank is state.bank
    doubled = pytree.tree_map_only(torch.Tensor, lambda t: 2 * t, nested)
    assert torch.equal(doubled["layers"][1].bank, 2 * state.bank)


@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(state, weights_only):
    file = io.BytesIO()
    torch.save({"state": state.to(torch.bfloat16)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)["state"]
    assert type(loaded) is SDMState and loaded.bank.dtype == torch.bfloat16
    assert torch.equal(loaded.bank, state.bank.bfloat16())


def test_export_takes_and_gives_states():
    torch.manual_seed(0)
    layer = SparseDeltaMemory(SparseDeltaMemoryConfig(8, num_heads=2, slots_per_head=9, num_writes=2, num_reads=3))
    x, state = torch.randn(2, 5, 8), layer.init_state(2).detach()
    program = torch.export.export(layer, (x, state))
    y, after = program.module()(x, state)
    expected_y, expected_after = layer(x, state)
    torch.testing.assert_close(y, expected_y, rtol=0, atol=0)
    torch.testing.assert_close(after.bank, expected_after.bank, rtol=0, atol=0)


# With entries


@pytest.fixture
def pool(state):
    return state.at(torch.tensor([2, -1, 0]))


def test_at_shares_the_bank(state):
    entries = torch.tensor([2, -1, 0])
    chosen = state.at(entries)
    assert chosen.bank is state.bank and chosen.entries is entries and state.entries is None
    other = chosen.at(torch.tensor([1]))
    assert other.bank is state.bank and other.entries.tolist() == [1] and chosen.entries is entries
    assert other.at(None).bank is state.bank and other.at(None).entries is None


def test_detach_clone_and_to_keep_the_entries(pool):
    assert pool.detach().entries is pool.entries
    assert pool.to(torch.bfloat16).entries is pool.entries
    assert pool.to(device="meta").entries.is_meta and pool.to("meta").entries.dtype == torch.int64
    copy = pool.clone()
    copy.entries[0] = 1
    assert pool.entries.tolist() == [2, -1, 0] and copy.entries.tolist() == [1, -1, 0]


def test_pytree_with_entries(state, pool):
    leaves, spec = pytree.tree_flatten([pool, state])
    assert [leaf is tensor for leaf, tensor in zip(leaves, (pool.bank, pool.entries, state.bank), strict=True)]
    again, without = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert again.bank is state.bank and again.entries is pool.entries and without.entries is None


@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load_with_entries(state, pool, weights_only):
    before_there_were_entries = SDMState(state.bank)
    del before_there_were_entries.__dict__["entries"]
    file = io.BytesIO()
    torch.save([pool, state, before_there_were_entries], file)
    file.seek(0)
    loaded, plain, old = torch.load(file, weights_only=weights_only)
    assert torch.equal(loaded.bank, pool.bank) and torch.equal(loaded.entries, pool.entries)
    for one in (plain, old):
        assert torch.equal(one.bank, state.bank) and one.entries is None
        assert one.at(pool.entries).entries is pool.entries and one.clone().entries is None


def test_export_takes_and_gives_entries():
    torch.manual_seed(0)
    layer = SparseDeltaMemory(SparseDeltaMemoryConfig(8, num_heads=2, slots_per_head=9, num_writes=2, num_reads=3))
    x, state = torch.randn(2, 5, 8), layer.init_state(3).detach().at(torch.tensor([2, -1]))
    program = torch.export.export(layer, (x, state))
    for entries in ([2, -1], [1, 0]):
        chosen = state.at(torch.tensor(entries))
        y, after = program.module()(x, chosen)
        expected_y, expected_after = layer(x, chosen)
        torch.testing.assert_close(y, expected_y, rtol=0, atol=0)
        torch.testing.assert_close(after.bank, expected_after.bank, rtol=0, atol=0)
        assert after.entries.tolist() == entries
