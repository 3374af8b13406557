"""The folder in this node's memory where ranks keep copies of their state. The agent owns it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _LOCK = "hpcrun-", "lock"


@contextmanager
def node_memory(job_id: str, run: str, root: Path = SHARED_MEMORY) -> Iterator[Path | None]:
    """``/dev/shm/hpcrun-<job>-<run>/`` while the agent lives; None where there is no such place.

    What agents that were killed have left is removed first: theirs are the folders without a lock.
    """
    _sweep(root)
    folder = root / f"{_PREFIX}{job_id}-{run}"
    try:
        folder.mkdir(mode=0o700)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
