"""What the scheduler says of a run's job: Slurm, or on one machine the process table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import psutil

from hpcrun.records import RunDir


class Answer(StrEnum):
    """Whether the scheduler answered, in the words of ``status --json``."""

    OK = "ok"
    SILENT = "silent"
    UNKNOWN_JOB = "unknown job"
    NO_ACCOUNTING = "no accounting"
    """The job has left the queue, and nobody keeps books."""


class Group(StrEnum):
    """What a scheduler's state means for us."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    UNCLEAR = "unclear"
    """A state that we do not know, or no answer: nothing follows from it."""


@dataclass(frozen=True)
class Word:
    """The scheduler's word on one job."""

    answer: Answer
    group: Group = Group.UNCLEAR
    state: str = ""
    """In the scheduler's own words."""
    reason: str = ""
    """Why it waits, or why there is no answer."""
    restarts: int = 0
    nodes: tuple[str, ...] = ()


def local_word(run: RunDir, job_id: str) -> Word:
    """A job of the ``local`` site is submitit's controller process, whose pid is the job id."""
    if local_process(run, job_id):
        return Word(Answer.OK, Group.RUNNING, "RUNNING", nodes=("localhost",))
    return Word(Answer.OK, Group.ENDED, "ended", nodes=("localhost",))


def local_process(run: RunDir, job_id: str) -> psutil.Process | None:
    """The controller of a local job, None when it has ended or its pid is another's by now."""
    try:
        process = psutil.Process(int(job_id))
        ours = str(run.job) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, psutil.Error):
        return None
    return process if ours else None
