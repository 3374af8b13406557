"""Continuing a run that has no job any more, in the same run directory."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrun.config import Document
from hpcrun.errors import UserError
from hpcrun.launch.request import Request, make_request
from hpcrun.launch.submit import submit_again
from hpcrun.recipe import Recipe, recipe_from
from hpcrun.records import STOP, RunDir, replace_text
from hpcrun.runs import progress as own
from hpcrun.runs.create import collect_secrets
from hpcrun.runs.progress import Progress, read_progress
from hpcrun.runs.runfile import RunFile, read_run_file, run_file_text
from hpcrun.runs.status import ask
from hpcrun.runs.word import Answer, Group
from hpcrun.slurm.control import SubmissionUnknown


@dataclass(frozen=True)
class Resumed:
    """A run that has a job again."""

    job_id: str
    file: RunFile
    request: Request
    from_step: int
    """Of the newest committed checkpoint, 0 when there is none; if it is damaged an older one is taken."""


def resume(run: RunDir, overrides: tuple[str, ...] = ()) -> Resumed:
    """Submit a new job for ``run``, with ``overrides`` applied to its recipe.

    run.yaml is replaced as a whole; the one before stays as run.yaml.1, .2 and so on.

    Raises:
        UserError: a job of the run is queued or running, or that cannot be known; the run
            has nothing left to do; the changed recipe does not fit; or Slurm refused. Then
            the run is as it was.
        SubmissionUnknown: the new job may be queued; it finds the new run.yaml.
    """
    progress = read_progress(run)
    old = read_run_file(run)
    recipe = _changed(old.recipe, run, overrides)
    _refuse_if_done(run, progress, recipe, bool(overrides))
    _refuse_if_alive(run, progress)
    request = make_request(recipe, old.site)
    changes = {"recipe": recipe, "nodes": request.nodes, "ranks_per_node": request.ranks_per_node}
    new = old.model_copy(update=changes)
    _renew_secrets(new)
    with _put_back_on_failure(run):
        (run.control / STOP).unlink(missing_ok=True)
        if new != old:
            replace_text(run.run_yaml, run_file_text(new))
        job_id = submit_again(run)
    if new != old:
        replace_text(_free_name(run), run_file_text(old))
    return Resumed(job_id, new, request, progress.last_checkpoint_step or 0)


def _refuse_if_alive(run: RunDir, progress: Progress) -> None:
    """Two jobs on one run would fight for it; only the scheduler knows of a queued one."""
    if progress.job_id is None:
        return
    word = ask(run, progress)
    job = f"job {progress.job_id} of {run.name}"
    if word.answer is Answer.SILENT:
        raise UserError(
            f"{job}: whether it still waits or runs cannot be known ({word.reason}); try again later"
        )
    if word.group is not Group.ENDED and word.answer is Answer.OK:
        raise UserError(f"{job} is {word.state}; cancel it first, or wait for its end")


def _changed(recipe: Recipe, run: RunDir, overrides: tuple[str, ...]) -> Recipe:
    document = Document(str(run.run_yaml), recipe.model_dump(mode="json", exclude_unset=True))
    return recipe_from(document, overrides, Path.cwd())


def _refuse_if_done(run: RunDir, progress: Progress, recipe: Recipe, changed: bool) -> None:
    if progress.told != own.COMPLETED:
        return
    if recipe.command and not changed:
        raise UserError(f"{run.name} has completed; submit it anew to run it again")
    if not recipe.command and progress.step >= recipe.train.steps:
        raise UserError(
            f"{run.name} has completed: step {progress.step} of {recipe.train.steps}; "
            f"raise the number with --set train.steps={2 * recipe.train.steps}"
        )


def _renew_secrets(file: RunFile) -> None:
    """The values may have changed, and the file may be gone; keep it where the variables are not set."""
    if file.secrets_file is None:
        return
    path = Path(file.secrets_file)
    if path.exists() and not all(name in os.environ for name in file.recipe.secrets):
        return
    values = collect_secrets(file.recipe.secrets, os.environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(path, json.dumps(values), mode=0o600)
    except OSError as error:
        raise UserError(f"{path}: the secrets file cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _put_back_on_failure(run: RunDir) -> Iterator[None]:
    stopped = (run.control / STOP).exists()
    text = run.run_yaml.read_text(encoding="utf-8")
    try:
        yield
    except SubmissionUnknown:
        raise
    except UserError:
        replace_text(run.run_yaml, text)
        if stopped:
            (run.control / STOP).touch(mode=0o640)
        raise


def _free_name(run: RunDir) -> Path:
    number = 1
    while (path := run.path / f"run.yaml.{number}").exists():
        number += 1
    return path
