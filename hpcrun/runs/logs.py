"""What the ranks of a run printed: one file per rank and attempt."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcrun.records import RunDir

_RANK_LOG = re.compile(r"rank(\d{5})\.log", re.ASCII)
_FEW = 4
_BLOCK = 1 << 20
_POLL = 0.5
_LOOK_FOR_END = 5.0
"""Seconds between looks at the state of the run."""


def attempts_with_logs(run: RunDir) -> list[int]:
    """Attempts of which a rank has written, oldest first."""
    return [attempt for attempt in range(1, run.last_attempt() + 1) if rank_logs(run, attempt)]


def rank_logs(run: RunDir, attempt: int) -> dict[int, Path]:
    """The log of each rank of ``attempt``."""
    found = {}
    for path in sorted(run.logs(attempt).glob("rank*.log")):
        match = _RANK_LOG.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return found


def choose_logs(run: RunDir, attempt: int, rank: int | None) -> dict[int, Path]:
    """The logs to show: of ``rank``; by default of all where they are few, else of rank 0, which logs."""
    logs = rank_logs(run, attempt)
    if rank is None and len(logs) > _FEW:
        rank = 0
    return logs if rank is None else {number: path for number, path in logs.items() if number == rank}


def job_files(run: RunDir) -> list[Path]:
    """What the batch script, the agents and the ranks' parents printed, newest last; empty ones left out."""
    found = [*run.job.glob("*.out"), *run.path.glob("logs/parent-*.log")]
    return sorted((path for path in found if path.stat().st_size), key=lambda path: path.stat().st_mtime)


def tail(path: Path, lines: int) -> list[str]:
    """The last ``lines`` lines of a file, of its last MiB at most."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _BLOCK))
        return file.read(_BLOCK).decode(errors="replace").splitlines()[-lines:]


@dataclass
class Tail:
    """Reads on from where it was, from the start once the file was cut short.

    A line is given once it is whole, or the file is done with.
    """

    path: Path
    _offset: int = 0
    _partial: bytes = field(default=b"")

    def lines(self, done: bool = False) -> Iterator[str]:
        """The lines that have come since the last call."""
        with self.path.open("rb") as file:
            if self._offset > file.seek(0, os.SEEK_END):
                self._offset, self._partial = 0, b""
            file.seek(self._offset)
            while block := file.read(_BLOCK):
                self._offset += len(block)
                *whole, self._partial = (self._partial + block).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        if done and self._partial:
            yield self._partial.decode(errors="replace")
            self._partial = b""


def read_logs(logs: dict[int, Path]) -> Iterator[tuple[int, str]]:
    """(rank, line) of each log in turn."""
    for rank, path in logs.items():
        for line in Tail(path).lines(done=True):
            yield rank, line


def follow_logs(
    run: RunDir, rank: int | None, has_ended: Callable[[], bool]
) -> Iterator[tuple[int, int, str]]:
    """(attempt, rank, line) as they come, from the newest attempt on through all later ones.

    Ends when ``has_ended`` says so and everything has been given.
    """
    attempt = max(1, run.last_attempt())
    tails: dict[int, Tail] = {}
    looked = time.monotonic()
    over = has_ended()
    while True:
        superseded = run.last_attempt() > attempt
        for number, path in choose_logs(run, attempt, rank).items():
            tails.setdefault(number, Tail(path))
        for number, log in tails.items():
            for line in log.lines(done=superseded or over):
                yield attempt, number, line
        if superseded:
            attempt, tails = attempt + 1, {}
        elif over:
            return
        else:
            time.sleep(_POLL)
            if time.monotonic() - looked > _LOOK_FOR_END:
                looked = time.monotonic()
                over = has_ended()
