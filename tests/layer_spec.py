"""What the tests of the layer share: small layers, SPEC section 7 read aloud, and gradients to compare."""

import itertools

import torch
from torch.nn import functional as F

from sdm_compile import SparseDeltaMemory, SparseDeltaMemoryConfig, reference

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
