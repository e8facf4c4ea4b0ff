"""DecodeGraph against the plain step, on the CPU, where it runs the step, and on a GPU, where it replays it.

Every test changes the inputs from call to call: a replay that used those of the capture would show.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdm_compile import SparseDeltaMemory, SparseDeltaMemoryConfig
from sdm_compile.graphs import DecodeGraph
from sdm_compile.lm import LMState
from tests.graph_models import DEVICES, Sums, add, integers, make_model, make_sums, random_tokens, tensors_of
from tests.harness import assert_same_bits

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

    def taken() -> int:
        """Bytes of the device, which others may take as well, by 500 captures."""
        free, _ = torch.cuda.mem_get_info()
        for _ in range(250):  # of two sizes each
            once()
        torch.cuda.synchronize()
        return free - torch.cuda.mem_get_info()[0]

    assert min(taken(), taken()) <= 128 * 2**20  # graphs themselves take memory, too
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() <= reserved + 64 * 2**20


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
