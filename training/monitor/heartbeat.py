"""A rank's sign of life: what it does and since when, in one small node-local file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

_WIDTH = 128


class Heartbeat:
    """Overwrites one fixed-width line, so that a reader never sees half of it. Off without a folder."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self._fd: int | None = None
        if folder:
            path = Path(folder) / f"rank{rank:05d}"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def beat(self, phase: str, step: int) -> None:
        """``phase`` is start, load, step, save or done."""
        if self._fd is not None:
            record = {"phase": phase, "step": step, "time": time.time(), "pid": os.getpid()}
            os.pwrite(self._fd, json.dumps(record).ljust(_WIDTH - 1).encode() + b"\n", 0)
