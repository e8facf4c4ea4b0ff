"""Draws the tables of benchmarks/RESULTS.md: `python -m benchmarks.plot`, with matplotlib, on any machine.

Log-log: for every case the floor on the horizontal axis, and on the vertical one the time of the published package and
ours. A perfect kernel would lie on the line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .cases import DECODE, RESULTS, WRITE_READ

PICTURE = RESULTS.with_name("results.svg")


def column(text: str, title: str, name: str) -> dict[str, float]:
    """The column `name` of the table under the heading that begins with `title`, by the table's first column."""
    section = text.split(f"## {title}", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    at = rows[0].index(name)
    return {row[0]: float(row[at]) for row in rows[2:]}


Point = tuple[str, float, float, float]  # case, floor, published, ours


def points(text: str) -> dict[str, list[Point]]:
    """What each panel shows, by its title; floors that say nothing are left out."""
    forward, decode = column(text, "No-grad write/read", "graph ms"), column(text, "Decode step", "graph us")
    steps = [c for c in DECODE if c.floor]
    return {
        "write/read, ms": [(c.name, c.floor, c.published_graph, forward[c.name]) for c in WRITE_READ],
        "decode step, us": [(f"batch {c.batch}", c.floor, c.published_graph, decode[c.name]) for c in steps],
    }


def draw(text: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sdm"  # the same tables give the same file
    from matplotlib import pyplot

    panels = points(text)
    figure, every_axes = pyplot.subplots(1, len(panels), figsize=(10, 4.5), layout="constrained")
    for axes, (title, cases) in zip(every_axes, panels.items(), strict=True):
        cases = sorted(cases, key=lambda case: (case[1], case[3]))
        _, floors, published, ours = zip(*cases, strict=True)
        axes.loglog(floors, floors, color="gray", linestyle="--", label="floor: bytes / 4.25 TB/s")
        axes.loglog(floors, published, "o", color="tab:orange", label="published CUDA")
        axes.loglog(floors, ours, "s", color="tab:blue", label="sdm_compile")
        for i, (name, floor, _, time) in enumerate(cases):
            left = i % 2 == 1
            axes.annotate(
                *(name, (floor, time), (-7 if left else 7, -3)),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=8,
            )
        axes.margins(x=0.25)
        axes.set_title(title)
        axes.set_xlabel("floor")
    every_axes[0].set_ylabel("CUDA graph replay")
    every_axes[0].legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=PICTURE)
    args = parser.parse_args()
    draw(args.results.read_text(), args.output)
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
