"""Where the time of a step goes.

Times are the host's. On a GPU the host runs ahead, so a phase there shows when its work was
queued, and what is left of the step is waited for at its end, under communication.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["forward", "backward", "communication", "optimizer", "data"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "communication", "optimizer", "data")

_seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
_inner: list[float] = []


@contextmanager
def watch(phase: Phase) -> Iterator[None]:
    """Charge the time within to ``phase``, less what other phases inside it take."""
    _inner.append(0.0)
    began = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - began
        _seconds[phase] += took - _inner.pop()
        if _inner:
            _inner[-1] += took


def lap() -> dict[Phase, float]:
    """Seconds per phase since the last call."""
    taken = dict(_seconds)
    _seconds.update(dict.fromkeys(PHASES, 0.0))
    return taken
