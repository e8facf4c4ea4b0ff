"""Draws the tables of benchmarks/RESULTS.md: `python -m benchmarks.plot`, with matplotlib, on any machine.

One picture, log-log: for every case the floor on the horizontal axis, and on the vertical one the time of the published
package and ours. A perfect kernel would lie on the diagonal.
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


def points(text: str) -> list[tuple[str, float, float, float]]:
    """(case, floor, published, ours) in ms, where there is a floor to speak of."""
    forward = column(text, "No-grad write/read", "graph ms")
    decode = column(text, "Decode step", "graph us")
    found = [(c.name, c.floor, c.published_graph, forward[c.name]) for c in WRITE_READ]
    found += [
        (f"decode, batch {c.batch}", c.floor / 1e3, c.published_graph / 1e3, decode[c.name] / 1e3)
        for c in DECODE
        if c.floor
    ]
    return sorted(found, key=lambda point: point[1])


def draw(text: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sdm"  # the same tables give the same file
    from matplotlib import pyplot

    cases = points(text)
    floors = [floor for _, floor, _, _ in cases]
    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    axes.loglog(floors, floors, color="gray", linestyle="--", label="floor: bytes / 4.25 TB/s")
    axes.loglog(floors, [published for *_, published, _ in cases], "o", color="tab:orange", label="published CUDA")
    axes.loglog(floors, [ours for *_, ours in cases], "s", color="tab:blue", label="sdm_compile")
    for name, floor, published, ours in cases:
        axes.annotate(name, (floor, max(published, ours)), (0, 6), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xlabel("floor, ms")
    axes.set_ylabel("CUDA graph replay, ms")
    axes.legend()
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
