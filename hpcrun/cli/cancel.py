"""``hpcrun cancel``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcrun.cli.choose import chosen_run, run_argument, runs_option

_EXAMPLE = """\b
Example:
  hpcrun cancel gpt-1b-0f3a99c1
  hpcrun cancel 123456 --save
"""


@click.command(epilog=_EXAMPLE)
@run_argument(required=True)
@runs_option
@click.option("--save", is_flag=True, help="Let a running job save first, however long that takes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(wanted: str, runs: Path | None, save: bool, as_json: bool) -> None:
    """Stop a run for good. RUN: a name, the start of one, a path or a job id.

    The ranks are told to save; Slurm kills them after its KillWait (30 s at most sites)
    unless --save is given. 'hpcrun resume' continues the run.
    """
    from hpcrun.launch.cancel import cancel

    run = chosen_run(wanted, runs)
    job_id, done = cancel(run, gently=save)
    if as_json:
        click.echo(json.dumps({"run": run.name, "path": str(run.path), "job_id": job_id, "done": done}))
    else:
        click.echo(f"{run.name}: {done}; continue it with: hpcrun resume {run.name}")
