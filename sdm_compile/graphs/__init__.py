"""Capture and replay. So far: who is asking (`ops.situation`)."""

from ..ops.situation import Situation, current_situation

__all__ = ["Situation", "current_situation"]
