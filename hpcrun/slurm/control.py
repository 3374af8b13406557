"""Changing what Slurm does."""

from __future__ import annotations

import time
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.slurm.command import SlurmRefused, SlurmSilent, run_slurm
from hpcrun.slurm.query import find_job

_SUBMIT_TIMEOUT = 60.0
_LOOKS = 5


def submit_script(script: Path, comment: str) -> str:
    """sbatch ``script``; returns the job id. Never submits twice.

    When sbatch's answer is lost the job may be queued all the same: it is looked for
    by its comment.

    Raises:
        UserError: sbatch refused, or it cannot be known whether the job is queued.
    """
    command = ["sbatch", "--parsable", str(script)]
    try:
        return run_slurm(command, timeout=_SUBMIT_TIMEOUT).strip().split(";")[0]
    except SlurmRefused as error:
        raise UserError(str(error)) from error
    except SlurmSilent as error:
        return _look_for(comment, error)


def _look_for(comment: str, lost: SlurmSilent) -> str:
    for look in range(_LOOKS):
        try:
            found = find_job(comment)
        except SlurmSilent as error:
            raise UserError(
                f"{lost}; and whether the job is queued is not known ({error}): "
                f"look for the comment {comment} with squeue before you submit again"
            ) from error
        if found:
            return found
        if look < _LOOKS - 1:
            time.sleep(1)
    raise UserError(f"{lost}; no job was queued") from lost


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
