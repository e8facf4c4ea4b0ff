"""Running tests in Triton's interpreter, which has to be chosen before Triton is imported: in another process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
without_the_interpreter = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def run_interpreted(file: str) -> None:
    """Runs a test file's interpreted tests. On a GPU, where the kernels themselves are tested, there is no need."""
    if INTERPRETED or torch.cuda.is_available():
        return
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
