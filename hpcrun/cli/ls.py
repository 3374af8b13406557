"""``hpcrun ls``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcrun.cli.choose import folder_of_runs, runs_option

if TYPE_CHECKING:
    from hpcrun.runs.status import RunStatus

_EXAMPLE = """\b
Example:
  hpcrun ls
  hpcrun ls --runs /scratch/me/runs --json
"""


@click.command(epilog=_EXAMPLE)
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run, as status --json does.")
def command(runs: Path | None, as_json: bool) -> None:
    """List your runs, newest first."""
    from hpcrun.runs.find import all_runs
    from hpcrun.runs.status import statuses

    folder = folder_of_runs(runs)
    found = statuses(all_runs(folder))
    if as_json:
        click.echo(json.dumps([status.as_dict() for status in found]))
    elif found:
        _show(found)
    else:
        click.echo(f"no runs in {folder}")


def _show(found: list[RunStatus]) -> None:
    from hpcrun.cli.show import age, of_total, table

    header = ("RUN", "STATE", "JOB", "STEP", "CHECKPOINT", "ATTEMPTS", "UPDATED")
    rows = [
        (
            status.run,
            status.state,
            status.job_id or "-",
            of_total(status.step, status.total_steps),
            "-" if status.last_checkpoint_step is None else str(status.last_checkpoint_step),
            str(status.attempts),
            age(status.updated),
        )
        for status in found
    ]
    click.echo(table(header, rows))
    if any(status.slurm == "silent" for status in found):
        click.echo("Slurm is silent: states of runs that have not ended are by their own records", err=True)
