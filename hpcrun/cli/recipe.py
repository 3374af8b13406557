"""``hpcrun recipe``: check a recipe before anything queues, and print the schema."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpcrun.counts import parameter_count
from hpcrun.errors import UserError
from hpcrun.layout import make_layout, micro_batches
from hpcrun.recipe import Recipe, load_recipe


@click.group("recipe")
def command() -> None:
    """Check recipes, and print what one may hold.

    \b
    Example:
      hpcrun recipe check recipe.yaml --nodes 2 --gpus-per-node 4
      hpcrun recipe schema > recipe.schema.json
    """


@command.command("schema")
def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of recipes, for an editor that completes and checks.

    \b
    Example:
      hpcrun recipe schema > recipe.schema.json
    """
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    click.echo(json.dumps(dialect | Recipe.model_json_schema(), indent=2))


@command.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key: train.lr=1e-4."
)
@click.option("--world", type=click.IntRange(min=1), help="Number of ranks.")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes, in place of the recipe's.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs, and so ranks, per node.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    file: Path,
    overrides: tuple[str, ...],
    world: int | None,
    nodes: int | None,
    gpus_per_node: int | None,
    as_json: bool,
) -> None:
    """Check a recipe and print what follows from it: layout, parameters, batches, time.

    The number of ranks is taken from the options, else from the recipe; where neither
    tells, everything else is checked.

    \b
    Example:
      hpcrun recipe check recipe.yaml
      hpcrun recipe check recipe.yaml --set train.lr=1e-4 --world 8
    """
    if world and (nodes or gpus_per_node):
        raise UserError("--world stands beside --nodes or --gpus-per-node; give one or the other")
    recipe = load_recipe(file, overrides)
    ranks, origin = (world, "--world") if world else _ranks(recipe, nodes, gpus_per_node)
    facts = _facts(file, recipe, ranks, origin)
    click.echo(json.dumps(facts) if as_json else _text(facts))


def _ranks(recipe: Recipe, nodes: int | None, gpus_per_node: int | None) -> tuple[int | None, str]:
    """The number of ranks, None where only the site knows, and how it came about."""
    resources, parallel = recipe.resources, recipe.parallel
    nodes = nodes or resources.nodes
    per_node = gpus_per_node or resources.ranks_per_node or resources.gpus_per_node
    if per_node:
        return nodes * per_node, f"nodes {nodes} x ranks per node {per_node}"
    if parallel.dp:
        return parallel.tp * parallel.cp * parallel.dp * parallel.pp, "tp x cp x dp x pp"
    return None, "the site knows the ranks per node; give --gpus-per-node or --world"


def _facts(file: Path, recipe: Recipe, world: int | None, origin: str) -> dict[str, Any]:
    """What ``--json`` prints; what takes a number of ranks is None where that is unknown."""
    parallel = recipe.parallel
    try:
        # Where the ranks are unknown, dp 1 asks the least: what fails here fails on any number of ranks.
        layout = make_layout(recipe, world or parallel.tp * parallel.cp * parallel.pp)
    except ValueError as error:
        ranks = f" ({world} = {origin})" if world else ""
        raise UserError(f"{file}: {error}{ranks}") from error
    train, time = recipe.train, recipe.resources.time
    return {
        "name": recipe.name,
        "world": world,
        "world_from": origin,
        "layout": asdict(layout) if world else None,
        "parameters": parameter_count(recipe.model),
        "steps": train.steps,
        "global_batch": train.global_batch,
        "micro_batch": train.micro_batch,
        "micro_batches": micro_batches(recipe, layout) if world else None,
        "tokens_per_step": train.global_batch * recipe.model.sequence,
        "time_minutes": time.minutes if time else None,
        "time": time.words() if time else "the site's default",
    }


def _text(facts: dict[str, Any]) -> str:
    if facts["world"]:
        world = f"{facts['world']} ranks ({facts['world_from']})"
        layout = " x ".join(f"{key.upper()}={size}" for key, size in facts["layout"].items())
        passes = f": {facts['micro_batches']} micro-batches per step"
    else:
        world, layout, passes = f"unknown: {facts['world_from']}", "unknown", ""
    rows = [
        ("recipe", facts["name"]),
        ("world", world),
        ("layout", layout),
        ("parameters", f"{facts['parameters']:,}"),
        ("steps", f"{facts['steps']:,} of {facts['tokens_per_step']:,} tokens"),
        ("batch", f"{facts['global_batch']} samples, {facts['micro_batch']} at a time{passes}"),
        ("time", facts["time"]),
    ]
    return "\n".join(f"{name:<12}{text}" for name, text in rows)
