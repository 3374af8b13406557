"""What happened in a run: steps, events and recoveries of all its attempts, merged by time.

Each file has one writer and belongs to one attempt; torn lines are skipped. Where
two attempts logged the same step the later attempt wins, because the run went on
from its weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.records import RunDir, read_claim, read_json_lines, resumed_step
from hpcrun.units import show_seconds

Event = dict[str, Any]

_TAIL = 64 << 10
_TRAINER = "trainer"


@dataclass(frozen=True)
class Recovery:
    """How one attempt ended early and the next one took over."""

    attempt: int
    """The attempt that took over."""
    what: str
    """``rank died``, ``node lost``, ``time limit``, ``preempted``, ``stopped`` or ``requeue``."""
    by: str
    """``restart`` inside the allocation, ``requeue`` of the job, or ``resume`` as another job."""
    reason: str
    rank: int | None
    node: str | None
    noticed: float
    """Seconds since the epoch."""
    checkpoint: str | None
    resumed_step: int | None
    """The step that the attempt started from; None when it died before it had loaded one."""
    steps_repeated: int | None
    first_step_seconds: float | None
    """From ``noticed`` to the first step that was logged afterwards."""
    seconds: float | None
    """From ``noticed`` to the first step that the run had not reached before."""

    def describe(self) -> str:
        """One line for a person."""
        parts = [f"attempt {self.attempt} by {self.by}"]
        if self.resumed_step is not None:
            parts.append(f"from step {self.resumed_step}, {self.steps_repeated} steps repeated")
        if self.first_step_seconds is not None:
            parts.append(f"first step after {show_seconds(self.first_step_seconds)}")
        if self.seconds is not None:
            parts.append(f"new ground after {show_seconds(self.seconds)}")
        return f"{self.what} ({self.reason}): {'; '.join(parts)}"


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """One line per logged step, by step; a later attempt's line replaces an earlier one's."""
    by_step: dict[int, dict[str, Any]] = {}
    for attempt in range(1, run.last_attempt() + 1):
        for line in read_json_lines(run.metrics(attempt)):
            if isinstance(line.get("step"), int):
                by_step[line["step"]] = line
    return [by_step[step] for step in sorted(by_step)]


def read_events(run: RunDir) -> list[Event]:
    """Every event of every writer, by time.

    ``attempt``, ``writer`` and, for agents, ``job`` and ``job_restart`` are added from the
    file's name, ``<attempt>-<host>-<job>-<restart>.jsonl`` or ``<attempt>-trainer.jsonl``.
    """
    found = []
    for path in run.path.glob("events/*.jsonl"):
        number, _, writer = path.stem.partition("-")
        if not number.isdigit():
            continue
        facts: Event = {"attempt": int(number), "writer": writer} | _job(writer)
        found += [facts | event for event in read_json_lines(path) if "time" in event and "event" in event]
    return sorted(found, key=lambda event: float(event["time"]))


def _job(writer: str) -> Event:
    _, *job = writer.rsplit("-", 2)
    return {"job": job[0], "job_restart": int(job[1])} if len(job) == 2 and job[1].isdigit() else {}


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole record of a file of JSON lines, without reading all of it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for back in (_TAIL, size):
                file.seek(max(0, size - back))
                for line in reversed(file.read(back).split(b"\n")):
                    record = _record(line)
                    if record is not None:
                        return record
    except FileNotFoundError:
        pass
    return None


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def reached_step(run: RunDir, attempt: int) -> int:
    """Where the run stood at the end of ``attempt``: its last logged step, else where it started."""
    for number in range(attempt, 0, -1):
        line = last_line(run.metrics(number))
        step = line.get("step") if line else None
        if step is None:
            step = resumed_step(run, number)
        if step is not None:
            return int(step)
    return 0


def recoveries(run: RunDir, events: list[Event] | None = None) -> list[Recovery]:
    """One for each attempt after the first, in order; ``events`` where they have been read already."""
    events = read_events(run) if events is None else events
    return [_recovery(run, attempt, events) for attempt in range(2, run.last_attempt() + 1)]


def _recovery(run: RunDir, attempt: int, events: list[Event]) -> Recovery:
    before = _events_of(run, attempt - 1, events)
    cause = _cause(before) or _silence(run, attempt - 1, before)
    reached = reached_step(run, attempt - 1)
    began_at = resumed_step(run, attempt)
    trainer = _first(events, "training_started", attempt)
    first_step = next(_steps_from(run, attempt), None)
    gained = next((line for line in _steps_from(run, attempt) if line["step"] > reached), None)
    return Recovery(
        attempt=attempt,
        what=cause.what,
        by=_way(run, attempt),
        reason=cause.reason,
        rank=cause.rank,
        node=cause.node,
        noticed=cause.noticed,
        checkpoint=trainer.get("checkpoint") if trainer else None,
        resumed_step=began_at,
        steps_repeated=None if began_at is None else max(0, reached - began_at),
        first_step_seconds=first_step["time"] - cause.noticed if first_step else None,
        seconds=gained["time"] - cause.noticed if gained else None,
    )


def _events_of(run: RunDir, attempt: int, events: list[Event]) -> list[Event]:
    """Without those of a later allocation, which gathers under the number of the attempt before it."""
    claim = read_claim(run, attempt)
    holder = (claim.get("job_id"), claim.get("restart"))
    return [
        event
        for event in events
        if event["attempt"] == attempt
        and (event["writer"] == _TRAINER or (event.get("job"), event.get("job_restart")) == holder)
    ]


def _steps_from(run: RunDir, attempt: int) -> Iterator[dict[str, Any]]:
    for number in range(attempt, run.last_attempt() + 1):
        for line in read_json_lines(run.metrics(number)):
            if isinstance(line.get("step"), int) and "time" in line:
                yield line


def _way(run: RunDir, attempt: int) -> str:
    before, after = read_claim(run, attempt - 1), read_claim(run, attempt)
    if before.get("job_id") != after.get("job_id"):
        return "resume"
    return "restart" if before.get("restart") == after.get("restart") else "requeue"


@dataclass(frozen=True)
class _Cause:
    what: str
    reason: str
    noticed: float
    rank: int | None = None
    node: str | None = None


def _cause(events: list[Event]) -> _Cause | None:
    """Why an attempt ended, from its own events; None when they do not tell.

    The most telling fact first: after a node is lost, ranks elsewhere die of it.
    """
    return _lost_coordinator(events) or _lost_node(events) or _dead_rank(events) or _asked(events)


def _lost_coordinator(events: list[Event]) -> _Cause | None:
    """The first node is gone: others say so, and one gave the job back or no coordinator spoke.

    A node that is itself cut off says the same of the first, but Slurm does not hear it.
    """
    spoke = _first(events, "finished") or _first(events, "restarting")
    gave_back = {event["host"] for event in events if event["event"] == "requeued"}
    for event in events:
        if event["event"] == "coordinator_unreachable" and (event["host"] in gave_back or not spoke):
            reason = f"lost {event['node']}: its agent, the coordinator, could not be reached"
            return _Cause("node lost", reason, event["time"], node=event["node"])
    return None


def _lost_node(events: list[Event]) -> _Cause | None:
    started = _first(events, "attempt_started")
    training = started["nodes"] if started else []
    for event in events:
        if event["event"] == "node_lost" and event["node"] in training:
            reason = f"lost {event['node']}: {event['reason']}"
            return _Cause("node lost", reason, event["time"], node=event["node"])
    return None


def _dead_rank(events: list[Event]) -> _Cause | None:
    restarting = _first(events, "restarting")
    asked = _first(events, "save_requested")
    for event in events:
        if event["event"] != "rank_exited" or (asked and asked["time"] < event["time"]):
            continue
        if restarting and f"rank {event['rank']} " not in restarting["reason"]:
            continue
        if event["signal"] or event["code"]:
            how = f"killed by signal {event['signal']}" if event["signal"] else f"exit code {event['code']}"
            hint = " (out of memory?)" if event["signal"] == 9 else ""
            reason = f"rank {event['rank']} on {event['host']}: {how}{hint}"
            return _Cause("rank died", reason, event["time"], rank=event["rank"], node=event["host"])
    return None


def _asked(events: list[Event]) -> _Cause | None:
    """Somebody or the clock asked for an end, or the coordinator gave another reason."""
    for name in ("save_requested", "restarting", "finished"):
        event = next((e for e in events if e["event"] == name and e["writer"] != _TRAINER), None)
        if event:
            reason = event["reason"]
            end = _first(events, "finished") or {}
            return _Cause(_what(f"{reason} {end.get('reason')}"), reason, event["time"])
    return None


def _what(reason: str) -> str:
    """A cancelled job and one at its limit get SIGTERM as well, so that word comes last."""
    for words, what in (("control/STOP", "stopped"), ("time limit", "time limit"), ("SIGTERM", "preempted")):
        if words in reason:
            return what
    return "requeue"


def _silence(run: RunDir, attempt: int, events: list[Event]) -> _Cause:
    """Nobody had the time to say anything: the last sign of life stands for the end."""
    signs = [float(event["time"]) for event in events]
    line = last_line(run.metrics(attempt))
    signs += [float(line["time"])] if line else []
    signs += [float(read_claim(run, attempt).get("time", 0.0)), run.attempt(attempt).stat().st_mtime]
    return _Cause("requeue", f"attempt {attempt} ended without a word", max(signs))


def _first(events: list[Event], name: str, attempt: int | None = None) -> Event | None:
    for event in events:
        if event["event"] == name and attempt in (None, event["attempt"]):
            return event
    return None
