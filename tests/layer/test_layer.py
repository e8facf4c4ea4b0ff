"""The layer against SPEC section 7 read aloud, its dtypes, its parameters and its dense limit."""

import copy
import itertools
import math
import pickle
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from sdm_compile import SDMState, SparseDeltaMemory, SparseDeltaMemoryConfig, UnsupportedConfigurationError
from sdm_compile import layer as layer_module
from sdm_compile.ops.snapshot import CALL_MODES
from tests.layer_spec import ALL, BASE, VARIANTS, assert_same, gradients, make_layer, make_x, spec_layer

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


def test_arguments_of_other_kinds_are_refused():
    with pytest.raises(TypeError, match="config is a int; expected a SparseDeltaMemoryConfig"):
        SparseDeltaMemory(64)
    layer = make_layer(torch.float32)
    for batch in (-1, 4.0):
        with pytest.raises(ValueError, match=f"batch is {batch}; expected the number of sequences"):
            layer.init_state(batch)
    x = make_x(2, 5, layer, dtype=torch.float32)
    with pytest.raises(UnsupportedConfigurationError, match=r"autocast is for torch\.float16"):
        with torch.autocast("cpu", torch.float16):
            layer(x)
    with pytest.raises(UnsupportedConfigurationError, match=r"x has dtype torch.float16; .* bfloat16 or float32"):
        layer.half()(x.half())


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


@pytest.mark.parametrize("setting", ["swap", "overwrite"])
def test_weight_decay_marks_outlast_a_conversion(setting):
    """However PyTorch puts the converted parameters in place; and `to_empty`, before the weights are drawn."""
    layer = make_layer(torch.float32)
    choose = getattr(torch.__future__, f"set_{setting}_module_params_on_conversion")
    choose(True)
    try:
        layer.double()
    finally:
        choose(False)
    assert layer.A_log.dtype == torch.float64
    assert exempt(layer) == {"A_log", "dt_bias", "memory"}
    assert exempt(layer.to("meta").to_empty(device="cpu")) == {"A_log", "dt_bias", "memory"}


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
