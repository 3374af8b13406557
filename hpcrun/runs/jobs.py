"""Which jobs a run has had: ``job/jobs.jsonl`` from submission, and the claims of agents."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrun.records import RunDir, read_claim, read_json_lines


@dataclass(frozen=True)
class Job:
    """One job of a run; ``since`` is when it was submitted, or first claimed an attempt."""

    job_id: str
    since: float
    kind: str | None
    """The site's scheduler.kind; None for a job that somebody started by hand."""


def jobs_of(run: RunDir) -> list[Job]:
    """All jobs of ``run``, oldest first."""
    found: dict[str, Job] = {}
    for line in read_json_lines(run.job / "jobs.jsonl"):
        job = Job(str(line["job_id"]), float(line["time"]), line.get("kind"))
        found.setdefault(job.job_id, job)
    for attempt in range(1, run.last_attempt() + 1):
        claim = read_claim(run, attempt)
        if claim:
            job = Job(str(claim["job_id"]), float(claim["time"]), None)
            found.setdefault(job.job_id, job)
    return sorted(found.values(), key=lambda job: job.since)
