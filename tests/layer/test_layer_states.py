"""The layer's calls on states: what a call begins with and leaves, and the entries of a pool that it advances."""

import math
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from sdm_compile import SDMState
from sdm_compile import layer as layer_module
from tests.layer_spec import ALL, BASE, VARIANTS, assert_same, gradients, make_layer, make_x


@pytest.mark.parametrize("cut", [1, 2, 3, 6])
def test_segments_chain_with_gradients(cut):
    layer = make_layer(key_weighted_decay=True, output_gate=True)
    x = make_x(2, 7, layer).requires_grad_()
    y, state = layer(x)
    first, between = layer(x[:, :cut])
    kept = between.bank.detach().clone()
    second, end = layer(x[:, cut:], between)
    assert torch.equal(between.bank, kept) and end is not between
    chained = torch.cat([first, second], 1)
    assert_same(chained, y)
    assert_same(end.bank, state.bank)
    expected = gradients(layer, (y, state.bank), [x])
    for name, gradient in gradients(layer, (chained, end.bank), [x]).items():
        assert_same(gradient, expected[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tokens", [1, 5])
def test_without_grad_a_state_is_advanced_in_place(mode, tokens):
    layer = make_layer(**ALL).eval()
    x = make_x(2, tokens, layer)
    state = layer.init_state(2)
    address = state.bank.data_ptr()
    expected_y, expected = layer(x, state.clone())
    with mode():
        y, after = layer(x, state)
    assert after is state and state.bank.data_ptr() == address
    assert_same(y, expected_y)
    assert_same(state.bank, expected.bank)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_decoding_equals_the_whole_forward(mode):
    layer = make_layer(**ALL).eval()
    x = make_x(2, 9, layer)
    y, whole = layer(x)
    with mode():
        prompt, state = layer(x[:, :4])
        outs = [prompt]
        for t in range(4, 9):
            out, after = layer(x[:, t : t + 1], state)
            assert after is state
            outs.append(out)
    assert_same(torch.cat(outs, 1), y)
    assert_same(state.bank, whole.bank)


@pytest.mark.parametrize("tokens, op", [(1, "sdm_decode_step"), (2, "sdm_write_read_")])
def test_one_token_takes_the_decode_step(tokens, op):
    layer = make_layer()
    with mock.patch.object(layer_module, op, wraps=getattr(layer_module, op)) as called, torch.no_grad():
        layer(make_x(2, tokens, layer), layer.init_state(2))
    assert called.call_count == 1


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_learned_memory_is_never_written(batch, tokens):
    layer = make_layer()
    before = layer.memory.detach().clone()
    with torch.no_grad():
        _, state = layer(make_x(batch, tokens, layer))
        layer(make_x(batch, tokens, layer), state)
        layer(make_x(batch, tokens, layer), layer.init_state(batch))
    assert torch.equal(layer.memory, before)
    assert not torch.equal(state.bank[: len(before)], before)


@pytest.mark.parametrize("learned", [True, False])
def test_init_state_is_the_start(learned):
    layer = make_layer(backprop_on_memory=learned)
    x = make_x(3, 5, layer)
    y, end = layer(x)
    from_state, from_state_end = layer(x, layer.init_state(3))
    assert torch.equal(from_state, y) and torch.equal(from_state_end.bank, end.bank)
    expected = gradients(layer, (y, end.bank), [])
    for name, gradient in gradients(layer, (from_state, from_state_end.bank), []).items():
        assert_same(gradient, expected[name])


def test_init_state_under_inference_mode_is_ordinary():
    layer = make_layer()
    with torch.inference_mode():
        state = layer.init_state(2)
    assert not state.bank.is_inference() and not state.bank.requires_grad
    with torch.no_grad():
        assert not layer.init_state(2).bank.requires_grad
        layer(make_x(2, 5, layer), state)  # an inference tensor could not be written here
    assert torch.equal(layer.init_state(2).bank, layer.memory.repeat(2, 1))


@pytest.mark.parametrize("learned", [True, False])
def test_init_state_dtype_and_device(learned):
    layer = make_layer(torch.bfloat16, backprop_on_memory=learned)
    assert layer.init_state(2).bank.dtype == torch.bfloat16
    assert layer.init_state(2, torch.float32).bank.dtype == torch.float32
    assert layer.init_state(2, device="meta").bank.shape == (64, 6)
    assert layer.init_state(2, device="meta").bank.is_meta


def test_a_refused_state_leaves_the_layer_as_it_was():
    layer = make_layer(query_batchnorm=True).train()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(ValueError, match="bank has shape"):
        layer(torch.randn(2, 5, layer.config.dim), layer.init_state(3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


# States with entries


def pool_of(layer, capacity, entries, seed=2):
    rows = layer.config.num_heads * layer.config.slots_per_head
    bank = torch.randn(capacity * rows, 6, generator=torch.Generator().manual_seed(seed), dtype=layer.Wo.weight.dtype)
    return SDMState(bank, torch.tensor(entries))


def gathered(state):
    """The entries' rows as a state without entries: those of a batch of their own."""
    rows = BASE["num_heads"] * BASE["slots_per_head"]
    return SDMState(state.bank.unflatten(0, (-1, rows))[state.entries].flatten(0, 1))


def scattered(state, after):
    """The pool's bank with what its entries have become."""
    rows = BASE["num_heads"] * BASE["slots_per_head"]
    parts = list(state.bank.split(rows))
    for entry, part in zip(state.entries.tolist(), after.bank.split(rows), strict=True):
        parts[entry] = part
    return torch.cat(parts)


@pytest.mark.parametrize("variant", ["default", "all"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_gradients_through_a_pool(tokens, variant):
    """A batch of entries is the batch of their rows; the rows of other entries pass their gradients through."""
    layer = make_layer(**VARIANTS[variant]).eval()
    x = make_x(3, tokens, layer).requires_grad_()
    state = pool_of(layer, 5, [4, 0, 2])
    state.bank.requires_grad_()
    kept = state.bank.detach().clone()
    y, after = layer(x, state)
    expected_y, expected = layer(x, gathered(state))
    assert after is not state and after.entries is state.entries and torch.equal(state.bank, kept)
    bank = scattered(state, expected)
    assert_same(y, expected_y)
    assert_same(after.bank, bank)
    actual = gradients(layer, (y, after.bank), [x, state.bank])
    for name, gradient in gradients(layer, (expected_y, bank), [x, state.bank]).items():
        assert_same(actual[name], gradient)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("tokens", [1, 5])
def test_entries_choose_what_a_call_advances(mode, tokens):
    layer = make_layer(**ALL).eval()
    x = make_x(3, tokens, layer)
    state = pool_of(layer, 5, [4, -1, 2])
    start = state.clone()
    address = state.bank.data_ptr()
    expected_y, expected = layer(x[[0, 2]], gathered(state.at(torch.tensor([4, 2]))))
    with mode():
        y, after = layer(x, state)
    assert (after is state) == (mode is not torch.enable_grad) and state.bank.data_ptr() == address
    assert_same(y[[0, 2]], expected_y)
    assert_same(after.bank, scattered(start.at(torch.tensor([4, 2])), expected))
    others = [bank.detach().unflatten(0, (5, -1))[[0, 1, 3]] for bank in (after.bank, start.bank)]
    assert torch.equal(*others)
    nothing = layer.readings_norm(x.new_zeros(1, tokens, 2, 6)).flatten(2)  # what a padding row reads
    assert_same(y[1:2], layer.Wo(nothing * layer.Wog(x[1:2]).sigmoid()))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("entry", [-1, -7, -(2**31), -(2**62), -(2**63)])
def test_padding_leaves_the_pool_alone_whatever_it_holds(entry, tokens):
    layer = make_layer(**ALL).eval()
    state = pool_of(layer, 3, [entry, entry])
    state.bank.fill_(math.nan)
    x = make_x(2, tokens, layer)
    x[1] = math.nan
    with torch.no_grad():
        y, _ = layer(x, state)
    assert y[0].isfinite().all() and state.bank.isnan().all()
    leaf = pool_of(layer, 3, [entry, entry])
    kept = leaf.bank.clone()
    with torch.no_grad():
        layer(x, leaf)
    assert torch.equal(leaf.bank, kept)
    y, after = layer(x[:1], SDMState(leaf.bank.requires_grad_(), leaf.entries[:1]))
    assert torch.equal(after.bank, kept)
    (gradient,) = torch.autograd.grad(y.sum() + 3 * after.bank.sum(), leaf.bank)
    assert (gradient == 3).all()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("entry", [3, 2**31, 2**62, 2**63 - 1])
def test_an_entry_beyond_the_pool_is_refused_on_the_cpu(entry, tokens, grad):
    layer = make_layer()
    state = pool_of(layer, 3, [1, entry])
    kept = state.bank.clone()
    message = f"the state's entries name entry {entry} of a bank with room for 3; they are 0 to 2, or negative"
    with torch.set_grad_enabled(grad), pytest.raises(IndexError, match=message):
        layer(make_x(2, tokens, layer), state)
    with pytest.raises(IndexError, match=message):
        layer.draft(make_x(2, tokens, layer), state)
    assert torch.equal(state.bank, kept)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_traced_call_looks_at_no_entries(tokens):
    """The traced function is one for all entries."""
    layer = make_layer().eval()
    x, state = make_x(2, tokens, layer), pool_of(layer, 3, [2, -1])

    def call(bank, entries):
        y, after = layer(x, SDMState(bank, entries))
        return y, after.bank

    with torch.no_grad():
        traced = make_fx(call)(state.bank.clone(), torch.tensor([1, -1]))
        got, expected = (f(state.bank.clone(), state.entries) for f in (traced, call))
        assert_same(got, expected)
        with pytest.raises(IndexError, match="but memory has 96 rows"):
            traced(state.bank.clone(), torch.tensor([3, 0]))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            y, _ = call(mode.from_tensor(state.bank), mode.from_tensor(state.entries))
            real, _ = call(state.bank, state.entries)
        assert y.shape == real.shape == (2, tokens, 12)


def test_wrong_entries_are_refused():
    layer = make_layer(query_batchnorm=True)
    x, state = make_x(2, 5, layer), pool_of(layer, 3, [1, 0])
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for entries, message in [
        (torch.tensor([1]), r"entries have shape \(1,\); expected \(2,\), the batch"),
        (torch.tensor([[1], [0]]), r"entries have shape \(2, 1\)"),
        (torch.tensor([1, 0], dtype=torch.int32), "entries have dtype torch.int32; expected torch.int64"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "entries are on meta; expected cpu, where the bank is"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer(x, state.at(entries))
    with pytest.raises(TypeError, match="entries are a list; expected an int64 tensor"):
        layer(x, state.at([1, 0]))
    for bank in (state.bank[:-1], state.bank[:0], state.bank[:, 1:], state.bank[0]):
        with pytest.raises(ValueError, match=r"bank has shape .*; expected \(capacity \* 32, 6\), .* at least 1"):
            layer(x, SDMState(bank, state.entries))
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("batch, tokens", [(2, 0), (0, 5), (0, 1)])
def test_empty_calls_on_a_pool(batch, tokens, grad):
    layer = make_layer(**ALL).eval()
    state = pool_of(layer, 3, [])
    state = state.at(torch.arange(batch))
    kept = state.bank.clone()
    with torch.set_grad_enabled(grad):
        y, after = layer(make_x(batch, tokens, layer), state)
    assert y.shape == (batch, tokens, 12) and torch.equal(after.bank, kept)
