"""Checks values, then times every case and writes the tables: `python -m benchmarks.run` on a machine with a GPU.

Each case is timed as a CUDA graph replay and eagerly (back-to-back calls), medians of five, of 25 where eager calls
wait for the host: decode steps, and the cases of training. A case whose values are wrong gets no time: they are
compared with float64 on some of its tokens and slots (top-k: with the CPU, on all), and the write/read's bank, readings
and gradients bit by bit between the eager call and the replay. The tables replace those of the same subjects in
benchmarks/RESULTS.md, and `python -m benchmarks.plot` draws the inference ones.
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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from sdm_compile import product_key_topk, sdm_decode_step, sdm_write_read, sdm_write_read_
from sdm_compile.ops.launch import StepLoop, free_captured_loops, own_memory
from sdm_compile.ops.write_read_cuda import call_loops

from .cases import (
    BANDWIDTH,
    DECODE,
    RESULTS,
    TOP_K,
    TRAIN,
    WRITE_READ,
    DecodeCase,
    WriteReadCase,
    decode_inputs,
    few_tokens,
    write_read_inputs,
)
from .generate import generate_rows
from .measure import (
    HOST_REPEATS,
    TOLERANCE,
    captured,
    exact,
    host_milliseconds,
    milliseconds,
    peak_gib,
    relative_error,
    replay_ms,
    same_bits,
)
from .train import mode_rows, train_row


def write_read_row(case: WriteReadCase) -> dict[str, object]:
    short = few_tokens(case, "cuda")
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

    peak, before = peak_gib(call)
    eager = milliseconds(call, calls=3)
    host = host_milliseconds(call)
    (replay, replayed), begin = captured(call), memory.clone()
    memory.copy_(begin)
    eager_readings, eager_bank = call(), memory.clone()
    memory.copy_(begin)
    replay.replay()
    if not (same_bits(memory, eager_bank) and same_bits(replayed, eager_readings)):
        return row | {"wrong": True}
    del begin, eager_bank, eager_readings
    graph = milliseconds(replay.replay)
    del replay
    loops = call_loops(memory, inputs, case.chunk, torch.empty_like(replayed))
    coupled = sum(map(coupling_ms, itertools.chain.from_iterable(loops)))
    free_captured_loops()
    return row | {
        "graph ms": f"{graph:.2f}",
        "x published": f"{graph / case.published_graph:.2f}",
        "eager ms": f"{eager:.2f}",
        "x published eager": f"{eager / case.published_eager:.2f}",
        "host ms": f"{host:.2f}",
        "extra GiB": f"{peak - before:.2f}",
        "x published extra": f"{(peak - before) / case.published_extra:.2f}",
        "share of floor": f"{case.floor / graph:.0%}",
        "Phase 1 and solve ms": f"{coupled:.2f}",
        "ratio": graph / case.published_graph,
    }


def coupling_ms(loop: StepLoop) -> float:
    """Phase 1 and the solve of one slab, by themselves."""
    memory = own_memory(loop, torch.device("cuda"))
    loop.stage(memory)
    return replay_ms(lambda: loop.couple(memory, None))


COLD_START = """
import time
import torch
from benchmarks.cases import WRITE_READ, write_read_inputs
from sdm_compile import sdm_write_read_
memory, *inputs = write_read_inputs(WRITE_READ[0], "cuda", tokens=4096)
torch.cuda.synchronize()
start = time.perf_counter()
with torch.no_grad():
    sdm_write_read_(memory, *inputs, chunk_size=WRITE_READ[0].chunk)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def cold_start_rows() -> Iterator[dict[str, object]]:
    """The first no-grad call of a new process, with an empty cache of compiled kernels and with a full one."""
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty", "full"):
            done = subprocess.run(
                [sys.executable, "-c", COLD_START],
                env=os.environ | {"TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            yield {"Triton's cache": name, "first call s": f"{float(done.stdout):.1f}"}


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

    graph = replay_ms(same) / 160 * 1e3
    rotated = replay_ms(rotating) / 160 * 1e3
    eager = milliseconds(lambda: sdm_decode_step(memory, *inputs), calls=300, repeats=HOST_REPEATS) * 1e3
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
    graph = replay_ms(lambda: product_key_topk(scores, (256, 256), k))
    eager = milliseconds(lambda: product_key_topk(scores, (256, 256), k), calls=20)
    return row | {"graph ms": f"{graph:.3f}", "eager ms": f"{eager:.3f}", "x published": f"{graph / published:.2f}"}


def table(rows: list[dict[str, object]]) -> str:
    names = [name for name in max(rows, key=len) if name != "ratio"]
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    for row in rows:
        missing = "wrong values" if "wrong" in row else ""
        lines.append("| " + " | ".join(str(row.get(name, missing)) for name in names) + " |")
    return "\n".join(lines)


def sections(text: str) -> dict[str, str]:
    """The sections of a text by their titles, without what stands above the first one."""
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1].strip() for part in text.split("\n## ")[1:]}


def section(rows: list[dict[str, object]], command: str) -> str:
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    parts = [f"{datetime.date.today()}, {torch.cuda.get_device_name()}, {versions}; `{command}`.", table(rows)]
    ratios = [ratio for row in rows if isinstance(ratio := row.get("ratio"), float)]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        parts.append(f"Geometric mean of graph time over the published one: {mean:.3f}.")
    return "\n\n".join(parts)


SHAPES = table(
    [
        {
            "case": case.name,
            "batch": case.batch,
            "heads": case.heads,
            "tokens": case.tokens,
            "writes": case.writes,
            "reads": case.reads,
            "chunk": case.chunk,
            "slots per head": case.slots_per_head,
            "head_dim": case.head_dim,
        }
        for case in WRITE_READ
    ]
)
TRAINING = "Training: a forward and its backward"
HEAD = f"""# Results

Medians of 5, of {HOST_REPEATS} for eager decode steps and for the eager steps of "{TRAINING}",
but for cold starts. "x published" divides by the published CUDA package's figure on the same kind of card. The floor is
the fewest bytes that device memory must move, over {BANDWIDTH / 1e12:.2f} TB/s. Errors are norm-relative, against
float64 on the rounded inputs. Training is a forward and its backward, from the readings to every float input; its peak
is all that is allocated, inputs included. The cases, in bfloat16 but for the one named fp32:

{SHAPES}
"""


def main() -> int:
    subjects: dict[str, tuple[str, Iterator[dict[str, object]]]] = {
        "forward": ("No-grad write/read, in place", map(write_read_row, WRITE_READ)),
        "train": (TRAINING, map(train_row, TRAIN)),
        "modes": (
            "Training with each snapshot_quant: flagship-32k",
            mode_rows(WRITE_READ[0], ("none", "fp8", "int4", "recompute")),
        ),
        "long": (
            "Training on 131,072 tokens: otherwise flagship-32k",
            mode_rows(replace(WRITE_READ[0], tokens=131072), ("none", "fp8", "recompute")),
        ),
        "decode": ("Decode step", map(decode_row, DECODE)),
        "generate": ("Generation with the main job's model, untrained, float32", generate_rows()),
        "topk": ("Product-key top-k, two factors of 256, bfloat16", itertools.starmap(top_k_row, TOP_K)),
        "cold": ("Cold start: flagship-32k's first call in a new process, 4096 tokens", cold_start_rows()),
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=subjects, default=list(subjects))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("the benchmarks need a CUDA GPU")
        return 1
    torch.set_grad_enabled(False)
    wrong, kept = False, sections(args.output.read_text()) if args.output.exists() else {}
    for subject in args.only:
        title, made = subjects[subject]
        rows = []
        for row in made:
            rows.append(row)
            print(row, flush=True)
            torch.cuda.empty_cache()
        wrong |= any("wrong" in row for row in rows)
        kept[title] = section(rows, f"python -m benchmarks.run --only {subject}")
        # The tables first, in their order; then what else stood there, which was written by hand.
        order = [title for title, _ in subjects.values() if title in kept]
        order += [title for title in kept if title not in order]
        args.output.write_text("\n".join([HEAD, *(f"## {title}\n\n{kept[title]}\n" for title in order)]))
    print(args.output.read_text())
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
