"""Checks values, then times every case and writes the tables: `python -m benchmarks.run` on a machine with a GPU.

Each case is timed as a CUDA graph replay and eagerly (back-to-back calls), medians of five. A case whose values are
wrong gets no time: they are compared with float64 on some of its tokens and slots, and bit by bit between the eager
call and the replay on all of them. The tables replace those in benchmarks/RESULTS.md, and `python -m benchmarks.plot`
draws them.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from sdm_compile import product_key_topk, sdm_decode_step, sdm_write_read, sdm_write_read_
from sdm_compile.ops.launch import StepLoop, free_captured_loops
from sdm_compile.ops.write_read_cuda import call_loops

from .cases import (
    BANDWIDTH,
    DECODE,
    RESULTS,
    TOP_K,
    WRITE_READ,
    DecodeCase,
    WriteReadCase,
    decode_inputs,
    write_read_inputs,
)

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}  # norm-relative, against float64 on the rounded inputs
NOTES = "## What was tried"  # from here on RESULTS.md is written by hand, and kept


def milliseconds(call: Callable[[], object], calls: int = 1, repeats: int = 5) -> float:
    """Median over `repeats` of the mean device time of `calls` back-to-back calls."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return sorted(times)[repeats // 2]


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return ((actual - expected).norm() / expected.norm()).item()


def exact(inputs: list[Tensor]) -> list[Tensor]:
    return [x.cpu().double() if x.is_floating_point() else x.cpu() for x in inputs]


def write_read_row(case: WriteReadCase) -> dict[str, object]:
    tokens = 3 * case.chunk + case.chunk // 2
    short = write_read_inputs(replace(case, slots_per_head=4096), "cuda", tokens)
    readings, bank = sdm_write_read(*short, chunk_size=case.chunk)
    want_readings, want_bank = sdm_write_read(*exact(short), chunk_size=case.chunk)
    error = max(relative_error(readings, want_readings), relative_error(bank, want_bank))
    row: dict[str, object] = {"case": case.name, "error": f"{error:.1e}"}
    if not error < TOLERANCE[case.dtype]:
        return row | {"wrong": True}
    del short, readings, bank, want_readings, want_bank
    memory, *inputs = write_read_inputs(case, "cuda")

    def call() -> Tensor:
        return sdm_write_read_(memory, *inputs, chunk_size=case.chunk)

    free_captured_loops()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    eager = milliseconds(call, calls=3)
    start = time.perf_counter()
    call()
    host = (time.perf_counter() - start) * 1e3
    replay, begin = captured(call), memory.clone()
    outcomes = []
    for run in (call, replay.replay):
        memory.copy_(begin)
        run()
        outcomes.append(memory.clone())
    if not torch.equal(*outcomes):
        return row | {"wrong": True}
    del begin, outcomes
    graph = milliseconds(replay.replay)
    del replay
    coupled = sum(coupling_ms(loop) for group in call_loops(memory, inputs, case.chunk, call()) for loop in group)
    free_captured_loops()
    return row | {
        "graph ms": f"{graph:.2f}",
        "x published": f"{graph / case.published_graph:.2f}",
        "eager ms": f"{eager:.2f}",
        "x published eager": f"{eager / case.published_eager:.2f}",
        "host ms": f"{host:.2f}",
        "extra GiB": f"{extra:.2f}",
        "x published extra": f"{extra / case.published_extra:.2f}",
        "share of floor": f"{case.floor / graph:.0%}",
        "Phase 1 and solve ms": f"{coupled:.2f}",
        "ratio": graph / case.published_graph,
    }


def coupling_ms(loop: StepLoop) -> float:
    """Phase 1 and the solve of one slab, by themselves."""
    memory = loop.make_memory()
    loop.stage(memory)
    return milliseconds(captured(lambda: loop.couple(memory)).replay)


COLD_START = """
import time
start = time.perf_counter()
import torch
from benchmarks.cases import WRITE_READ, write_read_inputs
from sdm_compile import sdm_write_read_
memory, *inputs = write_read_inputs(WRITE_READ[0], "cuda", tokens=4096)
torch.cuda.synchronize()
ready = time.perf_counter()
with torch.no_grad():
    sdm_write_read_(memory, *inputs, chunk_size=WRITE_READ[0].chunk)
torch.cuda.synchronize()
print(ready - start, time.perf_counter() - ready)
"""


def cold_start_rows() -> list[dict[str, object]]:
    """The first no-grad call of a new process, with an empty cache of compiled kernels and with a full one."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty", "full"):
            done = subprocess.run(
                [sys.executable, "-c", COLD_START],
                env=os.environ | {"TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            _, first = map(float, done.stdout.split())
            rows.append({"Triton's cache": name, "first call s": f"{first:.1f}"})
    return rows


def decode_row(case: DecodeCase) -> dict[str, object]:
    sets = decode_inputs(case, "cuda", sets=16)
    memory, *inputs = sets[0]
    bank, *few = decode_inputs(replace(case, slots_per_head=1024), "cuda")[0]
    want_bank, *want_few = exact([bank, *few])
    readings = sdm_decode_step(bank, *few)
    want = sdm_decode_step(want_bank, *want_few)
    error = max(relative_error(readings, want), relative_error(bank, want_bank))
    row: dict[str, object] = {"case": case.name, "error": f"{error:.1e}"}
    if not error < TOLERANCE[torch.bfloat16]:
        return row | {"wrong": True}

    def same() -> None:
        for _ in range(160):
            sdm_decode_step(memory, *inputs)

    def rotating() -> None:
        for i in range(160):
            sdm_decode_step(memory, *sets[i % 16][1:])

    graph = milliseconds(captured(same).replay) / 160 * 1e3
    rotated = milliseconds(captured(rotating).replay) / 160 * 1e3
    eager = milliseconds(lambda: sdm_decode_step(memory, *inputs), calls=300) * 1e3
    moved = case.batch * case.heads * 3 * case.width * case.head_dim * 2
    return row | {
        "graph us": f"{graph:.2f}",
        "x published": f"{graph / case.published_graph:.2f}",
        "rotating us": f"{rotated:.2f}",
        "rotating GB/s": f"{moved / rotated / 1e3:.0f}",
        "eager us": f"{eager:.1f}",
        "x published eager": f"{eager / case.published_eager:.2f}",
    }


def top_k_row(rows: int, k: int, published: float) -> dict[str, object]:
    scores = torch.randn(rows, 512, device="cuda").bfloat16()
    values, slots = product_key_topk(scores, (256, 256), k)
    want_values, want_slots = product_key_topk(scores.cpu(), (256, 256), k)
    row: dict[str, object] = {"rows": rows, "k": k}
    if not (torch.equal(values.cpu(), want_values) and torch.equal(slots.cpu(), want_slots)):
        return row | {"wrong": True}
    graph = milliseconds(captured(lambda: product_key_topk(scores, (256, 256), k)).replay)
    eager = milliseconds(lambda: product_key_topk(scores, (256, 256), k), calls=20)
    return row | {"graph ms": f"{graph:.3f}", "eager ms": f"{eager:.3f}", "x published": f"{graph / published:.2f}"}


def table(rows: list[dict[str, object]]) -> str:
    names = [name for name in max(rows, key=len) if name != "ratio"]
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    for row in rows:
        missing = "wrong values" if "wrong" in row else ""
        lines.append("| " + " | ".join(str(row.get(name, missing)) for name in names) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ("forward", "decode", "topk", "cold")
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("the benchmarks need a CUDA GPU")
        return 1
    torch.set_grad_enabled(False)
    parts = [
        "# Results",
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}; `python -m benchmarks.run --only {' '.join(args.only)}`. Medians of 5. "
        '"x published" divides by the published CUDA package\'s figure on the same kind of card. The floor is the '
        f"fewest bytes that device memory must move, over {BANDWIDTH / 1e12:.2f} TB/s. Errors are norm-relative, "
        "against float64 on the rounded inputs.",
    ]
    wrong = False
    subjects: dict[str, tuple[str, Iterator[dict[str, object]]]] = {
        "forward": ("No-grad write/read, in place", map(write_read_row, WRITE_READ)),
        "decode": ("Decode step", map(decode_row, DECODE)),
        "topk": ("Product-key top-k, two factors of 256, bfloat16", itertools.starmap(top_k_row, TOP_K)),
        "cold": ("Cold start: flagship-32k's first call in a new process, 4096 tokens", iter(cold_start_rows())),
    }
    for subject in args.only:
        title, made = subjects[subject]
        rows = []
        for row in made:
            rows.append(row)
            print(row, flush=True)
            torch.cuda.empty_cache()
        wrong |= any("wrong" in row for row in rows)
        parts += [f"## {title}", table(rows)]
        ratios = [ratio for row in rows if isinstance(ratio := row.get("ratio"), float)]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            parts.append(f"Geometric mean of graph time over the published one: {mean:.3f}.")
    if args.output.exists() and NOTES in args.output.read_text():
        parts.append(NOTES + args.output.read_text().split(NOTES)[1].rstrip())
    args.output.write_text("\n\n".join(parts) + "\n")
    print(args.output.read_text())
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
