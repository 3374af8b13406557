"""``hpcrun bench``: measure this machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import click

from hpcrun.datafiles import data_folder
from hpcrun.errors import UserError
from hpcrun.units import parse_bytes


@click.group("bench")
def command() -> None:
    """Measure how fast this machine trains and saves.

    \b
    Example:
      hpcrun bench train --layout tp=2 --layout dp=2,zero=3
      hpcrun bench ckpt --folder /scratch/me
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
    words = [str(recipe or data_folder("recipes") / "bench.yaml"), "--rounds", str(rounds)]
    words += [f"--layout={layout}" for layout in layouts or ("dp=2", "tp=2", "pp=2")]
    words += [f"--set={override}" for override in overrides] + ["--json"] * as_json
    _run("training.bench", words)


@command.command("ckpt")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="On the file system to measure; default: here.",
)
@click.option("--size", default="256M", show_default=True, help="Bytes of the state of one rank.")
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True, help="Goes of each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every sample.")
def ckpt(folder: Path, size: str, rounds: int, as_json: bool) -> None:
    """Compare saving and loading checkpoints with raw writes, raw reads, PyTorch's writer and a memcpy.

    One rank saves and loads in turns with the others, so that a drift of the machine strikes all alike.

    \b
    Example:
      hpcrun bench ckpt --folder /scratch/me --size 4G
    """
    words = ["--folder", str(folder), "--size", str(_bytes(size)), "--rounds", str(rounds)]
    _run("training.bench.checkpoints", words + ["--json"] * as_json)


def _bytes(size: str) -> int:
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise UserError(f"--size: {error}") from error


def _run(module: str, words: list[str]) -> NoReturn:
    if importlib.util.find_spec("torch") is None:
        raise UserError("the trainer's packages are not installed here: pip install 'hpcrun[train]'")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", "-m", module, *words], env=environment)
    sys.exit(done.returncode)
