"""The layer against SPEC section 7 read aloud, its states, its parameters and its dense limit."""

import copy
import itertools
import math
import pickle
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sdm_compile import SDMState, SparseDeltaMemory, SparseDeltaMemoryConfig, reference
from sdm_compile import layer as layer_module
from sdm_compile.ops.snapshot import CALL_MODES

BASE = {"dim": 12, "num_heads": 2, "slots_per_head": 16, "num_writes": 3, "num_reads": 4, "chunk_size": 3}
ALL = {
    "normalize_readings": True,
    "output_gate": True,
    "query_batchnorm": True,
    "key_weighted_decay": True,
    "read_act": "l2_normalize",
    "write_act_scale": 1.5,
    "read_act_scale": 0.5,  # without effect on l2_normalize
}
VARIANTS = {
    "default": {},
    "all": ALL,
    "one head": {"num_heads": 1, "read_act_scale": 2.0},
    "zero memory, three factors": {
        "backprop_on_memory": False,
        "slots_per_head": 30,
        "product_key_factor_dims": (2, 3, 5),
        "write_act": "l2_normalize",
        "read_act": "SiLU",
        "num_writes": 5,
    },
    "dense, learned slope": {
        "slots_per_head": 4,
        "num_writes": 4,
        "num_reads": 4,
        "read_act": "PReLU",
        "write_act": "Sigmoid",
    },
}


def make_layer(dtype=torch.float64, seed=0, **settings):
    torch.manual_seed(seed)
    layer = SparseDeltaMemory(SparseDeltaMemoryConfig(**{**BASE, **settings})).to(dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name or name.startswith(("query_bn", "key_bn", "readings_norm")):
                parameter.add_(0.3 * torch.randn_like(parameter))  # zeros and ones hide mistakes
    return layer


def make_x(batch, tokens, layer, seed=1, dtype=torch.float64):
    return torch.randn(batch, tokens, layer.config.dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def spec_layer(layer, x, bank=None):
    """SPEC section 7 for each sequence and head by itself; `bank` [B, H, S, D]. Returns y and the final bank."""
    c, p = layer.config, dict(layer.named_parameters())
    batch, tokens, _ = x.shape

    def linear(name):
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def normed(scores, name):
        if not c.query_batchnorm:
            return scores
        rows = scores.reshape(batch * tokens, -1)
        bn = getattr(layer, name)
        mean, var = bn.running_mean, bn.running_var
        if layer.training:
            mean, var = rows.mean(0), rows.var(0, unbiased=False)
        rows = (rows - mean) / (var + bn.eps).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]
        return rows.reshape(scores.shape)

    def chosen(scores, count):
        """The slots of one token and head, from every slot's score."""
        width = torch.float64 if scores.dtype == torch.float64 else torch.float32
        parts = scores.to(width).split(list(c.factors))
        all_scores = torch.stack([sum(combination) for combination in itertools.product(*parts)])
        slots = all_scores.sort(descending=True, stable=True).indices[:count].sort().values
        return slots, all_scores[slots].to(scores.dtype)

    def weights(values, act, scale):
        if act == "Softmax":
            return torch.softmax(scale * values, -1)
        if act == "l2_normalize":
            return values / values.norm()
        if act == "PReLU":
            return torch.where(values > 0, values, p["read_act.weight"] * values)
        return {"SiLU": F.silu, "Sigmoid": torch.sigmoid}[act](values)

    wide = torch.float64
    v = linear("Wv_write")
    rate, strength = linear("a_proj").to(wide), linear("b_proj").to(wide)
    write_scores, read_scores = normed(linear("Wk_write"), "key_bn"), normed(linear("Wq_read"), "query_bn")
    dtype = v.dtype if bank is None else bank.dtype
    heads, banks = [], []
    for b, h in itertools.product(range(batch), range(c.num_heads)):
        keys, columns = [slice(h * n, (h + 1) * n) for n in (sum(c.factors), c.head_dim)]
        k = [chosen(scores, c.num_writes) for scores in write_scores[b, :, keys]]
        q = [chosen(scores, c.num_reads) for scores in read_scores[b, :, keys]]
        k_val = torch.stack([weights(values, c.write_act, c.write_act_scale) for _, values in k])
        q_val = torch.stack([weights(values, c.read_act, c.read_act_scale) for _, values in q])
        g = -p["A_log"][h].to(wide).exp() * torch.log1p((rate[b, :, h] + p["dt_bias"][h].to(wide)).exp())[:, None]
        if c.key_weighted_decay:
            g = g * k_val.to(wide)
        if bank is not None:
            start = bank[b, h]
        elif c.backprop_on_memory:
            start = p["memory"].reshape(c.num_heads, c.slots_per_head, c.head_dim)[h].to(dtype)
        else:
            start = x.new_zeros(c.slots_per_head, c.head_dim, dtype=dtype)
        readings, end = reference.write_read(
            start.to(wide),
            torch.stack([slots for slots, _ in k])[None],
            k_val.to(dtype).to(wide)[None],
            v[b, :, columns].to(dtype).to(wide)[None],
            strength[b, :, h].sigmoid()[None, :, None],
            g[None],
            torch.stack([slots for slots, _ in q])[None],
            q_val.to(dtype).to(wide)[None],
        )
        readings = readings[0].to(dtype).to(v.dtype)
        if c.normalize_readings:
            readings = F.layer_norm(
                readings, (c.head_dim,), p["readings_norm.weight"], p["readings_norm.bias"], eps=c.norm_eps
            )
        heads.append(readings)
        banks.append(end.to(dtype))
    merged = torch.stack(heads).reshape(batch, c.num_heads, tokens, c.head_dim).transpose(1, 2).flatten(2)
    if c.output_gate:
        merged = merged * torch.sigmoid(linear("Wog"))
    y = F.linear(merged, p["Wo.weight"], p["Wo.bias"])
    return y, torch.stack(banks).reshape(batch, c.num_heads, c.slots_per_head, c.head_dim)


def gradients(layer, outputs, inputs):
    """Gradients of a fixed random projection of the outputs, by the inputs and by every parameter."""
    generator = torch.Generator().manual_seed(5)
    loss = sum((out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in outputs)
    names = [*(f"input {i}" for i in range(len(inputs))), *dict(layer.named_parameters())]
    found = torch.autograd.grad(loss, [*inputs, *layer.parameters()], allow_unused=True)
    return dict(zip(names, found, strict=True))


def assert_same(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Values and gradients


@pytest.mark.parametrize("passed", [False, True], ids=["initial bank", "passed state"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(variant, passed):
    layer = make_layer(**VARIANTS[variant])
    c = layer.config
    x = make_x(2, 5, layer).requires_grad_()
    bank = None
    if passed:
        bank = torch.randn(2, c.num_heads, c.slots_per_head, c.head_dim, dtype=x.dtype).requires_grad_()
    y, state = layer(x, SDMState(bank.flatten(0, 2)) if passed else None)
    expected_y, expected_bank = spec_layer(layer, x, bank)
    assert_same(y, expected_y)
    assert_same(state.bank, expected_bank.flatten(0, 2))
    inputs = [x, bank] if passed else [x]
    actual = gradients(layer, (y, state.bank), inputs)
    expected = gradients(layer, (expected_y, expected_bank.flatten(0, 2)), inputs)
    for name in expected:
        # The initial bank is not part of a call that was handed a state.
        assert (expected[name] is None) == (passed and name == "memory"), name
        assert_same(actual[name], expected[name])


def test_batchnorm_follows_the_mode():
    layer = make_layer(query_batchnorm=True)
    x = make_x(3, 4, layer)
    before = layer.key_bn.running_mean.clone()
    layer(x)
    assert_same(layer.key_bn.running_mean, 0.9 * before + 0.1 * layer.Wk_write(x).flatten(0, 1).mean(0))
    layer.eval()
    assert_same(layer(x)[0], spec_layer(layer, x)[0])


def test_batch_order_is_sequence_then_head():
    layer = make_layer()
    x = make_x(3, 5, layer)
    y, state = layer(x)
    for b in range(3):
        alone_y, alone = layer(x[b : b + 1])
        assert_same(y[b : b + 1], alone_y)
        assert_same(state.bank.chunk(3)[b], alone.bank)


@pytest.mark.parametrize("batch, tokens", [(2, 0), (0, 5), (0, 0), (0, 1)])
@pytest.mark.parametrize("grad", [True, False])
def test_empty(batch, tokens, grad):
    layer = make_layer(**ALL).eval()
    state = layer.init_state(batch)
    start = state.bank.clone()
    with torch.set_grad_enabled(grad):
        y, after = layer(make_x(batch, tokens, layer), state)
    assert y.shape == (batch, tokens, 12)
    assert torch.equal(after.bank, start)
    if grad:
        assert gradients(layer, (y, after.bank), [])["Wo.bias"].abs().sum() == 0


def test_wrong_shapes_are_refused():
    layer = make_layer()
    x = make_x(2, 5, layer)
    with pytest.raises(ValueError, match=r"x has shape \(5, 12\); expected \[B, T, dim\] with dim = 12"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"x has shape \(2, 5, 11\)"):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match=r"bank has shape \(96, 6\); expected \(64, 6\) for a batch of 2"):
        layer(x, layer.init_state(3))
    with pytest.raises(ValueError, match=r"bank has shape \(64, 5\)"):
        layer(x, SDMState(torch.zeros(64, 5, dtype=x.dtype)))


@pytest.mark.parametrize("mode", CALL_MODES)
@pytest.mark.parametrize("grad_bank_fp32", [True, False])
def test_training_settings_reach_the_op_and_leave_values_alone(mode, grad_bank_fp32):
    layer = make_layer(torch.float32, snapshot_quant=mode, grad_bank_fp32=grad_bank_fp32)
    x = make_x(2, 7, layer, dtype=torch.float32)
    with mock.patch.object(layer_module, "sdm_write_read", wraps=layer_module.sdm_write_read) as op:
        y, state = layer(x)
    assert op.call_args.kwargs == {"chunk_size": 3, "snapshot_quant": mode, "grad_bank_fp32": grad_bank_fp32}
    expected_y, expected = make_layer(torch.float32)(x)
    assert torch.equal(y, expected_y) and torch.equal(state.bank, expected.bank)
    gradients(layer, (y, state.bank), [])


# States


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
    message = f"the state's entries hold {entry}, but its bank is a pool of 3; entries are 0 to 2, or negative"
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


# Dtypes


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("bank_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_weights(bank_dtype):
    layer = make_layer(torch.bfloat16, normalize_readings=True, output_gate=True, chunk_size=None)
    x = make_x(2, 6, layer, dtype=torch.bfloat16)
    start = layer.init_state(2, bank_dtype).bank.detach()
    y, state = layer(x, SDMState(start))
    expected_y, expected = spec_layer(layer, x, start.reshape(2, 2, 16, 6))
    assert y.dtype == torch.bfloat16 and state.bank.dtype == bank_dtype
    assert relative_error(y, expected_y) < 2e-2
    assert relative_error(state.bank, expected.flatten(0, 2)) < (1e-5 if bank_dtype == torch.float32 else 1e-2)
    assert layer(x)[1].bank.dtype == torch.bfloat16


def test_autocast():
    layer = make_layer(torch.float32, normalize_readings=True, output_gate=True, chunk_size=None)
    x = make_x(2, 6, layer, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        expected_y, expected = spec_layer(layer, x)
    assert y.dtype == torch.bfloat16 and state.bank.dtype == torch.bfloat16
    assert relative_error(y, expected_y) < 2e-2
    assert relative_error(state.bank, expected.flatten(0, 2)) < 1e-2
    found = gradients(layer, (y, state.bank), [])
    for name, wanted in gradients(layer, (expected_y, expected.flatten(0, 2)), []).items():
        assert found[name].dtype == torch.float32
        assert relative_error(found[name], wanted) < 2e-2, name


@pytest.mark.parametrize("autocast", [True, False])
def test_gates_are_float32(autocast):
    layer = make_layer(torch.float32 if autocast else torch.bfloat16, key_weighted_decay=True)
    x = make_x(2, 6, layer, dtype=layer.Wo.weight.dtype)
    op = mock.patch.object(layer_module, "sdm_write_read", wraps=layer_module.sdm_write_read)
    with op as called, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(x)
        rate, strength = layer.a_proj(x), layer.b_proj(x)
    _, _, k_val, v, beta, g, _, _ = called.call_args.args
    assert rate.dtype == v.dtype == torch.bfloat16 and g.dtype == beta.dtype == torch.float32

    def by_stream(t):  # [B, T, H] -> [B * H, T, 1]
        return t.transpose(1, 2).reshape(4, 6, 1)

    decay = -layer.A_log.double().exp() * F.softplus(rate.double() + layer.dt_bias.double())
    assert_same(g.double(), by_stream(decay) * k_val.double(), 1e-6)
    assert_same(beta.double(), by_stream(strength.double().sigmoid()), 1e-6)


# Parameters


def published(config):
    """Names and shapes of the published checkpoints."""
    keys, heads = config.num_heads * sum(config.factors), config.num_heads
    linear = {"Wq_read": keys, "Wk_write": keys, "a_proj": heads, "b_proj": heads}
    linear |= {"Wv_write": config.dim, "Wo": config.dim}
    if config.output_gate:
        linear["Wog"] = config.dim
    shapes = {"A_log": (heads,), "dt_bias": (heads,)}
    for name, width in linear.items():
        shapes |= {f"{name}.weight": (width, config.dim), f"{name}.bias": (width,)}
    if config.backprop_on_memory:
        shapes["memory"] = (heads * config.slots_per_head, config.dim // heads)
    if config.normalize_readings:
        shapes |= {f"readings_norm.{kind}": (config.dim // heads,) for kind in ("weight", "bias")}
    if config.query_batchnorm:
        for norm in ("query_bn", "key_bn"):
            shapes |= {f"{norm}.{kind}": (keys,) for kind in ("weight", "bias", "running_mean", "running_var")}
            shapes[f"{norm}.num_batches_tracked"] = ()
    return shapes


OPTIONS = ("backprop_on_memory", "output_gate", "normalize_readings", "query_batchnorm")


@pytest.mark.parametrize("chosen", list(itertools.product([False, True], repeat=4)), ids=str)
def test_published_state_dicts_load(chosen):
    layer = make_layer(**dict(zip(OPTIONS, chosen, strict=True)))
    state_dict = {name: torch.rand(shape, dtype=torch.float64) for name, shape in published(layer.config).items()}
    layer.load_state_dict(state_dict, strict=True)
    x = make_x(1, 3, layer)
    layer.eval()
    assert_same(layer(x)[0], spec_layer(layer, x)[0])
    for name, value in layer.state_dict().items():
        assert_same(value.double(), state_dict[name].to(value.dtype).double())
    with pytest.raises(RuntimeError, match="size mismatch for A_log"):
        layer.load_state_dict({**state_dict, "A_log": torch.zeros(3)})


def check_initial_values(layer):
    config, std = layer.config, layer.config.dim**-0.5
    for name, parameter in layer.named_parameters():
        if name.endswith("norm.weight") or name.endswith("bn.weight"):
            assert (parameter == 1).all(), name
        elif name == "memory" or name.endswith(".weight"):
            assert parameter.abs().max() <= 3 * std, name
            assert abs(parameter.std().item() / (0.9866 * std) - 1) < 4 / math.sqrt(2 * parameter.numel()), name
        elif name.endswith(".bias"):
            assert (parameter == 0).all(), name
    rate, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    low, high = config.A_init_range
    assert (rate >= max(low, 1e-4) * 0.999).all() and (rate <= high * 1.001).all()
    assert (dt >= 0.000999).all() and (dt <= 0.1001).all()
    assert abs(dt.log().mean() - math.log(0.01)) < 4 * math.log(100) / math.sqrt(12 * len(dt))
    assert abs(rate.mean() - (low + high) / 2) <= 4 * (high - low) / math.sqrt(12 * len(rate))


INIT = {**ALL, "dim": 128, "num_heads": 64, "slots_per_head": 64}


@pytest.mark.parametrize("decay", [(0, 16), (2, 3), (0, 0)])
def test_initial_values(decay):
    torch.manual_seed(0)
    layer = SparseDeltaMemory(SparseDeltaMemoryConfig(**{**BASE, **INIT, "A_init_range": decay}))
    if decay == (0, 0):
        assert_same(layer.A_log.exp(), torch.full_like(layer.A_log, 1e-4), 1e-6)
    else:
        check_initial_values(layer)


@pytest.mark.parametrize("end", [0, 1], ids=["low", "high"])
def test_initial_gates_at_the_ends_of_their_ranges(end):
    layer = make_layer(A_init_range=(2, 3))
    with mock.patch.object(torch.Tensor, "uniform_", lambda t, *bounds: t.fill_(bounds[end])):
        layer.init_weights()
    assert_same(layer.A_log.exp(), torch.full_like(layer.A_log, (2, 3)[end]))
    assert_same(F.softplus(layer.dt_bias), torch.full_like(layer.dt_bias, (0.001, 0.1)[end]))


def exempt(layer):
    return {name for name, parameter in layer.named_parameters() if getattr(parameter, "_no_weight_decay", False)}


def test_meta_device():
    with torch.device("meta"):
        layer = SparseDeltaMemory(SparseDeltaMemoryConfig(**{**BASE, **INIT}))
    assert layer.memory.is_meta
    layer.to_empty(device="cpu")
    for parameter in layer.state_dict().values():
        parameter.fill_(77)
    torch.manual_seed(3)
    layer.init_weights()
    check_initial_values(layer)
    assert (layer.query_bn.running_mean == 0).all() and (layer.key_bn.running_var == 1).all()
    assert exempt(layer) == {"A_log", "dt_bias", "memory"}


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "to", "assign"])
def test_copies(copied):
    layer = make_layer(**ALL).eval()
    if copied == "deepcopy":
        other = copy.deepcopy(layer)
    elif copied == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    elif copied == "to":
        other = copy.deepcopy(layer).float().double()
    else:
        with torch.device("meta"):
            other = SparseDeltaMemory(layer.config).eval()
        other.load_state_dict(layer.state_dict(), assign=True)
    assert exempt(other) == exempt(layer) == {"A_log", "dt_bias", "memory"}
    x = make_x(2, 5, layer)
    assert_same(other(x)[0], layer(x)[0], 1e-5 if copied == "to" else 0)


# The dense limit


def gated_delta_net(layer, x):
    """Gated DeltaNet: S = exp(g) S (I - beta k k^T) + beta v k^T per token, S of shape [D, d_k]; o = S q."""
    heads, (width,), dim = layer.config.num_heads, layer.config.factors, layer.config.head_dim
    q, k, v = (
        proj(x).unflatten(-1, (heads, -1)) for proj in (layer.Wq_read, layer.Wk_write, layer.Wv_write)
    )
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    decay = torch.exp(-layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias))
    beta = torch.sigmoid(layer.b_proj(x))
    s = x.new_zeros(x.shape[0], heads, dim, width)
    out = []
    for t in range(x.shape[1]):
        erase = torch.eye(width, dtype=x.dtype) - beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None, :]
        s = decay[:, t, :, None, None] * (s @ erase)
        s = s + beta[:, t, :, None, None] * v[:, t, :, :, None] * k[:, t, :, None, :]
        out.append((s @ q[:, t, :, :, None]).squeeze(-1))
    return layer.Wo(torch.stack(out, 1).flatten(2)), s.transpose(2, 3).flatten(0, 2)


@pytest.mark.parametrize("width", [7, 256])
def test_the_dense_limit_is_gated_delta_net(width):
    layer = make_layer(
        slots_per_head=width,
        product_key_factor_dims=(width,),
        num_writes=width,
        num_reads=width,
        read_act="l2_normalize",
        write_act="l2_normalize",
        backprop_on_memory=False,
        chunk_size=5,
        A_init_range=(0.5, 4),
    )
    x = make_x(2, 13, layer).requires_grad_()
    y, state = layer(x)
    expected_y, expected_bank = gated_delta_net(layer, x)
    assert_same(y, expected_y)
    assert_same(state.bank, expected_bank)
    expected = gradients(layer, (expected_y, expected_bank), [x])
    for name, gradient in gradients(layer, (y, state.bank), [x]).items():
        assert_same(gradient, expected[name])


def test_a_refused_state_leaves_the_layer_as_it_was():
    layer = make_layer(query_batchnorm=True).train()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(ValueError, match="bank has shape"):
        layer(torch.randn(2, 5, layer.config.dim), layer.init_state(3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
