"""Capture and replay: a decode step or a training step as a graph, a pool of states for requests, and who is asking."""

from ..ops.situation import Situation, current_situation
from .capture import CaptureError
from .decode import DecodeGraph
from .pool import StatePool
from .train import TrainGraph

__all__ = ["CaptureError", "DecodeGraph", "Situation", "StatePool", "TrainGraph", "current_situation"]
