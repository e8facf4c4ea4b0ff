"""Capture and replay. So far: who is asking (`ops.situation`), and a pool of states for requests that come and go."""

from ..ops.situation import Situation, current_situation
from .pool import StatePool

__all__ = ["Situation", "StatePool", "current_situation"]
