"""What this machine can do: the device to run on, and whether torch.compile can build for it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch._inductor import cpp_builder, exc


def pick_device(name: str | None = None) -> torch.device:
    """The device to run on: the CPU unless another is named.

    Raises:
        ValueError: torch does not know the name, the device is not there, or the ops have no kernels for it.
    """
    try:
        device = torch.device(name or "cpu")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"cannot use device {name!r}: the ops have no kernels for it; use cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either where a device is not there
        why = str(error).splitlines()[0]
        raise ValueError(
            f"cannot use device {name!r}: {why}; use one that this machine and this PyTorch have"
        ) from error
    return device


def describe_device(device: torch.device) -> str:
    """A few words that name the device in a report."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"


def why_not_compile() -> str | None:
    """Why torch.compile cannot build code on this machine, or None where it can.

    Inductor's code is C++ that is built against Python's own headers.
    """
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "no C++ compiler was found"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's C headers (Python.h) were not found"
    return None
