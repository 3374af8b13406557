"""``hpcrun submit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hpcrun.launch.submit import Draft
    from hpcrun.recipe import Recipe

_EXAMPLE = """\b
Example:
  hpcrun submit recipe.yaml --nodes 4 --time 12h
  hpcrun submit recipe.yaml --set train.lr=1e-4 --dry-run
  hpcrun submit --nodes 2 --gpus-per-node 4 -- python my_train.py --epochs 3
"""


class _CommandAfterDashes(click.Command):
    """Takes what stands after ``--`` for the user's own command, and leaves it alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command(cls=_CommandAfterDashes, epilog=_EXAMPLE)
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@click.option("--site", help="Site name or file; default: $HPCRUN_SITE, else detected.")
@click.option("--name", help="Name of the run; default: the recipe's.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes that train.")
@click.option("--gpus-per-node", type=click.IntRange(0), help="GPUs, and so ranks, per node.")
@click.option("--time", help="Time limit: 90m, 1h30m, 2-12:00:00, 60 (minutes), UNLIMITED.")
@click.option("--partition", help="Slurm partition.")
@click.option("--account", help="Slurm account.")
@click.option("--qos", help="Slurm quality of service.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override any key of the recipe."
)
@click.option("--runs", type=click.Path(path_type=Path), help="Folder of all runs; default: the site's.")
@click.option("--no-snapshot", is_flag=True, help="Run the code where it lies instead of a copy.")
@click.option("--dry-run", is_flag=True, help="Print script and environment; touch nothing.")
@click.option("--wait", is_flag=True, help="Wait for the end; exit 0 only if the run completed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, recipe: Path | None, **options: Any) -> int:
    """Submit a recipe, or a command of your own after --, as one job."""
    from hpcrun.launch.request import Options
    from hpcrun.launch.submit import draft, submit
    from hpcrun.sites.registry import find_site

    site, why = find_site(options["site"])
    wanted = _recipe(recipe, ctx.obj, options)
    drafted = draft(wanted, site, Options(options["runs"], not options["no_snapshot"]))
    if options["dry_run"]:
        _show_draft(drafted, options["as_json"])
        return 0
    job_id = submit(drafted)
    _show_submitted(drafted, job_id, why, options["as_json"])
    if not options["wait"]:
        return 0
    from hpcrun.launch.wait import wait_for_end

    state = wait_for_end(drafted.run, None if options["as_json"] else click.echo)
    return 0 if state == "completed" else 1


def _recipe(file: Path | None, own_command: list[str], options: dict[str, Any]) -> Recipe:
    from hpcrun.config import parse_yaml
    from hpcrun.errors import UserError
    from hpcrun.recipe import load_recipe, recipe_from

    flags = {
        "name": "name",
        "nodes": "resources.nodes",
        "gpus_per_node": "resources.gpus_per_node",
        "time": "resources.time",
        "partition": "resources.partition",
        "account": "resources.account",
        "qos": "resources.qos",
    }
    sets = [f"{key}={json.dumps(options[flag])}" for flag, key in flags.items() if options[flag] is not None]
    if own_command:
        sets.append(f"command={json.dumps(own_command)}")
    overrides = (*options["overrides"], *sets)
    if file is not None:
        return load_recipe(file, overrides)
    if not own_command:
        raise UserError("give a recipe file, or a command after --; see hpcrun submit --help")
    return recipe_from(parse_yaml("", "the command line"), overrides, Path.cwd())


def _show_draft(drafted: Draft, as_json: bool) -> None:
    environment = {export.name: export.value for export in drafted.environment}
    if as_json:
        answer = {"run": drafted.run.name, "path": str(drafted.run.path), "script": drafted.script}
        click.echo(json.dumps(answer | {"environment": environment, "notes": drafted.notes}))
        return
    click.echo(drafted.script)
    click.echo("# Environment of every rank:")
    for export in drafted.environment:
        click.echo(f"#   {export.name}={export.value}  ({export.reason})")
    for note in drafted.notes:
        click.echo(f"# {note}")


def _show_submitted(drafted: Draft, job_id: str, why: str, as_json: bool) -> None:
    request, file = drafted.request, drafted.file
    if as_json:
        answer: dict[str, Any] = {"run": drafted.run.name, "job_id": job_id, "path": str(drafted.run.path)}
        answer |= {"site": file.site.name, "nodes": request.nodes, "spares": request.spares}
        answer |= {"ranks": file.world, "time": request.time.slurm(), "notes": drafted.notes}
        click.echo(json.dumps(answer))
        return
    click.echo(f"run      {drafted.run.name}")
    click.echo(f"job      {job_id} on site {file.site.name} ({why})")
    click.echo(f"size     {request.size_words}, time {request.time.words()}")
    click.echo(f"in       {drafted.run.path}")
    for note in drafted.notes:
        click.echo(note)
    click.echo(f"follow   hpcrun status {drafted.run.name}   hpcrun logs -f {drafted.run.name}")
