"""Changing what Slurm does."""

from __future__ import annotations

import re
import time
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.slurm.command import SlurmRefused, SlurmSilent, run_slurm
from hpcrun.slurm.query import find_job

_SUBMIT_TIMEOUT = 60.0
_LOOKS = 5
_JOB_ID = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?", re.ASCII)


class SubmissionUnknown(UserError):
    """The job may be queued: what it needs must stay where it is."""


def submit_script(script: Path, comment: str) -> str:
    """sbatch ``script``; returns the job id. Never submits twice.

    When sbatch's answer is lost the job may be queued all the same: it is looked for
    by its comment. Sites wrap sbatch and print around its answer: the last line counts.

    Raises:
        UserError: sbatch refused, or no job was queued.
        SubmissionUnknown: it cannot be known whether the job is queued.
    """
    command = ["sbatch", "--parsable", str(script)]
    try:
        said = run_slurm(command, timeout=_SUBMIT_TIMEOUT).split("\n")
    except SlurmRefused as error:
        raise UserError(str(error)) from error
    except SlurmSilent as error:
        return _look_for(comment, str(error))
    last = next((line.strip() for line in reversed(said) if line.strip()), "")
    found = _JOB_ID.fullmatch(last)
    return found[1] if found else _look_for(comment, f"sbatch gave no job id but {last!r}")


def _look_for(comment: str, lost: str) -> str:
    for look in range(_LOOKS):
        try:
            found = find_job(comment)
        except SlurmSilent as error:
            raise SubmissionUnknown(
                f"{lost}; and whether the job is queued is not known ({error}): "
                f"look for the comment {comment} with squeue before you submit again"
            ) from error
        if found:
            return found
        if look < _LOOKS - 1:
            time.sleep(1)
    raise UserError(f"{lost}; no job was queued")


def requeue(job_id: str) -> None:
    """Requeue a running job.

    Raises:
        UserError: Slurm refused or is silent.
    """
    _change(["scontrol", "requeue", job_id])


def cancel(job_id: str) -> None:
    """End a queued or running job.

    Raises:
        UserError: Slurm refused or is silent.
    """
    _change(["scancel", job_id])


def kill_step(job_id: str, step: str) -> None:
    """SIGKILL all tasks of a step, frozen ones included, on the nodes that Slurm reaches.

    Raises:
        UserError: Slurm refused or is silent.
    """
    _change(["scancel", "--signal=KILL", f"{job_id}.{step}"])


def start_now(job_id: str) -> None:
    """Lift the wait of about two minutes that Slurm puts on a requeued job.

    Has an effect only while the job is PENDING; at once it may meet the credential of the
    earlier start, and the job fails (docs/slurm_facts.md).

    Raises:
        UserError: Slurm refused or is silent.
    """
    _change(["scontrol", "update", f"jobid={job_id}", "starttime=now+2"])


def _change(command: list[str]) -> None:
    try:
        run_slurm(command, timeout=20)
    except (SlurmSilent, SlurmRefused) as error:
        raise UserError(str(error)) from error
