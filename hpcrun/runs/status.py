"""The state of a run: the scheduler's word joined with the run's own record.

The run's record decides how it ended, the scheduler whether its job is still
there. A scheduler that does not answer says nothing: neither that a run has ended
nor that it goes on.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from hpcrun.errors import UserError
from hpcrun.records import EXIT_REQUEUE, RunDir
from hpcrun.runs import progress as own
from hpcrun.runs.progress import Progress, read_progress
from hpcrun.runs.runfile import read_run_file
from hpcrun.runs.story import Recovery, recoveries
from hpcrun.runs.word import Answer, Group, Word, local_word, slurm_word

LOST = "lost"
UNKNOWN = "unknown"
ENDED = (own.COMPLETED, own.FAILED, own.CANCELLED, LOST)

_FAILED = ("FAILED", "OUT_OF_MEMORY", "DEADLINE")


@dataclass(frozen=True)
class RunStatus:
    """What ``hpcrun status --json`` prints, field by field."""

    run: str
    path: str
    state: str
    """queued, starting, running, requeued, completed, failed, cancelled, lost or unknown."""
    reason: str | None
    job_id: str | None
    slurm: str
    """ok, silent, unknown job, no accounting, or not asked."""
    slurm_state: str | None
    step: int
    total_steps: int | None
    loss: float | str | None
    tokens_per_s: float | None
    updated: float | None
    """Seconds since the last line of metrics."""
    attempts: int
    restarts: int
    requeues: int
    nodes: list[str]
    last_checkpoint_step: int | None
    save_failure: str | None
    recoveries: list[Recovery]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_status(run: RunDir) -> RunStatus:
    """Read the run directory and ask the scheduler of its job."""
    progress = read_progress(run)
    return join(run, progress, ask(run, progress))


def statuses(runs: list[RunDir]) -> list[RunStatus]:
    """Like :func:`run_status` for many: who has ended is not asked after, a silent Slurm is asked once."""
    found = []
    silence: Word | None = None
    for run in runs:
        progress = read_progress(run)
        if progress.told in ENDED:
            word = Word(Answer.NOT_ASKED)
        elif silence and not progress.local:
            word = silence
        else:
            word = ask(run, progress)
            silence = word if word.answer is Answer.SILENT else silence
        found.append(join(run, progress, word))
    return found


class EndWatch:
    """Looks again and again whether a run has ended, and spares the scheduler most of it."""

    _ASK_EVERY = 30.0

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._asked = -self._ASK_EVERY

    def over(self) -> bool:
        """By the run's own record, and twice a minute by the scheduler: a job may die without a word."""
        if read_progress(self._run).told in ENDED:
            return True
        if time.monotonic() - self._asked < self._ASK_EVERY:
            return False
        self._asked = time.monotonic()
        return run_status(self._run).state in (*ENDED, UNKNOWN)


def ask(run: RunDir, progress: Progress) -> Word:
    """The scheduler's word on the run's job, of which ``progress`` tells."""
    if progress.job_id is None:
        return Word(Answer.UNKNOWN_JOB)
    return local_word(run, progress.job_id) if progress.local else slurm_word(progress.job_id)


def join(run: RunDir, progress: Progress, word: Word) -> RunStatus:
    """The status of ``run`` from its own record and the scheduler's word."""
    state, reason = decide(progress, word)
    line = progress.last_metric
    return RunStatus(
        run=run.name,
        path=str(run.path),
        state=state,
        reason=reason,
        job_id=progress.job_id,
        slurm=word.answer.value,
        slurm_state=word.state or None,
        step=progress.step,
        total_steps=progress.total_steps or _asked_steps(run),
        loss=line.get("loss"),
        tokens_per_s=line.get("tokens_per_s"),
        updated=round(max(0.0, time.time() - line["time"]), 1) if "time" in line else None,
        attempts=progress.attempts,
        restarts=progress.restarts,
        requeues=max(progress.requeues, word.restarts),
        nodes=progress.nodes or list(word.nodes),
        last_checkpoint_step=progress.last_checkpoint_step,
        save_failure=progress.save_failure,
        recoveries=recoveries(run, progress.events),
    )


def decide(progress: Progress, word: Word) -> tuple[str, str | None]:
    """State and reason."""
    if progress.job_id is None:
        return UNKNOWN, "no job was ever submitted for this run; 'hpcrun resume' submits one"
    if progress.told in (own.COMPLETED, own.FAILED, own.CANCELLED) and not _again(progress, word):
        return progress.told, progress.reason
    if word.group is Group.PENDING:
        waited_before = progress.restart is not None or word.restarts > 0
        return (own.REQUEUED if waited_before else own.QUEUED), _pending_reason(progress.job_id, word)
    if word.group is Group.RUNNING:
        return _while_running(progress, word)
    if word.group is Group.ENDED:
        return _after_the_end(progress, word)
    if word.answer in (Answer.UNKNOWN_JOB, Answer.NO_ACCOUNTING):
        return _forgotten(progress)
    why = word.reason if word.answer is Answer.SILENT else f"Slurm's state is {word.state!r}"
    return progress.told, f"by the run's own record; {why}"


def _again(progress: Progress, word: Word) -> bool:
    """Slurm has started the job once more since the run said how it ended."""
    return word.group in (Group.PENDING, Group.RUNNING) and word.restarts > (progress.restart or 0)


def _pending_reason(job_id: str, word: Word) -> str | None:
    if "held" in word.reason.lower():
        return f"{word.reason}; release it with: scontrol release {job_id}"
    return word.reason or None


def _while_running(progress: Progress, word: Word) -> tuple[str, str | None]:
    if progress.restart is None or word.restarts > progress.restart:
        return own.STARTING, "the job runs; no agent has reported yet"
    return progress.told, progress.reason


def _after_the_end(progress: Progress, word: Word) -> tuple[str, str | None]:
    """The job is gone, and the run did not say that it was done."""
    if progress.stop or word.state.startswith("CANCELLED"):
        return own.CANCELLED, f"the job ended as {word.state}"
    reason = f"job {progress.job_id} ended as {word.state}"
    if progress.reason and progress.told == own.REQUEUED:
        reason += f" ({progress.reason})"
    if word.state.startswith(_FAILED):
        return own.FAILED, f"{reason}; see 'hpcrun logs'"
    return LOST, f"{reason}; continue with 'hpcrun resume'"


def _forgotten(progress: Progress) -> tuple[str, str | None]:
    """Nobody knows the job any more: it is not in the queue."""
    if progress.stop:
        return own.CANCELLED, "control/STOP is there"
    gone = f"job {progress.job_id} has left Slurm"
    if progress.told == own.REQUEUED:
        return (
            LOST,
            f"{gone} after exit code {EXIT_REQUEUE} ({progress.reason}); continue with 'hpcrun resume'",
        )
    return UNKNOWN, f"{gone} without a word in the run directory; 'hpcrun resume' continues the run"


def _asked_steps(run: RunDir) -> int | None:
    """What run.yaml asks for; the trainer tells only once it has started."""
    try:
        recipe = read_run_file(run).recipe
    except UserError:
        return None
    return None if recipe.command else recipe.train.steps
