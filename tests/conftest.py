"""What every test runs under: a fixed seed, fresh memory poisoned with NaN, no compiled code left over from another
test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config
import torch._inductor.config

# Inductor's cache does not know what a fake kernel returns, so that it would serve stale code after a change to one.
torch._inductor.config.fx_graph_cache = False
torch._functorch.config.enable_autograd_cache = False


if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as there are cores
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def fresh_start() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` returns NaN (the largest value for integers), so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
