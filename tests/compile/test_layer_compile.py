"""torch.compile takes the whole layer: one graph per situation, few over many lengths, the values of eager."""

import contextlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from sdm_compile import SDMState, SparseDeltaMemory, SparseDeltaMemoryConfig
from sdm_compile.machine import why_not_compile
from tests.cases import LAYER_SETTINGS

MODES = {"train": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
LENGTHS = (5, 7, 2, 19, 8, 30)  # around and over the chunk size


def make_layer(**settings):
    torch.manual_seed(0)
    shape = {"dim": 12, "num_heads": 2, "slots_per_head": 16, "num_writes": 3, "num_reads": 4, "chunk_size": 8}
    return SparseDeltaMemory(SparseDeltaMemoryConfig(**{**shape, **settings})).eval()


def compiled(layer, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(layer, fullgraph=True, backend=counter), counter


def run(function, layer, x, state):
    """Everything that a call gives: y, the bank and, where there are any, the gradients of both."""
    y, after = function(x, state)
    outs = [y, after.bank]
    if not y.requires_grad:
        return after, outs
    inputs = [x, *layer.parameters(), *([state.bank] if state is not None else [])]
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + (after.bank * after.bank.detach().cos()).sum()
    return after, outs + list(torch.autograd.grad(loss, inputs, allow_unused=True))


def assert_same(actual, expected, tolerance=0.0):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def start(layer, batch, mode):
    """A state as a user has it in this mode; in training, one that wants a gradient."""
    state = layer.init_state(batch).detach()
    if mode == "train":
        state.bank.requires_grad_()
    return state


@pytest.mark.parametrize("settings", LAYER_SETTINGS)
@pytest.mark.parametrize("passed", [False, True], ids=["no state", "state"])
@pytest.mark.parametrize("mode", MODES)
def test_two_graphs_over_many_lengths(mode, passed, settings):
    layer = make_layer(**LAYER_SETTINGS[settings])
    function, counter = compiled(layer)
    batch = layer.config.num_heads  # one head, one sequence: a single stream
    with MODES[mode]():
        for tokens in LENGTHS:
            x = torch.randn(batch, tokens, 12, requires_grad=mode == "train")
            states = [start(layer, batch, mode), start(layer, batch, mode)] if passed else [None, None]
            after, actual = run(function, layer, x, states[0])
            _, expected = run(layer, layer, x, states[1])
            assert_same(actual, expected, 1e-6)
            assert (after is states[0]) == (passed and mode != "train")
    assert counter.frame_count <= 2


@pytest.mark.parametrize("origin", ["prompt", "init_state", "init_state with grad mode on"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_decoding_never_recompiles_after_two_steps(mode, origin):
    layer = make_layer(output_gate=True, key_weighted_decay=True)
    function, counter = compiled(layer)
    x = torch.randn(2, 24, 12)
    state, outs, done = layer.init_state(2), [], 0
    with MODES[mode]():
        whole, end = layer(x)
        if origin == "prompt":
            first, state = function(x[:, :4])
            outs, done = [first], 4
        elif origin == "init_state":
            state = layer.init_state(2)
        for t in range(done, 24):
            y, after = function(x[:, t : t + 1], state)
            assert after is state
            outs.append(y)
            if len(outs) == 3:
                graphs = counter.frame_count
    assert counter.frame_count == graphs <= 2
    assert_same([torch.cat(outs, 1), state.bank], [whole, end.bank], 1e-5)


def test_one_token_in_training():
    layer = make_layer(output_gate=True)
    function, counter = compiled(layer)
    for _ in range(3):
        x = torch.randn(2, 1, 12, requires_grad=True)
        states = [start(layer, 2, "train"), start(layer, 2, "train")]
        kept = states[0].bank.detach().clone()
        after, actual = run(function, layer, x, states[0])
        assert_same(actual, run(layer, layer, x, states[1])[1], 1e-6)
        assert after is not states[0] and torch.equal(states[0].bank, kept)
    assert counter.frame_count == 1


def test_segments_chain_through_compiled_calls():
    layer = make_layer()
    function, _ = compiled(layer)
    x = torch.randn(2, 20, 12)

    def chained(f):
        state, outs = None, []
        for piece in x.split([9, 6, 5], 1):
            y, state = f(piece, state)
            outs.append(y)
        loss = torch.cat(outs, 1).square().sum() + state.bank.sum()
        return [*outs, *torch.autograd.grad(loss, list(layer.parameters()))]

    assert_same(chained(function), chained(layer), 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_autocast(mode):
    layer = make_layer(normalize_readings=True, output_gate=True)
    function, counter = compiled(layer)
    with MODES[mode](), torch.autocast("cpu", torch.bfloat16):
        for tokens in (5, 9, 17):
            x = torch.randn(2, tokens, 12)
            states = [SDMState(torch.zeros(64, 6)), SDMState(torch.zeros(64, 6))]  # float32 banks
            y, after = function(x, states[0])
            expected, expected_after = layer(x, states[1])
            assert y.dtype == torch.bfloat16 and after.bank.dtype == torch.float32
            assert_same([y, after.bank], [expected, expected_after.bank], 1e-6)
    assert counter.frame_count <= 2


@pytest.mark.skipif(why_not_compile() is not None, reason=str(why_not_compile()))
@pytest.mark.parametrize("mode", MODES)
def test_inductor(mode):
    """The default backend reorders and reuses memory: the bank must come out right, and the learned memory unharmed."""
    layer = make_layer(normalize_readings=True, output_gate=True)
    function, _ = compiled(layer, "inductor")
    x = torch.randn(1, 9, 12, requires_grad=mode == "train")
    memory = layer.memory.detach().clone()
    with MODES[mode]():
        after, actual = run(function, layer, x, None)
        expected_after, expected = run(layer, layer, x, None)
        assert_same(actual, expected, 1e-5)
        if mode != "train":
            for piece in (x, x[:, :1], x[:, 1:2]):
                after, actual = run(function, layer, piece, after)
                expected_after, expected = run(layer, layer, piece, expected_after)
                assert_same(actual, expected, 1e-5)
    assert torch.equal(layer.memory, memory)


@pytest.mark.parametrize("mode", MODES)
def test_under_a_default_device(mode):
    layer = make_layer(normalize_readings=True)
    x = torch.randn(2, 9, 12)
    with torch.device("cpu"), MODES[mode]():
        y, after = compiled(layer)[0](x)
        expected, expected_after = layer(x)
    assert_same([y.detach(), after.bank.detach()], [expected.detach(), expected_after.bank.detach()], 1e-6)


def pool_of(layer, capacity, entries, mode):
    state = start(layer, capacity, mode)
    return state.at(torch.tensor(entries))


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("mode", MODES)
def test_other_entries_are_the_same_graph(mode, tokens):
    layer = make_layer(normalize_readings=True, output_gate=True)
    function, counter = compiled(layer)
    with MODES[mode]():
        pools = [start(layer, 5, mode), start(layer, 5, mode)]
        for entries in ([4, 0, -1], [1, 4, 2], [-1, -1, -1], [0, 1, 2]):
            x = torch.randn(3, tokens, 12, requires_grad=mode == "train")
            states = [pool.at(torch.tensor(entries)) for pool in pools]
            after, actual = run(function, layer, x, states[0])
            _, expected = run(layer, layer, x, states[1])
            assert_same(actual, expected, 1e-6)
            assert (after is states[0]) == (mode != "train") and after.entries.tolist() == entries
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", MODES)
def test_pools_and_batches_of_many_sizes_are_few_graphs(mode):
    layer = make_layer()
    function, counter = compiled(layer)
    with MODES[mode]():
        for capacity, entries in ((5, [4, 0, -1]), (7, [6, 2]), (4, [3, -1, 0, 1]), (9, [8, 7, 6, 5, 0])):
            x = torch.randn(len(entries), 6, 12, requires_grad=mode == "train")
            _, actual = run(function, layer, x, pool_of(layer, capacity, entries, mode))
            _, expected = run(layer, layer, x, pool_of(layer, capacity, entries, mode))
            assert_same(actual, expected, 1e-6)
    assert counter.frame_count <= 2


@pytest.mark.skipif(why_not_compile() is not None, reason=str(why_not_compile()))
def test_inductor_takes_entries():
    layer = make_layer(output_gate=True)
    function, _ = compiled(layer, "inductor")
    with torch.no_grad():
        pools = [layer.init_state(4), layer.init_state(4)]
        for entries, tokens in (([3, -1], 9), ([3, 0], 1), ([-1, 3], 1)):
            x = torch.randn(2, tokens, 12)
            (y, _), (expected, _) = (
                f(x, pool.at(torch.tensor(entries))) for f, pool in zip((function, layer), pools, strict=True)
            )
            assert_same([y, pools[0].bank], [expected, pools[1].bank], 1e-5)
