"""Which checkpoint is meant, and which there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.manifest import (
    MANIFEST,
    Manifest,
    ManifestError,
    checkpoints_newest_first,
    read_manifest,
    superseder,
)
from hpcrun.records import RunDir, parse_checkpoint_name, resumed_steps

NEWEST, SUPERSEDED, UNFINISHED, DAMAGED = "newest", "superseded", "unfinished", "damaged manifest"


@dataclass(frozen=True)
class Listed:
    """A folder with the name of a checkpoint. ``state`` is empty for one that is as it should be."""

    folder: Path
    step: int
    attempt: int
    state: str
    manifest: Manifest | None


def listed(run: RunDir) -> list[Listed]:
    """All folders with the name of a checkpoint, newest first.

    Raises:
        UserError: the folder cannot be read.
    """
    return list(_listed(run, _entries(run)))


def usable(run: RunDir) -> list[Path]:
    """Committed checkpoints that are not superseded, newest first; nothing of them has been read."""
    starts = resumed_steps(run)
    return [
        path for step, attempt, path in checkpoints_newest_first(run) if not superseder(starts, step, attempt)
    ]


def committed(run: RunDir) -> list[Path]:
    """Those with a manifest, superseded or not, newest first."""
    return [path for _, _, path in checkpoints_newest_first(run)]


def newest(run: RunDir, step: int | None = None) -> Path:
    """The newest checkpoint that the run could resume from, or that of ``step``.

    Raises:
        UserError: there is none.
    """
    try:
        found = usable(run)
    except OSError as error:
        raise UserError(f"{run.checkpoints}: cannot be read: {error.strerror}") from error
    for path in found:
        parsed = parse_checkpoint_name(path.name)
        if step is None or (parsed and parsed[0] == step):
            return path
    if step is None:
        raise UserError(f"{run.path}: no checkpoint yet")
    there = ", ".join(str(int(path.name[5:13])) for path in found[:10]) or "none"
    raise UserError(f"{run.path}: no checkpoint of step {step}; there are: {there}")


def checkpoint_at(target: str) -> Path | None:
    """The checkpoint folder that a path names, itself or by its manifest; None if it names none."""
    path = Path(target)
    if path.name == MANIFEST:
        path = path.parent
    if (path / MANIFEST).exists() or (path.is_dir() and parse_checkpoint_name(path.name)):
        return path
    return None


def opened(folder: Path) -> Manifest:
    """The manifest of a checkpoint that a command needs whole.

    Raises:
        UserError: it is none, or its manifest is damaged.
    """
    try:
        return read_manifest(folder)
    except ManifestError as error:
        raise UserError(str(error)) from error


def folder_bytes(folder: Path) -> int:
    """What the files of a checkpoint's folder hold."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _entries(run: RunDir) -> list[tuple[int, int, Path]]:
    try:
        entries = list(run.checkpoints.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{run.checkpoints}: cannot be read: {error.strerror}") from error
    parsed = [(parse_checkpoint_name(entry.name), entry) for entry in entries]
    return sorted(((one[0], one[1], entry) for one, entry in parsed if one), reverse=True)


def _listed(run: RunDir, entries: list[tuple[int, int, Path]]) -> Iterator[Listed]:
    starts, newest_seen = resumed_steps(run), False
    for step, attempt, folder in entries:
        try:
            manifest, state = read_manifest(folder), ""
        except ManifestError as error:
            manifest = None
            state = UNFINISHED if isinstance(error.__cause__, FileNotFoundError) else DAMAGED
        if manifest and superseder(starts, step, attempt):
            state = SUPERSEDED
        elif manifest and not newest_seen:
            state, newest_seen = NEWEST, True
        yield Listed(folder, step, attempt, state, manifest)
