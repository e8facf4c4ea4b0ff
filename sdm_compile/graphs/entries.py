"""Which objects of a state have entries to choose from."""

from __future__ import annotations

from typing import Any


def chooses(part: Any) -> bool:
    """Whether it is a state of which `at(entries)` chooses entries."""
    return hasattr(part, "at")
