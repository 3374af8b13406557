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


def find_run(text: str, folder: Path) -> RunDir:
    """The run that ``text`` names: a path, a job id, or a whole name, a recipe's name or a prefix in ``folder``.

    Raises:
        UserError: none, or more than one; the message lists them.
    """
    if not text.strip():
        raise UserError("RUN is empty; give a name, a path or a job id (see 'hpcrun ls')")
    if "/" in text or text in (".", "..") or (Path(text) / "run.yaml").is_file():
        return _at(Path(text).expanduser())
    runs = all_runs(folder)
    for matches in (
        [run for run in runs if run.name == text],
        [run for run in runs if _JOB_ID.fullmatch(text) and text in (job.job_id for job in jobs_of(run))],
        [run for run in runs if _recipe_name(run) == text],
        [run for run in runs if run.name.startswith(text)],
    ):
        if len(matches) > 1:
            shown = ", ".join(run.name for run in matches[:_SHOWN]) + (
                ", ..." if len(matches) > _SHOWN else ""
            )
            raise UserError(
                f"{text!r} means {len(matches)} runs: {shown}; give the whole name (newest first)"
            )
        if matches:
            return matches[0]
    raise UserError(
        f"no run {text!r} among the {len(runs)} in {folder}; see 'hpcrun ls', or give --runs or a path"
    )


def _at(path: Path) -> RunDir:
    if not (path / "run.yaml").is_file():
        raise UserError(f"{path} is not a run directory: it holds no run.yaml")
    return RunDir(path.resolve())


def _recipe_name(run: RunDir) -> str | None:
    match = _RUN_FOLDER.fullmatch(run.name)
    return match["recipe"] if match else None
