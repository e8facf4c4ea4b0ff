"""`python -m sdm_compile doctor`: what this machine has, and a check of the ops on it."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Callable

import torch
from torch import Tensor

from . import reference
from .machine import describe_device, why_not_compile
from .ops import product_key_topk, sdm_decode_step, sdm_write_read

TOLERANCE = 3e-5  # of norms, for float32


def examine(device: torch.device) -> int:
    """Prints what the machine has and the self-check; returns the exit status."""
    reason = why_not_compile()
    facts = {
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "torch.compile": "available" if reason is None else f"not available: {reason}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "device": describe_device(device),
    }
    for name, value in facts.items():
        print(f"{name:14} {value}")
    if torch.cuda.is_available() and device.type != "cuda":
        print("\nthe GPU is not checked: add --device cuda")
    errors = self_check(device)
    print(f"\nself-check against the reference, allowed {TOLERANCE:.0e}")
    for name, error in errors.items():
        print(f"  {name:28} {error:.1e} {'ok' if error <= TOLERANCE else 'FAILED'}")
    return 0 if all(error <= TOLERANCE for error in errors.values()) else 1


def self_check(device: torch.device) -> dict[str, float]:
    """Norm-relative differences of the public ops, in float32 on a device, from the reference in float64."""
    streams, tokens, factors, width, columns = 3, 50, (6, 6), 4, 8
    slots = math.prod(factors)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    scores = normal(streams, tokens, sum(factors))
    wanted_k, k_idx = reference.product_key_topk(scores, factors, width)
    found_k, found_idx = product_key_topk(scores.to(device), factors, width)
    first_row = slots * torch.arange(streams)[:, None, None]
    q_val, q_idx = reference.product_key_topk(normal(streams, tokens, sum(factors)), factors, width)
    memory, v = normal(streams * slots, columns), normal(streams, tokens, columns)
    beta, g = normal(streams, tokens, 1).sigmoid(), -normal(streams, tokens, 1).abs()
    inputs = [memory, k_idx + first_row, wanted_k.softmax(-1), v, beta, g, q_idx + first_row, q_val.softmax(-1)]
    weights = normal(streams, tokens, columns), normal(streams * slots, columns)

    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    wanted = _values_and_gradients(reference.write_read, exact, weights)
    found = _values_and_gradients(sdm_write_read, [x.to(device) for x in inputs], weights)
    values = slice(0, len(weights))
    token = [exact[0], *(x[:, 0] for x in exact[1:])]
    bank = memory.to(device).clone()
    reading = sdm_decode_step(bank, *(x[:, 0].to(device) for x in inputs[1:]))
    return {
        "product_key_topk": _difference([found_k, found_idx], [wanted_k, k_idx]),
        "sdm_write_read": _difference(found[values], wanted[values]),
        "sdm_write_read gradients": _difference(found[len(weights) :], wanted[len(weights) :]),
        "sdm_decode_step": _difference([reading, bank], list(reference.decode_step(*token))),
    }


def _values_and_gradients(
    op: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], weights: tuple[Tensor, ...]
) -> list[Tensor]:
    """An op's outputs, and the gradients of their weighted sum with respect to every float input."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = op(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, [w.to(o) for o, w in zip(outputs, weights, strict=True)])
    return [*(output.detach() for output in outputs), *gradients]


def _difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest norm-relative difference among pairs of tensors."""
    return max(
        float((a.cpu().double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, wanted, strict=True)
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
