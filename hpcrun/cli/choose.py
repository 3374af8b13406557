"""The RUN argument and the --runs option, alike in every command that takes a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from hpcrun.records import RunDir

F = TypeVar("F", bound=Callable[..., Any])

runs_option = click.option(
    "--runs",
    type=click.Path(path_type=Path),
    help="Folder of all runs; default: $HPCRUN_RUNS, the site's, or ./runs.",
)


def run_argument(*, required: bool) -> Callable[[F], F]:
    """RUN: a name, the start of one, a path or a job id."""
    name = "RUN" if required else "[RUN]"
    return click.argument("wanted", metavar=name, required=required)


def folder_of_runs(runs: Path | None) -> Path:
    """The folder that ``hpcrun submit`` would use here."""
    from hpcrun.runs.create import runs_folder
    from hpcrun.sites.registry import find_site

    return runs_folder(find_site()[0], runs)


def chosen_run(wanted: str | None, runs: Path | None) -> RunDir:
    """The run that the user means; the newest when none is named."""
    from hpcrun.errors import UserError
    from hpcrun.runs.find import all_runs, find_run, run_at

    path = run_at(wanted) if wanted else None
    if path:
        return path
    folder = folder_of_runs(runs)
    if wanted is not None:
        return find_run(wanted, folder)
    newest = all_runs(folder)
    if not newest:
        raise UserError(f"no run in {folder}; submit one with 'hpcrun submit', or give --runs")
    return newest[0]
