"""The commands, run as users run them, on a model that trains in moments."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdm_compile import cli, doctor, machine
from sdm_compile.checkpoint import Checkpoint, load_language_model
from sdm_compile.cli import main
from sdm_compile.text import Corpus

STEPS = 6
SUMMARY = re.compile(
    r"^validation (\d+\.\d\d) -> (\d+\.\d\d) bits/byte \| training [\d,]+ tokens/s \| decode [\d,]+ tokens/s \| "
    r"cpu, \d+ threads?$",
    re.MULTILINE,
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"".join(b"%d little bytes, and %d more. " % (i, i * i) for i in range(60)))
    return path


def settings(text: Path, out: Path, **changed: object) -> list[str]:
    """Arguments of a small training run."""
    options = {
        "steps": STEPS, "batch": 2, "length": 24, "warmup": 1, "lr": 0.02, "dim": 16, "num-layers": 1, "hidden-dim": 16,
        "num-heads": 2, "slots-per-head": 16, "num-writes": 2, "num-reads": 3, "chunk-size": 8, "sample": 8,
    } | {name.replace("_", "-"): value for name, value in changed.items()}  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["train", "--no-compile", "--text", str(text), "--out", str(out), *words]


def resume(out: Path, *more: str) -> list[str]:
    return ["train", "--no-compile", "--resume", "--sample", "3", "--out", str(out), *more]


def same_checkpoint(a: Path, b: Path) -> bool:
    files = [folder / cli.CHECKPOINT for folder in (a, b)]
    tensors = [load_file(file) for file in files]
    metadata = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            metadata.append(json.loads(opened.metadata()["run"]))
    same = tensors[0].keys() == tensors[1].keys() and all(torch.equal(tensors[0][k], tensors[1][k]) for k in tensors[0])
    return same and metadata[0] == metadata[1]


def test_train_reports(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(settings(text, tmp_path / "run", steps=40)) == 0
    out, err = capfd.readouterr()
    start, end = map(float, SUMMARY.search(out).groups())
    assert abs(start - 8) < 0.3
    assert end < 5
    assert re.search(r"decode equals full forward: largest difference \d\.\de-0[5-9], 0 of \d+ bytes beyond 1e-03", out)
    assert "training: 100%" in err


def test_options_alone_are_those_of_train(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command, *options = settings(text, tmp_path / "run")
    assert command == "train" and main(options) == 0
    assert "bits/byte" in capfd.readouterr().out


def test_no_arguments_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_train", lambda args: (args.out, args.resume, args.no_compile, hasattr(args, "steps")))
    assert main([]) == (Path("sdm-run"), False, False, False)


def test_train_fails_where_decoding_differs(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    differences = torch.full((100,), 1e-6)
    monkeypatch.setattr(cli, "decode_differences", lambda model, forward, tokens: differences)
    differences[:5] = 0.01
    assert main(settings(text, tmp_path / "run")) == 0
    assert "decode equals full forward: largest difference 1.0e-02, 5 of 100" in capfd.readouterr().out
    differences[:6] = float("nan")
    assert main(settings(text, tmp_path / "run")) == 1
    differences[:6] = 0.01
    assert main(settings(text, tmp_path / "run")) == 1
    assert "decode DIFFERS FROM full forward" in capfd.readouterr().out


def test_a_diverged_run_fails(text: Path, tmp_path: Path) -> None:
    """Also where it does so at its last step, whose loss is that of the parameters before it."""
    for i, options in enumerate(([], ["--steps", "1"])):
        with pytest.raises(SystemExit, match=r"the loss is|diverged"):
            main([*settings(text, tmp_path / f"run{i}"), "--lr", "1e30", *options])
        assert not any((tmp_path / f"run{i}").iterdir())


@pytest.mark.parametrize(("argument", "unbuffered"), [("doctor", ""), ("doctor", "1"), ("--help", "")])
def test_a_reader_that_has_read_enough_ends_the_command(argument: str, unbuffered: str) -> None:
    command, pipe = [sys.executable, "-m", "sdm_compile", argument], subprocess.PIPE
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "Error" not in process.stderr.read()
    assert process.returncode == cli.BROKEN_PIPE


def test_a_command_without_an_output_works() -> None:
    done = subprocess.run(f"{sys.executable} -m sdm_compile doctor >&-", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise BrokenPipeError("not the output")

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(BrokenPipeError, match="not the output"):
        cli.run()


@pytest.mark.parametrize("moment", ["forward", "optimizer", "evaluation"])
def test_interrupted_and_resumed_run_equals_an_uninterrupted_one(
    moment: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(settings(text, tmp_path / "whole", seed=3)) == 0
    original = torch.optim.AdamW.step, Corpus.batch
    done = []

    def interrupted_step(self: torch.optim.AdamW, *args: object) -> object:
        done.append("step")
        if len(done) == 3:
            signal.raise_signal(signal.SIGINT)
        return original[0](self, *args)

    def interrupted_batch(self: Corpus, step: int, *args: int) -> torch.Tensor:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return original[1](self, step, *args)

    def interrupted_evaluation(*args: object) -> float:
        raise KeyboardInterrupt

    out = tmp_path / "parts"
    with monkeypatch.context() as patch:
        if moment == "optimizer":
            patch.setattr(torch.optim.AdamW, "step", interrupted_step)
        elif moment == "forward":
            patch.setattr(Corpus, "batch", interrupted_batch)
        else:
            patch.setattr(cli, "evaluate", interrupted_evaluation)
        assert main(settings(text, out, seed=3)) == cli.INTERRUPTED
    expected = 0 if moment == "evaluation" else 3
    assert f"stopped after step {expected}; --resume goes on" in capfd.readouterr().err
    assert Checkpoint.load(out / cli.CHECKPOINT).step == expected
    assert main(["generate", "--checkpoint", str(out / cli.CHECKPOINT), "--max-tokens", "3"]) == 0

    torch.manual_seed(99)
    assert main(resume(out)) == 0
    assert same_checkpoint(tmp_path / "whole", out)
    assert "validation" in capfd.readouterr().out


def test_a_second_interrupt_waits_for_the_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Checkpoint.save

    def interrupt(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def interrupted_save(self: Checkpoint, path: Path) -> None:
        interrupt()
        original(self, path)

    monkeypatch.setattr(cli, "_learn", interrupt)
    monkeypatch.setattr(Checkpoint, "save", interrupted_save)
    path = tmp_path / "run" / cli.CHECKPOINT
    assert main(settings(text, path.parent)) == cli.INTERRUPTED
    assert Checkpoint.load(path).step == 0


def test_a_broken_pipe_leaves_a_checkpoint(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_learn", fail)
    path = tmp_path / "run" / cli.CHECKPOINT
    with pytest.raises(BrokenPipeError):
        main(settings(text, path.parent))
    assert Checkpoint.load(path).step == 0


def test_an_interrupt_before_the_first_step(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run" / cli.CHECKPOINT
    assert main(settings(text, path.parent)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(cli, "_forward", lambda *args: signal.raise_signal(signal.SIGINT))
        assert main(settings(text, path.parent)) == cli.INTERRUPTED
    assert Checkpoint.load(path).step == 0
    assert Checkpoint.load(path.with_name(f"previous-{path.name}")).step == STEPS
    assert main(resume(path.parent)) == 0


def test_an_interrupt_of_the_last_save(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, saves = Checkpoint.save, []

    def interrupted_save(self: Checkpoint, path: Path) -> None:
        saves.append(self.step)
        if len(saves) == 1:
            signal.raise_signal(signal.SIGINT)
        original(self, path)

    monkeypatch.setattr(Checkpoint, "save", interrupted_save)
    path = tmp_path / "run" / cli.CHECKPOINT
    assert main(settings(text, path.parent)) == cli.INTERRUPTED
    assert saves == [STEPS, STEPS]
    assert Checkpoint.load(path).step == STEPS


def test_a_run_without_a_progress_bar(text: Path, tmp_path: Path) -> None:
    words = " ".join([sys.executable, "-m", "sdm_compile", *settings(text, tmp_path / "run")])
    assert subprocess.run(f"{words} 2>&-", shell=True, capture_output=True).returncode == 0


def test_checkpoints_are_saved_on_the_way(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    original = Checkpoint.save
    monkeypatch.setattr(Checkpoint, "save", lambda self, path: (steps.append(self.step), original(self, path)))
    assert main(settings(text, tmp_path / "run", save_every=2)) == 0
    assert steps == [2, 4, 6, 6]


def test_resuming_a_finished_run_reports_again(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(settings(text, tmp_path / "run")) == 0
    first = re.search(r"validation .* bits/byte", capfd.readouterr().out)[0]
    assert main(resume(tmp_path / "run")) == 0
    out = capfd.readouterr().out
    assert first in out
    assert "training too short to time" in out


def test_resume_may_change_steps_and_where_the_text_is(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(settings(text, out)) == 0
    assert main(resume(out, "--steps", "8", "--lr", "0.02")) == 0  # the value that it has
    assert Checkpoint.load(out / cli.CHECKPOINT).step == 8
    with pytest.raises(SystemExit, match="the checkpoint is at step 8: --steps must not be less, got 7"):
        main(resume(out, "--steps", "7"))
    for option, name in (("--lr", "lr"), ("--dim", "dim")):
        with pytest.raises(SystemExit, match=f"the checkpoint has {name} = .*, which cannot become 32"):
            main(resume(out, option, "32"))
    moved = text.rename(text.with_name("moved"))
    with pytest.raises(SystemExit, match=f"{text}'; if the run's text has moved, say with --text where it is now"):
        main(resume(out))
    assert main(resume(out, "--text", str(moved))) == 0
    assert main(resume(out)) == 0
    moved.write_bytes(moved.read_bytes() + b".")
    with pytest.raises(SystemExit, match="not the one that the run began with"):
        main(resume(out))


def test_new_run_keeps_the_previous_checkpoint(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(settings(text, out)) == 0
    old = (out / cli.CHECKPOINT).read_bytes()
    assert main(settings(text, out, seed=1)) == 0
    kept = out / f"previous-{cli.CHECKPOINT}"
    assert kept.read_bytes() == old
    assert f"kept as {kept}\n" in capfd.readouterr().out
    assert main(settings(text, out, seed=2)) == 0
    assert f"kept as {kept}, in place of the one that was kept there" in capfd.readouterr().out


def test_refusals(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for arguments, message in [
        (resume(out), "no checkpoint at"),
        (settings(tmp_path / "missing", out), "No such file"),
        (settings(text, out, batch=0), "batch must be at least 1"),
        (settings(text, out, length=100000), "too few for a window"),
        (settings(text, out, slots_per_head=17), "not a square"),
        (settings(text, out, device="nowhere"), "cannot use device 'nowhere'"),
    ]:
        with pytest.raises(SystemExit, match=f"error: .*{message}"):
            main(arguments)
    assert not out.exists()
    with pytest.raises(SystemExit, match=r"error: .*File exists"):
        main(settings(text, text))


# Checkpoints


def test_checkpoint_files(text: Path, tmp_path: Path) -> None:
    assert main(settings(text, tmp_path / "run")) == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == [cli.CHECKPOINT]
    path = tmp_path / "run" / cli.CHECKPOINT
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format_version"] == "1"
    tensors = load_file(path)
    later = tmp_path / "later.safetensors"
    save_file(tensors, later, metadata | {"format_version": "2"})
    other = tmp_path / "other.safetensors"
    save_file(tensors, other)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes()[:100])
    run = json.loads(metadata["run"])
    unknown, unnamed, short = (tmp_path / f"{name}.safetensors" for name in ("unknown", "unnamed", "short"))
    save_file(tensors, unknown, metadata | {"run": json.dumps(run | {"model": {"depth": 3}})})
    save_file(tensors, unnamed, {name: value for name, value in metadata.items() if name != "run"})
    save_file({name: x for name, x in tensors.items() if "head" not in name}, short, metadata)
    for file, message in [
        (unknown, "does not say what a run needs: .*depth"),
        (unnamed, "does not say what a run needs: 'run'"),
        (short, "tensors are not those of its model: .*head"),
        (later, "format version 2; this one reads 1"),
        (other, "not a language model checkpoint"),
        (broken, "not a safetensors file"),
        (tmp_path / "none", "no checkpoint at"),
    ]:
        with pytest.raises(SystemExit, match=message):
            main(["generate", "--checkpoint", str(file)])
    assert main(["generate", "--checkpoint", str(path.parent), "--max-tokens", "3"]) == 0


def test_failed_save_leaves_the_older_checkpoint(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    assert main(settings(text, out)) == 0
    path = out / cli.CHECKPOINT
    checkpoint, before = Checkpoint.load(path), path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in out.iterdir()] == [cli.CHECKPOINT]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_bytes(b"abcdefgh " * 100)
    assert main(settings(folder / "text", folder, steps=60)) == 0
    return folder / cli.CHECKPOINT


@pytest.mark.parametrize("device", [None, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_is_loaded_by_one_call(device: str | None, trained: Path) -> None:
    """From the folder or the file, as a path or its name."""
    tensors = load_file(trained)
    for path in (trained, str(trained), trained.parent, str(trained.parent)):
        model = load_language_model(path) if device is None else load_language_model(path, device)
        assert model.config.dim == 16 and model.config.num_reads == 3 and not model.training
        for name, x in model.state_dict().items():
            assert x.device.type == (device or "cpu") and torch.equal(x.cpu(), tensors[f"model.{name}"])
    tokens = torch.tensor([list(b"abcdefgh abc")], device=device or "cpu")
    assert model(tokens)[0][0, -1].argmax() == ord("d")
    with pytest.raises(FileNotFoundError, match=f"no checkpoint at {trained.parent.parent / cli.CHECKPOINT}"):
        load_language_model(trained.parent.parent)
    with pytest.raises(ValueError, match="text is not a safetensors file"):
        load_language_model(trained.parent / "text")


def test_generate_loads_as_users_do(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(cli, "load_language_model", lambda *args: (calls.append(args), load_language_model(*args))[1])
    assert main(["generate", "--checkpoint", str(trained.parent), "--max-tokens", "1"]) == 0
    assert calls == [(trained.parent, torch.device("cpu"))]


# Generation


def test_generation(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> str:
        capfd.readouterr()
        assert main(["generate", "--checkpoint", str(trained), *options]) == 0
        return capfd.readouterr().out

    greedy = run("--prompt", "abcdefgh abc", "--temperature", "0", "--max-tokens", "12")
    assert greedy == "abcdefgh abcdefgh abcdefg"[:24] + "\n"
    hot = ["--prompt", "abc", "--temperature", "3", "--max-tokens", "40"]
    assert run(*hot, "--seed", "1") == run(*hot, "--seed", "1") != run(*hot, "--seed", "2")
    assert run(*hot, "--seed", "1", "--top-p", "1e-9") == run(*hot, "--temperature", "0")
    assert run("--prompt", "abcdefgh abc", "--temperature", "0", "--stop", "xyz", "--stop", "gh") == "abcdefgh abcdef\n"
    assert run("--prompt", "abc", "--max-tokens", "0") == "abc\n"
    assert run("--prompt", "ü", "--max-tokens", "0") == "ü\n"
    with pytest.raises(SystemExit, match="top_p must be above 0"):
        run("--top-p", "0")
    with pytest.raises(SystemExit, match="at least one byte"):
        run("--prompt", "")
    for seed in ("-1", str(2**32)):
        with pytest.raises(SystemExit, match=f"seed must be from 0 to 4294967295, got {seed}"):
            run("--seed", seed)


# The machine


def test_without_a_compiler(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", None)
    arguments = settings(text, tmp_path / "run")
    arguments.remove("--no-compile")
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert main(arguments) == 0
        assert "no C++ compiler was found: running uncompiled" in capfd.readouterr().out
        assert main(["doctor"]) == 0
    assert re.search(r"torch.compile +not available: no C\+\+ compiler was found", capfd.readouterr().out)


def test_compiles_whole_where_asked(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: (calls.append(options), model)[1])
    monkeypatch.setattr(cli, "why_not_compile", lambda: None)
    train = settings(text, tmp_path / "run")
    generate = ["generate", "--checkpoint", str(tmp_path / "run" / cli.CHECKPOINT), "--max-tokens", "2"]
    assert [main(train), main(generate), len(calls)] == [0, 0, 0]
    train.remove("--no-compile")
    assert [main(train), main([*generate, "--compile"]), len(calls)] == [0, 0, 2]
    assert all(options["fullgraph"] for options in calls)


def test_without_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.cpp_builder, "get_cpp_compiler", lambda: "c++")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert machine.why_not_compile() is None
    (tmp_path / "Python.h").unlink()
    assert "Python.h" in machine.why_not_compile()


def test_doctor(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) == 0
    out = capfd.readouterr().out
    assert f"torch          {torch.__version__}" in out
    assert out.count(" ok") == 4
    original = doctor.sdm_decode_step
    monkeypatch.setattr(doctor, "sdm_decode_step", lambda *args: original(*args) * 1.001)
    assert main(["doctor"]) == 1
    assert re.search(r"sdm_decode_step +\d\.\de-\d\d FAILED", capfd.readouterr().out)


def test_run_as_a_module() -> None:
    command = [sys.executable, "-m", "sdm_compile", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert re.search(r"train .*\n +generate .*\n +doctor .*", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fly", "invalid choice: 'fly'"),
        ("train --save-every 0", "--save-every: must be at least 1, got 0"),
        ("train --sample -1", "--sample: must be at least 0, got -1"),
        ("generate --max-tokens -1", "--max-tokens: must be at least 0, got -1"),
        ("generate --max-tokens many", "--max-tokens: invalid number value: 'many'"),
    ],
)
def test_wrong_arguments(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "generate", "doctor"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"sdm_compile {command}" in capsys.readouterr().out
