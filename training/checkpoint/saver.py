"""When a checkpoint is written: a copy stops the step, the rest happens behind it.

Each rank has one thread that writes its share and reports by the job's store: no collective runs
beside those of the training. Rank 0's thread makes the folder, waits for all shares, commits, and lets
old checkpoints go. A second save never starts before the first has ended.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpcrun.manifest import MANIFEST
from hpcrun.retention import removable, remove_checkpoint
from training._torch import Store, job_store
from training.checkpoint.local import LocalTensor
from training.checkpoint.save import SUPERSEDED, Facts, commit, owned, prepare, told, write_share
from training.checkpoint.staging import NoRoom, Staging
from training.parallel.exchange import rank_of_job, ranks_in_job

_POLL_S = 0.005
_SLOWEST_POLL_S = 0.25
_GRACE_S = 30
"""Rank 0 decides when the time is over; the others wait this much longer for its word."""
_DRAIN_S = 60
"""Other ranks may be dead: their parts will never come."""


class SaveError(Exception):
    """No checkpoint was made; older ones are untouched. Raised on every rank alike."""


class Superseded(SaveError):
    """A later attempt holds the run: this one must not write any more."""


@dataclass(frozen=True)
class Retention:
    """What stays beside the newest checkpoint: see :func:`hpcrun.retention.removable`."""

    keep: int | None
    keep_every: int | None = None
    keep_best: int | None = None


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been committed."""

    facts: Facts
    bytes: int
    seconds: float
    """From the start of the save to the commit."""
    stall: float
    """Of these, the seconds for which this rank's training stood still to start it."""


@dataclass
class _Flight:
    """A save that has been started. ``pledge`` is this rank's word, if it cannot even begin."""

    number: int
    facts: Facts
    deadline: float
    pledge: str | None = None
    stall: float = 0.0
    thread: threading.Thread | None = None

    def key(self, name: str) -> str:
        return f"save/{self.number}/{name}"


class Saver:
    """The saves of one rank, one at a time. Made on all ranks alike; starting and finishing are collective.

    Args:
        timeout: seconds after which rank 0 abandons a save that some rank has not finished.
        retention: what rank 0 lets go after each commit; None keeps everything.
    """

    def __init__(self, timeout: float, retention: Retention | None = None) -> None:
        self._timeout, self._retention = timeout, retention
        self._rank, self._world = rank_of_job(), ranks_in_job()
        self._store: Store = job_store()
        self._staging = Staging()
        self._owned: list[str] | None = None
        self._flight: _Flight | None = None
        self._stuck: threading.Thread | None = None
        self._number = 0

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    @property
    def step(self) -> int:
        """Of the save in flight."""
        assert self._flight is not None, "no save is in flight"
        return self._flight.facts.step

    @property
    def done(self) -> bool:
        """Whether this rank has nothing more to do for the save in flight; on rank 0: it is decided."""
        flight = self._flight
        return flight is not None and flight.thread is not None and not flight.thread.is_alive()

    def start(self, facts: Facts, tensors: list[LocalTensor], *, background: bool) -> None:
        """Begin a save of the values of now. Collective.

        In the background when that is asked for and a copy fits the memory; else this rank's share is on
        disk when it returns.
        """
        assert self._flight is None, "the save in flight has to be finished first"
        began = time.monotonic()
        self._number += 1
        self._forget(self._number - 2)
        flight = self._flight = _Flight(self._number, facts, began + self._timeout)
        mine = self._share(tensors)
        if self._stuck and self._stuck.is_alive():
            flight.pledge = f"rank {self._rank} on {_host()}: still busy with an older save that has failed"
        elif background:
            try:
                mine = self._staging.copy(mine)
            except NoRoom:
                background = False
        flight.thread = threading.Thread(
            target=self._work, args=(flight, mine, began), daemon=True, name="save"
        )
        flight.thread.start()
        if not background:
            self._join(flight)
        flight.stall = time.monotonic() - began

    def finish(self) -> Saved:
        """Wait for the end of the save in flight. Collective.

        Raises:
            Superseded: another attempt has been claimed meanwhile.
            SaveError: a rank could not write, or not in time; says which, where and why.
        """
        flight = self._flight
        assert flight is not None, "no save is in flight"
        self._flight = None
        outcome = self._outcome(flight)
        if problem := outcome.get("problem"):
            self._stuck = flight.thread
            raise Superseded(problem) if problem.startswith(SUPERSEDED) else SaveError(problem)
        self._join(flight)
        return Saved(flight.facts, outcome["bytes"], outcome["seconds"], flight.stall)

    def drain(self) -> None:
        """Before this rank ends with an error: let it do its part of the save in flight, for a minute."""
        if self._flight and self._flight.thread:
            self._flight.thread.join(_DRAIN_S)

    def _share(self, tensors: list[LocalTensor]) -> list[LocalTensor]:
        """What this rank writes of ``tensors``, which are the same at every save but for their values."""
        if self._owned is None:
            self._owned = [place(tensor) for tensor in owned(tensors)]
        mine = set(self._owned)
        return [tensor for tensor in tensors if place(tensor) in mine]

    def _work(self, flight: _Flight, mine: list[LocalTensor], began: float) -> None:
        """The thread of one save. Whatever goes wrong becomes the save's problem, not the process's."""
        leads = self._rank == 0
        outcome: dict[str, Any] = {}
        try:
            if leads:
                problem = _caught(lambda: prepare(flight.facts), flight.facts)
                self._store.set(flight.key("prepared"), json.dumps(problem))
            report = self._write(flight, mine)
            self._store.set(flight.key(f"share/{self._rank}"), json.dumps(report))
            if "problem" in report:
                self._store.set(flight.key("problem"), report["problem"])
            self._store.add(flight.key("arrived"), 1)
            if leads:
                outcome = self._decide(flight, began)
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to
            outcome = {"problem": f"rank {self._rank} on {_host()}: {type(error).__name__}: {error}"}
        if not leads:
            return
        if "problem" in outcome:
            _reclaim(flight.facts)
        self._store.set(flight.key("outcome"), json.dumps(outcome))
        if "bytes" in outcome and self._retention:
            prune(flight.facts, self._retention)

    def _write(self, flight: _Flight, mine: list[LocalTensor]) -> dict[str, Any]:
        """Write this rank's share when rank 0 has made the folder; what came of it."""
        if flight.pledge:
            return {"problem": flight.pledge}
        key = flight.key("prepared")
        if not _until(lambda: self._store.check([key]), flight.deadline):
            return {"problem": f"rank {self._rank} on {_host()}: no word of rank 0 in {self._timeout:.0f} s"}
        if problem := json.loads(self._store.get(key)):
            return {"problem": problem}
        try:
            return write_share(flight.facts.folder, mine)
        except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it
            return {"problem": f"rank {self._rank} on {_host()}: {type(error).__name__}: {error}"}

    def _decide(self, flight: _Flight, began: float) -> dict[str, Any]:
        """Rank 0: wait for all shares or the first problem; commit or say why not."""
        store, arrived, problem = self._store, flight.key("arrived"), flight.key("problem")
        complete = _until(
            lambda: store.check([problem]) or store.add(arrived, 0) == self._world, flight.deadline
        )
        if store.check([problem]):
            return {"problem": store.get(problem).decode()}
        keys = [flight.key(f"share/{rank}") for rank in range(self._world)]
        if not complete:
            late = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            named = ", ".join(late[:8]) + " ..." * (len(late) > 8)
            return {
                "problem": f"rank {named} did not finish writing within {self._timeout:.0f} s "
                "(checkpoint.timeout); is the file system slow or full?"
            }
        reports = [json.loads(store.get(key)) for key in keys]
        try:
            size = commit(flight.facts, reports)
        except ValueError as error:
            return {"problem": str(error)}
        except OSError as error:
            return {"problem": told(flight.facts.folder, error)}
        return {"bytes": size, "seconds": time.monotonic() - began}

    def _outcome(self, flight: _Flight) -> dict[str, Any]:
        """Rank 0's word, on every rank."""
        key = flight.key("outcome")
        if not _until(lambda: self._store.check([key]), flight.deadline + _GRACE_S):
            return {"problem": f"no word of rank 0 within {self._timeout + _GRACE_S:.0f} s"}
        outcome = json.loads(self._store.get(key))
        assert isinstance(outcome, dict)
        return outcome

    def _join(self, flight: _Flight) -> None:
        assert flight.thread is not None
        flight.thread.join(max(0.0, flight.deadline + _GRACE_S / 2 - time.monotonic()))

    def _forget(self, number: int) -> None:
        """Remove an old save's keys: every rank its own, rank 0 the common ones."""
        if number < 1:
            return
        names = [f"share/{self._rank}"]
        if self._rank == 0:
            names += ["prepared", "arrived", "problem", "outcome"]
        for name in names:
            self._store.delete_key(f"save/{number}/{name}")


def save_checkpoint(facts: Facts, tensors: list[LocalTensor], timeout: float = 600) -> Saved:
    """One save from its start to its commit. Collective; raises like :meth:`Saver.finish`."""
    saver = Saver(timeout)
    saver.start(facts, tensors, background=False)
    return saver.finish()


def prune(facts: Facts, retention: Retention) -> None:
    """Let old checkpoints go, and what failed saves have left; what cannot be deleted waits for the next."""
    with suppress(OSError):
        for folder in removable(
            facts.run,
            unfinished_before=facts.attempt + 1,
            keep=retention.keep,
            keep_every=retention.keep_every,
            keep_best=retention.keep_best,
        ):
            with suppress(OSError):
                remove_checkpoint(folder)


def place(tensor: LocalTensor) -> str:
    """The tensor's name and box."""
    return f"{tensor.name}{tensor.box}"


def _caught(call: Callable[[], str | None], facts: Facts) -> str | None:
    try:
        return call()
    except OSError as error:
        return told(facts.folder, error)


def _reclaim(facts: Facts) -> None:
    """Give a failed save's space back; a committed checkpoint is never touched."""
    if not (facts.folder / MANIFEST).exists():
        shutil.rmtree(facts.folder, ignore_errors=True)


def _until(condition: Callable[[], bool], deadline: float) -> bool:
    """Poll until ``condition`` holds; False when ``deadline`` (monotonic seconds) passes first."""
    pause = _POLL_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.3, _SLOWEST_POLL_S)
    return True


def _host() -> str:
    return socket.gethostname()
