"""The rows that each token writes, sorted, against a loop over the entries; in a process of their own."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted import in_the_interpreter, run_interpreted

pytest.importorskip("triton")
from sdm_compile.ops.row_writes_kernels import empty_row_writes, row_writes_call


def test_in_a_process_of_its_own() -> None:
    run_interpreted(__file__)


@in_the_interpreter
@pytest.mark.parametrize("ordinals", [True, False])
@pytest.mark.parametrize(
    ("steps", "streams", "chunk", "writes"), [(1, 1, 1, 1), (2, 1, 5, 3), (1, 3, 9, 16), (1, 1, 2, 200)]
)
def test_rows_by_what_they_take(steps: int, streams: int, chunk: int, writes: int, ordinals: bool) -> None:
    random = torch.Generator().manual_seed(writes)
    size = (steps, streams, chunk, writes)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=random, dtype=torch.int32)

    slot, link, ordinal = integers(-1, 9), integers(-1, 3), integers(0, 99)
    weight = torch.randn(size, generator=random)
    decay = torch.where(integers(0, 3) > 0, torch.rand(size, generator=random), -1.0)
    decay[integers(0, 9) == 0] = float("nan")  # a slot whose gates are not a number is written, too
    out = empty_row_writes(size[:3], writes, weight, ordinals)
    for x in out:
        if x is not None:
            x.fill_(-7)
    row_writes_call(slot, (decay, link), weight, ordinal if ordinals else None, out).launch()

    flat = [x.flatten(0, 2).tolist() for x in (slot, decay, weight, link, ordinal)]
    found = [None if x is None else x.flatten(0, 2).tolist() for x in out]
    for t, entries in enumerate(zip(*flat, strict=True)):
        written = [e for e in zip(*entries, strict=True) if e[0] >= 0 and not e[1] < 0]
        expected = [e for e in written if e[3] >= 0] + [e for e in written if e[3] < 0]
        assert (found[5][t], found[6][t]) == (sum(e[3] >= 0 for e in written), len(written))
        for name, got in enumerate(found[:5]):
            if got is not None:
                rest = [type(got[t][0])(-7)] * (writes - len(expected))
                assert repr(got[t]) == repr([e[name] for e in expected] + rest)  # nan is itself then
