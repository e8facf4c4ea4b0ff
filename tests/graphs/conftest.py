"""The ways in which training steps run: eagerly on the CPU, captured on a GPU, and on the CPU through graphs that are
made of Python. Those capture by a run whose effects are undone, and replay by another run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdm_compile.graphs import CaptureError, TrainGraph, host_state, train
from sdm_compile.graphs.capture import Captured
from tests.graph_training import WAYS, Way


@contextmanager
def uncached() -> Iterator[None]:
    """As captures are: autocast keeps no copies of parameters."""
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


class PythonGraph:
    """What stands for a CUDA graph: replays by a run."""

    def __init__(self, call: Callable[[], Any], result: Any) -> None:
        self.call, self.result = call, result

    def pool(self) -> None: ...

    def replay(self) -> None:
        with uncached():
            results = self.call()
        for old, new in zip(self.result, results, strict=True):
            if old is not None:
                old.copy_(new)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    if request.param != "python graphs":
        return Way("cuda" if request.param == "cuda graphs" else "cpu", request.param == "cuda graphs")
    way = Way("cpu", True)
    optimizers: list[torch.optim.Optimizer] = []

    def capture(call: Callable[[], Any], device: torch.device, pool: None) -> Captured[Any]:
        states = [x for o in optimizers for s in o.state.values() for x in s.values() if isinstance(x, Tensor)]
        tensors = [x for m in way.models for x in (*m.parameters(), *m.buffers())] + states
        before, random = [x.detach().clone() for x in tensors], torch.get_rng_state()
        try:
            with uncached():
                result = call()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        finally:
            torch.set_rng_state(random)
            for x, old in zip(tensors, before, strict=True):
                x.data.copy_(old)
        return Captured(PythonGraph(call, result), result)

    def init(self: TrainGraph, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        original(self, model, loss, optimizer, **settings)
        optimizers.append(optimizer)
        self._captures = True
        self._hold_learning_rates()

    original = TrainGraph.__init__
    monkeypatch.setattr(TrainGraph, "__init__", init)
    monkeypatch.setattr(TrainGraph, "_follow_stream", lambda self: None)
    monkeypatch.setattr(train, "capture", capture)
    monkeypatch.setattr(train, "refuse_while_capturing", lambda device, what: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(host_state, "_on_host", lambda x: False)
    monkeypatch.setattr(host_state, "numeric_settings", lambda device: torch.are_deterministic_algorithms_enabled())
    return way
