"""Names of a run's files and the lines that stand in them.

This is half of the contract between ``hpcrun`` and ``training`` (the other half
is :mod:`hpcrun.manifest`). One process writes each file; readers merge by time
and skip a torn last line.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXIT_DONE = 0
EXIT_REQUEUE = 85
EXIT_STOP = 86

CLAIM = "claim.json"
RESUMED = "resumed.json"
STOP = "STOP"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHECKPOINT = re.compile(r"step_(\d{8})\.a(\d{4})", re.ASCII)


@dataclass(frozen=True)
class RunDir:
    """The folder of one run. Paths only: nothing here touches the disk by itself."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run_yaml(self) -> Path:
        return self.path / "run.yaml"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def job(self) -> Path:
        return self.path / "job"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def attempt(self, attempt: int) -> Path:
        return self.attempts / f"{attempt:04d}"

    def events(self, attempt: int, writer: str) -> Path:
        return self.path / "events" / f"{attempt:04d}-{writer}.jsonl"

    def metrics(self, attempt: int) -> Path:
        return self.path / "metrics" / f"{attempt:04d}.jsonl"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"{attempt:04d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.logs(attempt) / f"rank{rank:05d}.log"

    def last_attempt(self) -> int:
        """The highest claimed attempt, 0 when there is none."""
        if not self.attempts.is_dir():
            return 0
        return max((int(entry.name) for entry in self.attempts.iterdir() if entry.name.isdigit()), default=0)


def claim_attempt(run: RunDir, **facts: Any) -> tuple[int, str] | None:
    """Claim the next attempt: (its number, a random mark), or None when another was faster.

    mkdir is atomic on NFS and Lustre: of two jobs that resume one run, one wins.
    """
    number = run.last_attempt() + 1
    folder = run.attempt(number)
    run.attempts.mkdir(exist_ok=True)
    try:
        folder.mkdir(mode=0o750)
    except FileExistsError:
        return None
    claim = secrets.token_hex(8)
    replace_text(folder / CLAIM, json.dumps({"claim": claim, "time": time.time(), **facts}) + "\n")
    return number, claim


def read_claim(run: RunDir, attempt: int) -> dict[str, Any]:
    """What the claimer of ``attempt`` wrote; empty when it has not (yet)."""
    return next(read_json_lines(run.attempt(attempt) / CLAIM), {})


def resumed_step(run: RunDir, attempt: int) -> int | None:
    """The step at which an attempt began to train; None if it never did."""
    step = next(read_json_lines(run.attempt(attempt) / RESUMED), {}).get("step")
    return step if isinstance(step, int) else None


def resumed_steps(run: RunDir) -> dict[int, int]:
    """The step at which each attempt began, of those that did."""
    found = {attempt: resumed_step(run, attempt) for attempt in range(1, run.last_attempt() + 1)}
    return {attempt: step for attempt, step in found.items() if step is not None}


def replace_text(path: Path, text: str, mode: int = 0o640) -> None:
    """Put ``text`` at ``path`` whole or not at all: temporary name, fsync, rename, fsync."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that a rename in it outlives a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checkpoint_name(step: int, attempt: int) -> str:
    """The folder of a checkpoint; step and attempt together are never used twice."""
    return f"step_{step:08d}.a{attempt:04d}"


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint folder, None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


class JsonLines:
    """Appends records to a file that this process alone writes; each line is one write.

    Not-a-number and infinities become strings, because JSON has no word for them. On a
    full disk a line is lost, with a word on stderr: a record must not end what it records.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
        size = os.fstat(self._fd).st_size
        self._torn = bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, **record: Any) -> None:
        line = ("\n" * self._torn + json.dumps(_plain(record), allow_nan=False) + "\n").encode()
        try:
            self._torn = os.write(self._fd, line) < len(line)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            with suppress(OSError):  # the log that stderr goes to may lie on the same disk
                print(f"hpcrun: {self._path}: a line is lost: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        os.close(self._fd)


def write_event(log: JsonLines, event: str, **fields: Any) -> None:
    """One fact with its wall-clock time."""
    log.write(time=time.time(), event=event, **fields)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file in order; a torn or foreign line is skipped."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
