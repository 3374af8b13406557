"""Which checkpoints of a run may go, and how they go.

Only folders with the name of a checkpoint are ever touched; ``best-step-100`` and ``step_10.bak`` are a
person's. Only committed checkpoints that a resumed run could start from, by a manifest that is whole, count
towards those to keep.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcrun.manifest import (
    MANIFEST,
    ManifestError,
    checkpoints_newest_first,
    manifest_whole,
    read_manifest,
    superseder,
)
from hpcrun.records import RunDir, parse_checkpoint_name, resumed_steps

_READING = "reading."
_READER_SILENT = 600
"""Seconds after which a reader that no longer touches its mark counts as gone."""


def removable(
    run: RunDir,
    *,
    unfinished_before: int,
    keep: int | None,
    keep_every: int | None = None,
    keep_best: int | None = None,
) -> list[Path]:
    """Checkpoints that retention lets go, and what failed saves have left.

    The newest that a run could resume from is never among them, nor one that somebody is reading.

    Args:
        unfinished_before: folders without a manifest go if their attempt is below this one.
        keep: the newest so many stay, and any newer one whose manifest is damaged, which does not count;
            None keeps all.
        keep_every: those of steps that are multiples of it stay for ever.
        keep_best: the so many with the lowest loss stay.
    """
    starts = resumed_steps(run)
    committed = list(checkpoints_newest_first(run))
    good = [one for one in committed if not superseder(starts, one[0], one[1])]
    newest = _newest([path for _, _, path in good], keep or 1)
    kept = {path for _, _, path in good} if keep is None else set(newest)
    if keep_every:
        kept |= {path for step, _, path in good if step % keep_every == 0}
    if keep_best:
        kept |= set(_best([path for _, _, path in good], keep_best))
    doomed = [path for _, _, path in committed if path not in kept]
    if not newest:
        doomed = []
    doomed += _unfinished(run, unfinished_before)
    ours = [path for path in doomed if path.is_dir() and not path.is_symlink()]
    return [path for path in ours if not _being_read(path)]


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint: its manifest first, because a folder without one is no checkpoint.

    Raises:
        OSError: it could not be deleted whole.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """While inside, retention leaves ``folder`` alone. In a folder of someone else's: without effect."""
    mark = folder / f"{_READING}{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    done = threading.Event()

    def keep_fresh() -> None:
        while not done.wait(_READER_SILENT / 10):
            with suppress(OSError):
                os.utime(mark)

    try:
        mark.touch(mode=0o640)
    except OSError:
        yield
        return
    toucher = threading.Thread(target=keep_fresh, daemon=True)
    toucher.start()
    try:
        yield
    finally:
        done.set()
        toucher.join()
        with suppress(OSError):
            mark.unlink()


def _newest(folders: list[Path], keep: int) -> list[Path]:
    """Down to the ``keep``-th with a whole manifest; none where no manifest is whole."""
    whole = 0
    for count, folder in enumerate(folders, 1):
        whole += manifest_whole(folder)
        if whole == keep:
            return folders[:count]
    return folders if whole else []


def _best(folders: list[Path], count: int) -> list[Path]:
    """Those with the lowest loss; one without a loss, or whose manifest cannot be read, is none of them."""
    losses = []
    for folder in folders:
        with suppress(ManifestError):
            loss = read_manifest(folder).state.get("loss")
            if isinstance(loss, int | float):
                losses.append((loss, folder.name, folder))
    return [folder for _, _, folder in sorted(losses)[:count]]


def _unfinished(run: RunDir, before: int) -> list[Path]:
    if not run.checkpoints.is_dir():
        return []
    named = [(parse_checkpoint_name(entry.name), entry) for entry in sorted(run.checkpoints.iterdir())]
    return [
        entry for parsed, entry in named if parsed and parsed[1] < before and not (entry / MANIFEST).exists()
    ]


def _being_read(folder: Path) -> bool:
    for mark in folder.glob(f"{_READING}*"):
        with suppress(OSError):
            if time.time() - mark.stat().st_mtime < _READER_SILENT:
                return True
    return False
