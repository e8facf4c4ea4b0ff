"""README.md does what it says: each Python block is executed, each command is run, here or by `.ci/run`."""

import re
import shlex
from contextlib import chdir
from pathlib import Path

import pytest
import torch

from sdm_compile.cli import main
from sdm_compile.machine import why_not_compile

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[tuple[int, str]]:
    """Every fenced block of a language: the number of the line before its code, and the code."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README[: match.start(1)].count("\n"), match[1]) for match in found]


PYTHON = blocks("python")
COMMANDS = {line for _, code in blocks("bash") for line in code.splitlines()}

# The commands that `.ci/run` runs as they stand.
RUN_BY_CI = {'pip install -e ".[test]"', "python -m pytest -n auto", "python -m sdm_compile"}

# The commands that run here, in this order, each with what makes it small enough for a test. Without arguments the main
# job is `train` with its defaults, so that `train` stands among what is added to it.
SMALL = "--no-compile --batch 2 --length 32 --sample 5 --dim 16 --num-layers 1 --slots-per-head 16 --num-heads 1"
SMALL += " --num-writes 2 --num-reads 2"
RUN_HERE = {
    "python -m sdm_compile": f"train {SMALL} --steps 2",
    'python -m sdm_compile generate --prompt "The "': "--max-tokens 5",
    "python -m sdm_compile train --text README.md CONTRIBUTING.md --out my-run --steps 100": f"{SMALL} --steps 2",
    "python -m sdm_compile train --out my-run --resume --steps 200": f"{SMALL} --steps 3",
    "python -m sdm_compile doctor": "",
}


def test_every_block_is_checked():
    """A fenced block in a language that nothing here reads would go unchecked."""
    fences = re.findall(r"^```(.*)$", README, re.MULTILINE)
    assert set(fences[::2]) == {"python", "bash", "text"}
    assert set(fences[1::2]) == {""}


def test_every_command_is_run():
    assert COMMANDS == RUN_BY_CI | set(RUN_HERE)


def test_links_lead_to_files():
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the main job has been run."""
    folder = tmp_path_factory.mktemp("readme")
    with chdir(folder):
        assert main(shlex.split(RUN_HERE["python -m sdm_compile"])) == 0
    return folder


@pytest.mark.parametrize("line, code", PYTHON, ids=[f"line-{line + 1}" for line, _ in PYTHON])
def test_python_block_runs(line, code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    reason = why_not_compile()
    if "torch.compile" in code and reason:
        pytest.skip(reason)
    torch.manual_seed(0)
    exec(compile("\n" * line + code, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", sorted(RUN_BY_CI))
def test_ci_runs(command):
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert command in [re.split(r" [|>#]", line)[0].strip() for line in script]


def test_commands_run(tmp_path, monkeypatch):
    """One after the other, in a folder with nothing but the files that they name."""
    monkeypatch.chdir(tmp_path)
    for name in ("README.md", "CONTRIBUTING.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for command, small in RUN_HERE.items():
        arguments = shlex.split(f"{command} {small}")
        assert arguments[:3] == ["python", "-m", "sdm_compile"]
        assert main(arguments[3:]) == 0, command
