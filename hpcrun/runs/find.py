"""Which run a user means."""

from __future__ import annotations

import re
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.records import RunDir
from hpcrun.runs.jobs import jobs_of

_JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
_RUN_FOLDER = re.compile(r"(?P<recipe>.+)-[0-9a-f]{8}", re.ASCII)
_SHOWN = 8


def all_runs(folder: Path) -> list[RunDir]:
    """Every run in ``folder``, newest first; none where there is no such folder.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from error
    runs = [RunDir(path) for path in entries if (path / "run.yaml").is_file()]
    return sorted(runs, key=lambda run: run.run_yaml.stat().st_mtime, reverse=True)


def run_at(text: str) -> RunDir | None:
    """The run directory at the path ``text``; None when ``text`` is a name or a job id.

    Raises:
        UserError: a path, but not of a run directory.
    """
    path = Path(text).expanduser()
    if (path / "run.yaml").is_file():
        return RunDir(path.resolve())
    if "/" in text or text in (".", ".."):
        raise UserError(f"{path} is not a run directory: it holds no run.yaml")
    return None


def find_run(text: str, folder: Path) -> RunDir:
    """The run in ``folder`` that ``text`` names: a whole name, a job id, a recipe's name or a prefix.

    Raises:
        UserError: none, or more than one; the message lists them.
    """
    runs = all_runs(folder) if text.strip() else []
    for matches in (
        [run for run in runs if run.name == text],
        [run for run in runs if _JOB_ID.fullmatch(text) and text in (job.job_id for job in jobs_of(run))],
        [run for run in runs if _recipe_name(run) == text],
        [run for run in runs if run.name.startswith(text)],
    ):
        if len(matches) > 1:
            raise UserError(
                f"{text!r} means {len(matches)} runs; give the whole name, newest first: {_names(matches)}"
            )
        if matches:
            return matches[0]
    raise UserError(f"no run {text!r} among the {len(runs)} in {folder}; see 'hpcrun ls', or give a path")


def _names(runs: list[RunDir]) -> str:
    return ", ".join(run.name for run in runs[:_SHOWN]) + (", ..." if len(runs) > _SHOWN else "")


def _recipe_name(run: RunDir) -> str | None:
    match = _RUN_FOLDER.fullmatch(run.name)
    return match["recipe"] if match else None
