"""The benchmark's inputs are what a call takes, wrong values get no time, and without a GPU it says so.

On the CPU every call takes 2 ms, its replay 1 ms, and it needs 3 GiB.
"""

import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import generate, measure, plot, run, train
from benchmarks.cases import DECODE, RESULTS, TRAIN, WRITE_READ, decode_inputs, few_tokens, write_read_inputs
from sdm_compile import repeated_write_slots, sdm_decode_step, sdm_write_read
from sdm_compile.graphs import DecodeGraph
from sdm_compile.lm import LMConfig

SMALL = replace(WRITE_READ[0], batch=2, tokens=11, slots_per_head=144, head_dim=8, writes=7, reads=5, chunk=4)
MODES = ("none", "fp8", "int4", "recompute")


@pytest.fixture
def figures(monkeypatch):
    """Stands in for what only a GPU can time; the calls are made."""

    def taking(time):
        return lambda call, **_: call() and time

    monkeypatch.setattr(measure, "milliseconds", taking(2.0))
    monkeypatch.setattr(measure, "host_milliseconds", taking(0.5))
    monkeypatch.setattr(measure, "replay_ms", taking(1.0))
    monkeypatch.setattr(measure, "peak_gib", taking((3.0, 1.0)))
    monkeypatch.setattr(measure, "kernel_us", lambda call, name: (call() and 4.0) or 5.0)
    monkeypatch.setattr(measure, "captured", lambda call: (SimpleNamespace(replay=lambda: None), call()))


def spoil(monkeypatch, name: str, when=lambda mode, made: True) -> None:
    """Doubles the gradient of `name` in the calls for which `when` holds, of a mode and of how many calls were made."""
    place, made = ("memory", "k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val").index(name), itertools.count()

    def call(*inputs, snapshot_quant, **settings):
        if when(snapshot_quant, next(made)) and inputs[0].dtype != torch.float64:
            inputs = [2 * x - x.detach() if i == place else x for i, x in enumerate(inputs)]
        return sdm_write_read(*inputs, snapshot_quant=snapshot_quant, **settings)

    monkeypatch.setattr(train, "sdm_write_read", call)


def test_write_read_inputs() -> None:
    memory, *inputs = write_read_inputs(SMALL, "cpu", tokens=9)
    repeated_write_slots()
    readings, _ = sdm_write_read(memory, *inputs, chunk_size=SMALL.chunk)
    assert readings.shape == (SMALL.streams, 9, 8) and readings.isfinite().all()
    assert repeated_write_slots() == 0
    for ids in (inputs[0], inputs[5]):
        assert (ids.diff(dim=-1) > 0).all()
        stream = ids // SMALL.slots_per_head
        assert torch.equal(stream, torch.arange(SMALL.streams).view(-1, 1, 1).expand_as(ids))


def test_few_tokens() -> None:
    memory, k_idx, *_ = few_tokens(replace(SMALL, slots_per_head=5000), "cpu")
    assert memory.shape == (4 * 4096, 8) and k_idx.shape == (4, 14, 7)
    assert len(few_tokens(SMALL, "cpu")[0]) == 4 * 144


def test_decode_inputs() -> None:
    case = replace(DECODE[0], slots_per_head=100, head_dim=8, width=6)
    first, second = decode_inputs(case, "cpu", sets=2)
    assert first[0] is second[0] and not torch.equal(first[1], second[1])
    assert sdm_decode_step(*first).shape == (2, 8)


def test_table() -> None:
    rows = [{"case": "a", "ms": "1.0", "ratio": 2.0}, {"case": "b", "wrong": True}]
    assert run.table(rows).splitlines()[2:] == ["| a | 1.0 |", "| b | wrong values |"]


def test_comparisons() -> None:
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([math.nan, 1.0])
    assert measure.same_bits(zero, zero.clone()) and measure.same_bits(nan, nan.clone())
    assert not measure.same_bits(zero, torch.tensor([-0.0, 1.0]))
    assert not measure.same_bits(zero, zero.view(torch.int32)) and not measure.same_bits(zero, zero[:1])
    assert measure.same_bits(torch.ones(2, 3).T, torch.ones(3, 2))
    assert measure.relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == 0.2
    assert measure.relative_error(nan, zero) == math.inf


def test_every_call_is_trained() -> None:
    assert [case.call for case in TRAIN] == WRITE_READ
    for case in TRAIN:
        assert case.floor < case.published_graph < case.published_eager
        assert case.call.floor < case.published_saving < case.published_eager


def test_training(figures) -> None:
    case = replace(TRAIN[0], call=replace(SMALL, name="small"), published_graph=4.0, published_peak=6.0, floor=0.25)
    row = train.train_row(case, "cpu")
    got = {name: row[name] for name in ("case", "graph ms", "x published", "eager ms", "peak GiB", "x published peak")}
    assert list(got.values()) == ["small", "1.00", "0.25", "2.00", "3.00", "0.50"]
    assert row["share of floor"] == "25%" and row["ratio"] == 0.25 and "wrong" not in row
    assert row["x published eager"] == f"{2 / 56.9:.2f}" and row["x published saving"] == f"{2 / 20.2:.2f}"
    assert 0 < float(row["error"]) < 2e-2
    worst, name = str(row["worst gradient's error"]).split()
    assert 0 < float(worst) < 3e-2 and name.strip("()") in train.GRADIENTS


@pytest.mark.parametrize("name", train.GRADIENTS)
def test_a_wrong_gradient_gets_no_time(name, figures, monkeypatch) -> None:
    spoil(monkeypatch, name)
    row = train.train_row(replace(TRAIN[0], call=SMALL), "cpu")
    assert row["wrong"] and f"({name})" in row["worst gradient's error"] and "graph ms" not in row


def test_only_what_repeats_itself_is_timed(figures, monkeypatch) -> None:
    training = train.Training.of(write_read_inputs(SMALL, "cpu"), SMALL.chunk)
    assert train.repeats(training)
    for call in (0, 2, 3):  # the first step, the second, the captured
        with monkeypatch.context() as patch:
            spoil(patch, "beta", lambda mode, made, call=call: made == call)
            assert not train.repeats(training)
    with monkeypatch.context() as patch:
        outputs = train.Training.outputs
        patch.setattr(train.Training, "outputs", lambda s, m="none", grad=True: [x + (not grad) for x in outputs(s, m)])
        assert not train.repeats(training)
        row = train.train_row(replace(TRAIN[0], call=SMALL), "cpu")
        assert row["wrong"] and "graph ms" not in row


def test_modes(figures) -> None:
    rows = {row["snapshot_quant"]: row for row in train.mode_rows(SMALL, MODES, "cpu")}
    assert list(rows) == list(MODES) and not any("wrong" in row for row in rows.values())
    for mode, row in rows.items():
        assert row["eager ms"] == "2.00" and row["peak GiB"] == "3.00"
        assert row["x none"] == row["x none's peak"] == "1.00"
        rounded = mode in ("fp8", "int4")
        assert row["bits differ in"] == ("k_val, g, q_val" if rounded else "nothing")
        assert all((float(row[f"{name}'s gradient off by"]) > 0) == rounded for name in train.ROUNDED)


@pytest.mark.parametrize(("mode", "name"), [("none", "v"), ("fp8", "memory"), ("int4", "g"), ("recompute", "q_val")])
def test_a_mode_with_wrong_gradients_gets_no_time(mode, name, figures, monkeypatch) -> None:
    # Two calls are for the few tokens, and the next one is the step of `none` that all are compared with.
    spoil(monkeypatch, name, lambda found, made: found == mode and made > 2)
    rows = {row["snapshot_quant"]: row for row in train.mode_rows(SMALL, MODES, "cpu")}
    assert [name for name, row in rows.items() if "wrong" in row] == [mode]
    assert "eager ms" not in rows[mode] and name in rows[mode]["bits differ in"]
    assert list(rows) == (["none"] if mode == "none" else list(MODES))


def test_modes_of_a_wrong_call_get_no_time(figures, monkeypatch) -> None:
    spoil(monkeypatch, "v")
    assert list(train.mode_rows(SMALL, MODES, "cpu")) == [{"snapshot_quant": "none", "wrong": True}]


LM = LMConfig(dim=16, num_layers=2, hidden_dim=16, num_heads=2, slots_per_head=16, num_writes=2, num_reads=3)


def test_generation(figures, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(generate, "EQUAL_STEPS", 5)
    text, *batches = generate.generate_rows("cpu", LM, steps=3)
    assert text["case"] == "batch 1, sampled by generate()" and text.keys() <= batches[0].keys()
    assert [row["case"] for row in batches] == ["batch 1, greedy", "batch 8, greedy", "batch 32, greedy"]
    for row in (text, *batches):
        rates = [float(str(row[name]).replace(",", "")) for name in ("eager tokens/s", "graph tokens/s")]
        assert "wrong" not in row and min(rates) > 0 and abs(float(str(row["x eager"])) - rates[1] / rates[0]) < 0.1
    for row in batches:
        names = ("step us", "host us", "decode op us per layer", "the op alone us", "op x alone", "the op's replay us")
        assert [row[name] for name in names] == ["2000.0", "500.0", "4.00", "5.00", "0.80", f"{1000 / 160:.2f}"]


def test_generation_that_differs_gets_no_time(figures, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)

    class Wrong(DecodeGraph):
        calls = 0

        def __call__(self, *inputs, entries=None):
            logits, state = super().__call__(*inputs, entries=entries)
            Wrong.calls += 1
            return (logits + 1e-6 if Wrong.calls % 40 == 39 else logits), state

    monkeypatch.setattr(generate, "DecodeGraph", Wrong)
    monkeypatch.setattr(generate, "EQUAL_STEPS", 40)
    text, *batches = generate.generate_rows("cpu", LM, steps=3)
    assert "wrong" not in text and all(row["wrong"] and "x eager" not in row for row in batches)
    monkeypatch.setattr(generate, "eager_text", lambda model: iter(range(50)))
    assert next(generate.generate_rows("cpu", LM, steps=3))["wrong"]


def test_a_run_of_training(figures, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(run, "TRAIN", [replace(case, call=replace(SMALL, name=case.call.name)) for case in TRAIN[:2]])
    monkeypatch.setattr(run, "train_row", partial(train.train_row, device="cpu"))
    monkeypatch.setattr(
        run, "mode_rows", lambda case, modes: train.mode_rows(replace(SMALL, tokens=case.tokens // 4096), modes, "cpu")
    )
    results = tmp_path / "RESULTS.md"
    results.write_text(RESULTS.read_text())
    monkeypatch.setattr("sys.argv", ["run", "--only", "train", "modes", "long", "--output", str(results)])
    with torch.enable_grad():  # which the run turns off
        assert run.main() == 0
    before, after = run.sections(RESULTS.read_text()), run.sections(results.read_text())
    training = [title for title in after if title.startswith("Training")]
    assert list(after)[1:4] == training and "`python -m benchmarks.run --only long`" in after[training[2]]
    assert {title: body for title, body in after.items() if title not in training} == {
        title: body for title, body in before.items() if title not in training
    }
    shares = plot.column(results.read_text(), training[0], "x published")
    assert shares == {case.call.name: round(1 / case.published_graph, 2) for case in TRAIN[:2]}
    assert f"published one: {(1 / 48.6 / 42.5) ** 0.5:.3f}." in after[training[0]]
    assert list(plot.column(results.read_text(), training[1], "peak GiB")) == list(MODES)
    assert list(plot.column(results.read_text(), training[2], "x none")) == ["none", "fp8", "recompute"]


def test_without_a_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["run"])
    assert run.main() == 1
    assert "GPU" in capsys.readouterr().out


def test_readme_says_what_the_results_say() -> None:
    results = RESULTS.read_text()
    readme = " ".join((RESULTS.parent.parent / "README.md").read_text().split())
    subjects = {
        "No-grad": "takes",
        "Training: a forward": "a train step",
        "Decode step": "a decode step",
        "Product-key": "the top-k",
    }
    for subject, said in subjects.items():
        ratios = plot.column(results, subject, "x published").values()
        assert f"{said} {min(ratios):.2f} to {max(ratios):.2f}" in readme
    eager, graph = (plot.column(results, "Training: a forward", name) for name in ("eager ms", "graph ms"))
    assert f"takes up to {max(eager[case] / graph[case] for case in graph):.1f} times as long as its replay" in readme
    faster = plot.column(results, "Generation", "x eager")["batch 1, greedy"]
    assert f"decodes {faster} times as many tokens per second through a `DecodeGraph`" in readme
    memory, time = (
        plot.column(results, "Training on 131,072", name)["recompute"] for name in ("x none's peak", "x none")
    )
    assert f"trains in {memory} of the memory and {time} times the time" in readme
    modes = "Training with each"
    off = [plot.column(results, modes, f"{name}'s gradient off by") for name in ("k_val", "g", "q_val")]
    fp8, int4 = (max(errors[mode] for errors in off) for mode in ("fp8", "int4"))
    assert f"in norm by up to {fp8:.0%} (fp8) or {int4:.0%} (int4)" in readme
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
