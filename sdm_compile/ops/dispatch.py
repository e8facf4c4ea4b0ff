"""What the latest calls decided: `last_dispatch()`. Shapes and choices only, never a device read."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .situation import Situation


@dataclass(frozen=True)
class Dispatch:
    """The decisions of one call."""

    op: str  # the registered op that ran
    route: str  # which implementation: "cpu", "triton"; of a forward on CUDA "triton in one launch", "triton by step"
    situation: Situation
    layout: int | None  # snapshot layout: 2 compact rows, 4 no rows, 6 versions of rows; None: no chunked call
    writer: str | None  # the stage that writes the snapshot's rows
    steps: int
    streams: int
    tokens: int
    writes: int
    reads: int
    chunk_size: int
    head_dim: int
    num_slots: int


@dataclass(frozen=True)
class LastDispatch:
    """The latest forward, backward and decode call of this thread; None where there was none yet."""

    forward: Dispatch | None = None
    backward: Dispatch | None = None
    decode: Dispatch | None = None


_thread = threading.local()


def thread_records() -> dict[str, Dispatch]:
    """This thread's latest calls; to be handed to `record_for` by another one."""
    return vars(_thread)


def record_for(records: dict[str, Dispatch], kind: str) -> None:
    """Copies this thread's latest call of that kind to another thread's: autograd runs backwards in one of its own."""
    if kind in vars(_thread):
        records[kind] = vars(_thread)[kind]


def record(kind: str, dispatch: Dispatch) -> None:
    """Keeps `dispatch` as this thread's latest call of that kind: "forward", "backward" or "decode", drafts too."""
    setattr(_thread, kind, dispatch)


def last_dispatch() -> LastDispatch:
    """What the latest forward, backward and decode of this thread decided.

    Returns:
        `LastDispatch`, frozen. Calls that only trace, and replays of a CUDA graph, do not update it. A backward on CUDA
        counts for the thread that ran its forward; in a compiled function, for autograd's own.
    Note: SPEC section 4.
    """
    return LastDispatch(**vars(_thread))
