"""Who is asking: an eager call, one that is being captured into a CUDA graph, or a tracer that runs fake kernels."""

from __future__ import annotations

from enum import Enum

import torch


class Situation(Enum):
    EAGER = "eager"
    CAPTURING = "capturing"
    TRACING = "tracing"


def current_situation(device: torch.device) -> Situation:
    """The situation of the call that is running on `device` now. Meant for inside an op's kernel."""
    if device.type == "meta":
        return Situation.TRACING
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Situation.CAPTURING
    return Situation.EAGER
