"""Stopping a run for good: no requeue, no further attempt."""

from __future__ import annotations

from hpcrun.errors import UserError
from hpcrun.records import STOP, RunDir
from hpcrun.runs import progress as own
from hpcrun.runs.progress import read_progress
from hpcrun.runs.word import Answer, Group, Word, local_process, slurm_word
from hpcrun.slurm import control


def cancel(run: RunDir, gently: bool) -> tuple[str | None, str]:
    """Write control/STOP, then end the job; returns its id and what was done, in words.

    control/STOP comes first: from then on no agent begins another attempt, and an end
    of the job is not followed by a requeue. ``gently`` leaves a running job to save and
    end by itself.

    Raises:
        UserError: the run has completed, or Slurm is silent; then control/STOP stays, and
            the agents obey it all the same.
    """
    progress = read_progress(run)
    if progress.told == own.COMPLETED:
        raise UserError(f"{run.name} has completed; there is nothing to cancel")
    try:
        (run.control / STOP).touch(mode=0o640)
    except OSError as error:
        raise UserError(f"{run.control / STOP}: cannot be written: {error.strerror}") from error
    if progress.job_id is None:
        return None, "no job was ever submitted for it"
    if progress.local:
        return progress.job_id, _end_local(run, progress.job_id, gently)
    return progress.job_id, _end_slurm(run, progress.job_id, gently)


def _end_local(run: RunDir, job_id: str, gently: bool) -> str:
    process = local_process(run, job_id)
    if process is None:
        return f"process {job_id} had ended already"
    if not gently:
        process.terminate()
    return f"process {job_id} saves at its next step and ends"


def _end_slurm(run: RunDir, job_id: str, gently: bool) -> str:
    word = slurm_word(job_id)
    if word.answer is Answer.SILENT:
        raise UserError(_still_there(run, job_id, word.reason))
    if _is_gone(word):
        return f"job {job_id} had ended already"
    if gently and word.group is Group.RUNNING:
        return f"job {job_id} saves at its next step and ends"
    try:
        control.cancel(job_id)
    except UserError as error:
        if _is_gone(slurm_word(job_id)):
            return f"job {job_id} had ended already"
        raise UserError(_still_there(run, job_id, str(error))) from error
    return f"job {job_id} is cancelled"


def _is_gone(word: Word) -> bool:
    return word.group is Group.ENDED or word.answer in (Answer.UNKNOWN_JOB, Answer.NO_ACCOUNTING)


def _still_there(run: RunDir, job_id: str, why: str) -> str:
    return (
        f"job {job_id} of {run.name} could not be cancelled: {why}; control/STOP is in place, so a running "
        "job saves and ends by itself and no attempt follows; repeat the command when Slurm answers"
    )
