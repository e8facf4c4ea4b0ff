"""The benchmark's inputs are what a call takes, and without a GPU it says so."""

from dataclasses import replace

import pytest
import torch

from benchmarks import plot, run
from benchmarks.cases import DECODE, RESULTS, WRITE_READ, decode_inputs, write_read_inputs
from sdm_compile import repeated_write_slots, sdm_decode_step, sdm_write_read


def test_write_read_inputs() -> None:
    case = replace(WRITE_READ[0], batch=2, slots_per_head=144, head_dim=8, writes=7, reads=5, chunk=4)
    memory, *inputs = write_read_inputs(case, "cpu", tokens=9)
    repeated_write_slots()
    readings, _ = sdm_write_read(memory, *inputs, chunk_size=case.chunk)
    assert readings.shape == (case.streams, 9, 8) and readings.isfinite().all()
    assert repeated_write_slots() == 0
    for ids in (inputs[0], inputs[5]):
        assert (ids.diff(dim=-1) > 0).all()
        stream = ids // case.slots_per_head
        assert torch.equal(stream, torch.arange(case.streams).view(-1, 1, 1).expand_as(ids))


def test_decode_inputs() -> None:
    case = replace(DECODE[0], slots_per_head=100, head_dim=8, width=6)
    first, second = decode_inputs(case, "cpu", sets=2)
    assert first[0] is second[0] and not torch.equal(first[1], second[1])
    assert sdm_decode_step(*first).shape == (2, 8)


def test_table() -> None:
    rows = [{"case": "a", "ms": "1.0", "ratio": 2.0}, {"case": "b", "wrong": True}]
    assert run.table(rows).splitlines()[2:] == ["| a | 1.0 |", "| b | wrong values |"]


def test_without_a_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["run"])
    assert run.main() == 1
    assert "GPU" in capsys.readouterr().out


def test_readme_says_what_the_results_say() -> None:
    results = RESULTS.read_text()
    readme = " ".join((RESULTS.parent.parent / "README.md").read_text().split())
    for subject, said in {"No-grad": "takes", "Decode step": "a decode step", "Product-key": "the top-k"}.items():
        ratios = plot.column(results, subject, "x published").values()
        assert f"{said} {min(ratios):.2f} to {max(ratios):.2f}" in readme
    cold = plot.column(results, "Cold start", "first call s")
    assert f"takes {cold['empty']} s with an empty cache of compiled kernels and {cold['full']} s with a full" in readme


def test_a_run_replaces_its_own_tables_alone() -> None:
    text = RESULTS.read_text()
    found = run.sections(text)
    assert list(found)[-1] == "What was tried"
    assert text == "\n".join([run.HEAD, *(f"## {title}\n\n{body}\n" for title, body in found.items())])


def test_every_case_is_drawn() -> None:
    panels = plot.points(RESULTS.read_text())
    assert [len(cases) for cases in panels.values()] == [len(WRITE_READ), sum(c.floor > 0 for c in DECODE)]
    drawn = RESULTS.with_name("results.svg").read_text()
    assert all(f"<!-- {case[0]} -->" in drawn for cases in panels.values() for case in cases)


def test_drawing(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(RESULTS.read_text(), tmp_path / "results.svg")
    assert "<!-- flagship-32k -->" in (tmp_path / "results.svg").read_text()
