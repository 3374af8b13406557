"""What Slurm knows of a job or a node: scontrol first, then accounting."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from enum import Enum

from hpcrun.slurm.command import SlurmRefused, SlurmSilent, run_slurm
from hpcrun.slurm.hosts import expand_hosts
from hpcrun.slurm.states import base_state

_SACCT_FORMAT = "State,Restarts,NodeList,ExitCode"


class Answer(Enum):
    """How Slurm answered. Silence is neither the end of a job nor its life."""

    KNOWN = "known"
    UNKNOWN_JOB = "unknown job"
    """slurmctld has forgotten the job, and there is no accounting that remembers it."""
    SILENT = "silent"


@dataclass(frozen=True)
class JobInfo:
    """One job as Slurm sees it; ``state`` is None unless ``answer`` is KNOWN."""

    answer: Answer
    state: str | None = None
    reason: str = ""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    end_time: float | None = None
    """Seconds since the epoch; None without a limit, or before the start."""
    detail: str = ""
    """Why Slurm is silent, in its own words."""


def job_info(job_id: str) -> JobInfo:
    """Ask slurmctld, then accounting. Bounded by two command time limits; never raises."""
    try:
        return _from_scontrol(run_slurm(["scontrol", "show", "job", "-o", job_id]))
    except SlurmSilent as error:
        return JobInfo(Answer.SILENT, detail=str(error))
    except SlurmRefused:
        return _from_accounting(job_id)


def node_state(host: str) -> str:
    """Slurm's word for a node, with ``*`` when it does not respond; empty when Slurm does not answer."""
    try:
        states = run_slurm(["sinfo", "-h", "-N", "-n", host, "-o", "%T"]).split()
    except (SlurmSilent, SlurmRefused):
        return ""
    return states[0] if states else ""


def find_job(comment: str) -> str | None:
    """The id of this user's job with ``comment``, even one that has just ended; None when there is none.

    Raises:
        SlurmSilent: slurmctld does not answer.
    """
    for line in run_slurm(["squeue", "-h", "--me", "-t", "all", "-o", "%i|%k"]).splitlines():
        job_id, _, found = line.partition("|")
        if found == comment:
            return job_id
    return None


def _from_scontrol(shown: str) -> JobInfo:
    fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", shown))
    if "JobState" not in fields:
        return JobInfo(Answer.SILENT, detail="scontrol succeeded without an answer")
    nodelist = fields.get("NodeList", "")
    return JobInfo(
        Answer.KNOWN,
        state=fields["JobState"],
        reason=fields.get("Reason", "").replace("None", ""),
        nodes=tuple(expand_hosts(nodelist)) if nodelist not in ("", "(null)") else (),
        restarts=int(fields.get("Restarts", 0)),
        end_time=_epoch(fields.get("EndTime", "")) if fields.get("TimeLimit") != "UNLIMITED" else None,
    )


def _from_accounting(job_id: str) -> JobInfo:
    try:
        rows = run_slurm(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", _SACCT_FORMAT]).splitlines()
    except (SlurmSilent, SlurmRefused) as error:
        return JobInfo(Answer.UNKNOWN_JOB, detail=f"slurmctld has forgotten the job; {error}")
    if not rows:
        return JobInfo(Answer.UNKNOWN_JOB, detail="neither slurmctld nor accounting knows the job")
    state, restarts, nodelist, _ = rows[-1].split("|")
    known = nodelist not in ("", "None assigned")
    return JobInfo(
        Answer.KNOWN,
        state=base_state(state),
        nodes=tuple(expand_hosts(nodelist)) if known else (),
        restarts=int(restarts or 0),
    )


def _epoch(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
