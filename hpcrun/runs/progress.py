"""How far a run has come, by its own record alone: no scheduler is asked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from hpcrun.manifest import checkpoints_newest_first, superseder
from hpcrun.records import EXIT_DONE, EXIT_REQUEUE, STOP, RunDir, read_claim, resumed_steps
from hpcrun.runs.jobs import Job, jobs_of
from hpcrun.runs.story import Event, last_line, reached_step, read_events

QUEUED = "queued"
STARTING = "starting"
RUNNING = "running"
REQUEUED = "requeued"
COMPLETED = "completed"
FAILED = "failed"
CANCELLED = "cancelled"


@dataclass(frozen=True)
class Progress:
    """What the run directory knows."""

    told: str
    """The state by the run's own last word: one of the seven above."""
    reason: str | None
    job_id: str | None
    """The job that the run is in, or was in last."""
    local: bool
    """Whether that job is a process of this machine rather than Slurm's."""
    restart: int | None
    """Slurm's restart count of that job when its agents last spoke; None before they did."""
    stop: bool
    """Whether control/STOP is there."""
    attempts: int
    restarts: int
    requeues: int
    nodes: list[str]
    step: int
    total_steps: int | None
    last_metric: dict[str, Any]
    last_checkpoint_step: int | None
    save_failure: str | None
    """Why the newest save failed; None when it did not."""
    events: list[Event] = field(repr=False)


def read_progress(run: RunDir) -> Progress:
    """Read events, claims, metrics and checkpoints of ``run``."""
    events = read_events(run)
    attempts = run.last_attempt()
    claims = [read_claim(run, attempt) for attempt in range(1, attempts + 1)]
    job = _current_job(run, events, claims)
    job_id = job.job_id if job else None
    restart = max((e["job_restart"] for e in events if e.get("job") == job_id), default=None)
    stop = (run.control / STOP).exists()
    told, reason = _told(run, events, claims, job_id, restart)
    starts = [event for event in events if event["event"] == "attempt_started"]
    trainer = [event for event in events if event["event"] == "training_started"]
    return Progress(
        told=told,
        reason=reason,
        job_id=job_id,
        local=job is not None and job.kind == "local",
        restart=restart,
        stop=stop,
        attempts=attempts,
        restarts=sum(_place(a) == _place(b) for a, b in itertools.pairwise(claims)),
        requeues=sum(_requeues(claims).values()),
        nodes=list(starts[-1]["nodes"]) if starts else [],
        step=reached_step(run, attempts),
        total_steps=trainer[-1].get("total_steps") if trainer else None,
        last_metric=_last_metric(run, attempts),
        last_checkpoint_step=last_checkpoint_step(run),
        save_failure=_save_failure(events),
        events=events,
    )


def last_checkpoint_step(run: RunDir) -> int | None:
    """The step of the newest committed checkpoint.

    One that a later attempt did not start from, though it was further, is superseded.
    """
    starts = resumed_steps(run)
    return next(
        (step for step, attempt, _ in checkpoints_newest_first(run) if not superseder(starts, step, attempt)),
        None,
    )


def _current_job(run: RunDir, events: list[Event], claims: list[dict[str, Any]]) -> Job | None:
    """The newest job, unless it found the run held by another and left."""
    held = {event["job"] for event in events if event["event"] == "run_is_held"}
    held -= {str(claim.get("job_id")) for claim in claims}
    jobs = {job.job_id: job for job in jobs_of(run)}
    for event in events:
        if "job" in event:
            jobs.setdefault(event["job"], Job(event["job"], event["time"], None))
    newest_first = sorted(jobs.values(), key=lambda job: job.since, reverse=True)
    return next((job for job in newest_first if job.job_id not in held), None)


def _told(
    run: RunDir, events: list[Event], claims: list[dict[str, Any]], job_id: str | None, restart: int | None
) -> tuple[str, str | None]:
    """State and reason by the last allocation of the current job."""
    code, reason = _end(run, events, job_id, restart)
    if code is not None:
        return _state_of(run, code), reason
    if restart is None:
        return QUEUED, None
    if not claims or _place(claims[-1]) != (job_id, restart):
        return STARTING, "waiting for the agents of all nodes"
    if any(event["event"] == "ranks_started" and event["attempt"] == len(claims) for event in events):
        return RUNNING, None
    return STARTING, "the agents are about to start the ranks"


def _end(
    run: RunDir, events: list[Event], job_id: str | None, restart: int | None
) -> tuple[int | None, str | None]:
    """(exit code, reason) of the last allocation; an agent that could not even start left its code only."""
    for event in reversed(events):
        if event["event"] == "finished" and (event.get("job"), event.get("job_restart")) == (job_id, restart):
            return event["code"], event["reason"]
    exits = {int(path.name.rpartition("-")[2]): path for path in run.job.glob(f"exit-{job_id}-*")}
    if exits and (restart is None or max(exits) >= restart):
        return int(exits[max(exits)].read_text()), f"see {run.job}/slurm-{job_id}.out"
    return None, None


def _state_of(run: RunDir, code: int) -> str:
    if code == EXIT_DONE:
        return COMPLETED
    if (run.control / STOP).exists():
        return CANCELLED
    return REQUEUED if code == EXIT_REQUEUE else FAILED


def _place(claim: dict[str, Any]) -> tuple[str, Any]:
    return str(claim.get("job_id")), claim.get("restart")


def _requeues(claims: list[dict[str, Any]]) -> dict[str, int]:
    """Restart count by job."""
    most: dict[str, int] = {}
    for claim in claims:
        job_id = str(claim.get("job_id"))
        most[job_id] = max(most.get(job_id, 0), int(claim.get("restart") or 0))
    return most


def _last_metric(run: RunDir, attempts: int) -> dict[str, Any]:
    for attempt in range(attempts, 0, -1):
        line = last_line(run.metrics(attempt))
        if line:
            return line
    return {}


def _save_failure(events: list[Event]) -> str | None:
    saves = [event for event in events if event["event"] in ("checkpoint_saved", "checkpoint_failed")]
    if saves and saves[-1]["event"] == "checkpoint_failed":
        return f"step {saves[-1].get('step')}: {saves[-1].get('reason')}"
    return None
