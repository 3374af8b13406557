"""``hpcrun resume``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcrun.cli.choose import chosen_run, run_argument, runs_option

_EXAMPLE = """\b
Example:
  hpcrun resume gpt-1b-0f3a99c1
  hpcrun resume gpt-1b-0f3a99c1 --time 24h --nodes 4
  hpcrun resume gpt-1b-0f3a99c1 --set train.steps=200000
"""


@click.command(epilog=_EXAMPLE)
@run_argument(required=True)
@runs_option
@click.option("--nodes", type=click.IntRange(1), help="Nodes that train, in place of the run's.")
@click.option("--time", help="Time limit of the new job: 90m, 1h30m, 2-12:00:00, 60 (minutes), UNLIMITED.")
@click.option("--partition", help="Slurm partition of the new job.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change any key of the recipe.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    wanted: str,
    runs: Path | None,
    nodes: int | None,
    time: str | None,
    partition: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Continue a run from its newest checkpoint that verifies.

    RUN: a name, the start of one, a path or a job id. A new job works in the same run
    directory. What you change here stays changed; the
    run.yaml before is kept as run.yaml.1, run.yaml.2 and so on.
    """
    from hpcrun.launch.resume import resume

    flags = {"resources.nodes": nodes, "resources.time": time, "resources.partition": partition}
    sets = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    run = chosen_run(wanted, runs)
    resumed = resume(run, (*overrides, *sets))
    request, file = resumed.request, resumed.file
    if as_json:
        answer = {"run": run.name, "job_id": resumed.job_id, "path": str(run.path), "site": file.site.name}
        sizes = {"nodes": request.nodes, "spares": request.spares, "ranks": file.world}
        rest = {"time": request.time.slurm(), "from_step": resumed.from_step}
        click.echo(json.dumps({**answer, **sizes, **rest}))
        return
    click.echo(f"run      {run.name}, from step {resumed.from_step}")
    click.echo(f"job      {resumed.job_id} on site {file.site.name}")
    click.echo(f"size     {request.size_words}, time {request.time.words()}")
    click.echo(f"in       {run.path}")
    click.echo(f"follow   hpcrun status {run.name}   hpcrun logs -f {run.name}")
