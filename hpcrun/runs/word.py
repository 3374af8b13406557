"""What the scheduler says of a run's job: Slurm, or on one machine the process table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import psutil

from hpcrun.records import RunDir
from hpcrun.slurm import query, states

_LOCAL_HOST = "localhost"
_NO_BOOKS = "accounting storage is disabled"


class Answer(StrEnum):
    """Whether the scheduler answered, in the words of ``status --json``."""

    OK = "ok"
    SILENT = "silent"
    UNKNOWN_JOB = "unknown job"
    NO_ACCOUNTING = "no accounting"
    """The job has left the queue, and nobody keeps books."""
    NOT_ASKED = "not asked"


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


def slurm_word(job_id: str) -> Word:
    """Slurm's word on a job. Takes a command's time limit (10 s) when slurmctld hangs; never raises."""
    info = query.job_info(job_id)
    if info.answer is query.Answer.SILENT:
        return Word(Answer.SILENT, reason=info.detail)
    if info.answer is query.Answer.UNKNOWN_JOB:
        no_books = _NO_BOOKS in info.detail
        return Word(Answer.NO_ACCOUNTING if no_books else Answer.UNKNOWN_JOB, reason=info.detail)
    state = info.state or ""
    return Word(Answer.OK, _group(state), state, info.reason, info.restarts, info.nodes)


def _group(state: str) -> Group:
    base = states.base_state(state)
    if base in states.PENDING:
        return Group.PENDING
    if base in states.RUNNING | states.WAITING:
        return Group.RUNNING
    return Group.ENDED if states.has_ended(base) else Group.UNCLEAR


def local_word(run: RunDir, job_id: str) -> Word:
    """A job of a ``local`` site is submitit's controller process, whose pid is the job id."""
    if local_process(run, job_id):
        return Word(Answer.OK, Group.RUNNING, "RUNNING", nodes=(_LOCAL_HOST,))
    return Word(Answer.OK, Group.ENDED, "ended", nodes=(_LOCAL_HOST,))


def local_process(run: RunDir, job_id: str) -> psutil.Process | None:
    """The controller of a local job; None when it has ended, or its pid is another's by now."""
    try:
        process = psutil.Process(int(job_id))
        ours = str(run.job) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, psutil.Error):
        return None
    return process if ours else None
