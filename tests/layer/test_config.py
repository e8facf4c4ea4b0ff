"""The settings: their defaults, what is refused and how it is said."""

import dataclasses
import json

import pytest
import torch

from sdm_compile import SparseDeltaMemoryConfig
from sdm_compile.config import ACTIVATIONS
from sdm_compile.layer import _activation

DEFAULTS = {
    "num_heads": 1,
    "slots_per_head": 10000,
    "num_writes": 64,
    "num_reads": 64,
    "chunk_size": None,
    "read_act": "Softmax",
    "write_act": "Softmax",
    "read_act_scale": 1.0,
    "write_act_scale": 1.0,
    "normalize_readings": False,
    "norm_eps": 1e-6,
    "A_init_range": (0, 16),
    "backprop_on_memory": True,
    "output_gate": False,
    "query_batchnorm": False,
    "key_weighted_decay": False,
    "snapshot_quant": "none",
    "grad_bank_fp32": False,
    "product_key_factor_dims": None,
}


def test_defaults():
    config = SparseDeltaMemoryConfig(48)
    assert dataclasses.asdict(config) == {"dim": 48, **DEFAULTS}
    assert config.factors == (100, 100)
    assert config.tokens_per_chunk == 64


def test_derived_sizes():
    config = SparseDeltaMemoryConfig(48, 3, slots_per_head=120, product_key_factor_dims=(4, 5, 6), chunk_size=7)
    assert (config.head_dim, config.factors, config.key_size, config.tokens_per_chunk) == (16, (4, 5, 6), 45, 7)


def test_survives_json():
    config = SparseDeltaMemoryConfig(8, slots_per_head=64, product_key_factor_dims=(2, 32), A_init_range=(1, 4))
    again = SparseDeltaMemoryConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config and hash(again) == hash(config)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"dim": 0}, "dim is 0; it must be an integer at least 1"),
        ({"dim": 48.0}, "dim is 48.0; it must be an integer"),
        ({"num_heads": 5}, "dim is 48 and num_heads 5"),
        ({"num_heads": True}, "num_heads is True; it must be an integer"),
        ({"slots_per_head": 0}, "slots_per_head is 0; it must be an integer at least 1"),
        ({"slots_per_head": 120}, "120, not a square; .* such as 100 or 121, or set product_key_factor_dims"),
        ({"product_key_factor_dims": (10, 11)}, r"product 110; the product must be slots_per_head, which is 10000"),
        ({"product_key_factor_dims": 100}, "product_key_factor_dims is 100; expected the width of each factor"),
        ({"product_key_factor_dims": ()}, r"product_key_factor_dims is \(\); it must be one or more integers"),
        ({"product_key_factor_dims": (-100, -100)}, "it must be one or more integers of at least 1"),
        ({"num_writes": 0}, "num_writes is 0; it must be an integer from 1 to 256"),
        ({"num_reads": 257}, "num_reads is 257; it must be an integer from 1 to 256"),
        ({"num_reads": 10, "num_writes": 9, "slots_per_head": 9}, "num_reads is 10; it must be an integer from 1 to 9"),
        ({"chunk_size": 0}, "chunk_size is 0; it must be an integer from 1 to 256"),
        ({"chunk_size": 257}, "chunk_size is 257"),
        ({"read_act": "softmax"}, "read_act is 'softmax'; choose one of 'Softmax', 'l2_normalize', "),
        ({"write_act": "Threshold"}, "write_act is 'Threshold'"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0; it must be at least 0"),
        ({"A_init_range": (2, 1)}, r"A_init_range is \(2, 1\)"),
        ({"A_init_range": (1,)}, r"A_init_range is \(1,\)"),
        ({"A_init_range": 3}, r"A_init_range is \(3,\)"),
        ({"A_init_range": ("a", "b")}, r"A_init_range is \('a', 'b'\)"),
        ({"A_init_range": (0, float("inf"))}, "A_init_range is .* it must be"),
        ({"snapshot_quant": "fp4"}, "snapshot_quant is 'fp4'; choose one of 'none', 'bf16', 'fp8', "),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SparseDeltaMemoryConfig(**{"dim": 48, **settings})


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_tokens_apart(name):
    act = _activation(name, 2.0).eval()
    scores = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    others = scores.clone()
    others[1, 2] = 5.0
    same = (act(scores) == act(others)).all(-1)
    same[1, 2] = True
    assert same.all()
