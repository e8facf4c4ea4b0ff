"""Capture and replay: a decode step as a graph, and who is asking (`ops.situation`)."""

from ..ops.situation import Situation, current_situation
from .capture import CaptureError

__all__ = ["CaptureError", "Situation", "current_situation"]
