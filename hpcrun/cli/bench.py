"""``hpcrun bench``: measure this machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import click

from hpcrun.datafiles import data_folder
from hpcrun.errors import UserError


@click.group("bench")
def command() -> None:
    """Measure how fast this machine trains.

    \b
    Example:
      hpcrun bench train --layout tp=2 --layout dp=2,zero=3
    """


@command.command("train")
@click.argument("recipe", type=click.Path(path_type=Path), required=False)
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="A layout to measure, by keys of the recipe's section parallel; several may be given.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key: train.micro_batch=4."
)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Steps of each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every sample.")
def train(
    recipe: Path | None, layouts: tuple[str, ...], overrides: tuple[str, ...], rounds: int, as_json: bool
) -> None:
    """Compare the trainer in several layouts with a plain PyTorch loop on the same model.

    RECIPE is by default bench.yaml, 47 million parameters of hidden size 1024. All candidates train
    in turns on this machine, one thread per rank on a CPU, and a matrix product shows the roof.

    \b
    Example:
      hpcrun bench train
      hpcrun bench train recipe.yaml --layout tp=2,sequence_parallel=true --layout pp=2 --rounds 11
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError("the trainer's packages are not installed here: pip install 'hpcrun[train]'")
    words = [str(recipe or data_folder("recipes") / "bench.yaml"), "--rounds", str(rounds)]
    words += [f"--layout={layout}" for layout in layouts or ("dp=2", "tp=2", "pp=2")]
    words += [f"--set={override}" for override in overrides] + ["--json"] * as_json
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", "-m", "training.bench", *words], env=environment)
    sys.exit(done.returncode)
