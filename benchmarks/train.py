"""Training: each case as a whole, and one case with every way to keep overwritten rows.

A train step is a forward and its backward, from the readings to every float input. Its values come first: readings,
final bank and gradients on a few tokens against float64; then, on the whole case, bit by bit: the saving call's outputs
against those of a call without gradients, a second step, and the replay of a captured one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sdm_compile import sdm_write_read

from . import measure
from .cases import TrainCase, WriteReadCase, few_tokens, write_read_inputs

OUTPUTS = ("readings", "final bank")
GRADIENTS = ("memory", "k_val", "v", "beta", "g", "q_val")
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # norm-relative, against float64
ROUNDED = ("k_val", "g", "q_val")  # the gradients that depend on how overwritten rows were kept
ROUNDING = {"none": 0.0, "fp8": 6e-2, "int4": 2e-1, "recompute": 0.0}
"""How far those may be from `none`'s, norm-relative, by snapshot_quant; with 0, every bit is the same."""


@dataclass(frozen=True)
class Training:
    """A call in training, and the gradient that its readings are given."""

    inputs: list[Tensor]
    dreadings: Tensor
    chunk: int

    @classmethod
    def of(cls, inputs: list[Tensor], chunk: int) -> Training:
        v = inputs[3]
        generator = torch.Generator(device=v.device).manual_seed(1)
        dreadings = torch.randn(v.shape, device=v.device, generator=generator).to(v.dtype)
        return cls._requiring_grad(inputs, dreadings, chunk)

    @classmethod
    def _requiring_grad(cls, inputs: list[Tensor], dreadings: Tensor, chunk: int) -> Training:
        return cls([x.detach().requires_grad_(x.is_floating_point()) for x in inputs], dreadings, chunk)

    def exact(self) -> Training:
        """The same numbers in float64, on the CPU."""
        *inputs, dreadings = measure.exact([*self.inputs, self.dreadings])
        return self._requiring_grad(inputs, dreadings, self.chunk)

    def outputs(self, mode: str = "none", grad: bool = True) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(grad):
            return sdm_write_read(*self.inputs, chunk_size=self.chunk, snapshot_quant=mode)

    def gradients(self, readings: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(readings, [x for x in self.inputs if x.requires_grad], self.dreadings)

    def step(self, mode: str = "none") -> tuple[Tensor, ...]:
        return self.gradients(self.outputs(mode)[0])

    def values(self, mode: str = "none") -> dict[str, Tensor]:
        """What a step computes, by name."""
        readings, bank = self.outputs(mode)
        names = (*OUTPUTS, *GRADIENTS)
        return dict(zip(names, (readings.detach(), bank.detach(), *self.gradients(readings)), strict=True))


def few_tokens_row(case: WriteReadCase, device: str) -> dict[str, object]:
    """Errors against float64 on a few tokens of two streams at most."""
    few = Training.of(few_tokens(replace(case, batch=1, heads=min(2, case.streams)), device), case.chunk)
    found, expected = few.values(), few.exact().values()
    errors = {name: measure.relative_error(found[name], expected[name]) for name in expected}
    error, worst = max(errors[name] for name in OUTPUTS), max(GRADIENTS, key=errors.__getitem__)
    row: dict[str, object] = {
        "case": case.name,
        "error": f"{error:.1e}",
        "worst gradient's error": f"{errors[worst]:.1e} ({worst})",
    }
    right = error < measure.TOLERANCE[case.dtype] and errors[worst] < GRADIENT_TOLERANCE[case.dtype]
    return row if right else row | {"wrong": True}


def other_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names in `found` whose tensors are not bit by bit what was expected."""
    return [name for name, x in found.items() if not measure.same_bits(x, expected[name])]


def repeats(training: Training) -> bool:
    """Whether a call without gradients, a second step, and a replayed one give the bits of the first step."""
    first = training.values()
    without = dict(zip(OUTPUTS, training.outputs(grad=False), strict=True))
    again = dict(zip(GRADIENTS, training.step(), strict=True))
    if other_bits(without, first) or other_bits(again, first):
        return False
    graph, gradients = measure.captured(training.step)
    graph.replay()
    return not other_bits(dict(zip(GRADIENTS, gradients, strict=True)), first)


def train_row(case: TrainCase, device: str = "cuda") -> dict[str, object]:
    call, row = case.call, few_tokens_row(case.call, device)
    if "wrong" in row:
        return row
    training = Training.of(write_read_inputs(call, device), call.chunk)
    peak, _ = measure.peak_gib(training.step)
    if not repeats(training):
        return row | {"wrong": True}
    saving = measure.milliseconds(training.outputs, calls=3)
    eager = measure.milliseconds(training.step, calls=3, repeats=measure.HOST_REPEATS)
    host = measure.host_milliseconds(training.step)
    graph = measure.replay_ms(training.step)
    return row | {
        "graph ms": f"{graph:.2f}",
        "x published": f"{graph / case.published_graph:.2f}",
        "eager ms": f"{eager:.2f}",
        "x published eager": f"{eager / case.published_eager:.2f}",
        "saving forward ms": f"{saving:.2f}",
        "x published saving": f"{saving / case.published_saving:.2f}",
        "host ms": f"{host:.2f}",
        "peak GiB": f"{peak:.2f}",
        "x published peak": f"{peak / case.published_peak:.2f}",
        "share of floor": f"{case.floor / graph:.0%}",
        "ratio": graph / case.published_graph,
    }


def mode_rows(case: WriteReadCase, modes: Sequence[str], device: str = "cuda") -> Iterator[dict[str, object]]:
    """A case with each snapshot_quant, `none` first, which the others are compared with."""
    if "wrong" in few_tokens_row(case, device):
        yield {"snapshot_quant": "none", "wrong": True}
        return
    training = Training.of(write_read_inputs(case, device), case.chunk)
    none = {name: x.cpu() for name, x in training.values("none").items()}  # where it counts in no peak
    figures: list[tuple[float, float]] = []
    for mode in modes:
        found = training.values(mode)
        different = other_bits(found, none)
        errors = {name: measure.relative_error(found[name], none[name]) for name in ROUNDED}
        del found
        row: dict[str, object] = {
            "snapshot_quant": mode,
            **{f"{name}'s gradient off by": f"{error:.1e}" for name, error in errors.items()},
            "bits differ in": ", ".join(different) or "nothing",
        }
        rounded = set(ROUNDED) if ROUNDING[mode] else set()
        if max(errors.values()) > ROUNDING[mode] or not rounded.issuperset(different):
            yield row | {"wrong": True}
            if not figures:  # `none` itself: there is nothing to compare with
                return
            continue
        step = partial(training.step, mode)
        peak, _ = measure.peak_gib(step)
        eager = measure.milliseconds(step, calls=3)
        figures.append((eager, peak))
        yield row | {
            "eager ms": f"{eager:.2f}",
            "x none": f"{eager / figures[0][0]:.2f}",
            "peak GiB": f"{peak:.2f}",
            "x none's peak": f"{peak / figures[0][1]:.2f}",
        }
