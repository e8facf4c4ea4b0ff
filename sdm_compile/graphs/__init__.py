"""Capture and replay: a decode step as a graph, a pool of states for requests, and who is asking (`ops.situation`)."""

from ..ops.situation import Situation, current_situation
from .capture import CaptureError
from .decode import DecodeGraph
from .pool import StatePool

__all__ = ["CaptureError", "DecodeGraph", "Situation", "StatePool", "current_situation"]
