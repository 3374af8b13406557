"""``hpcrun ckpt reshard``, ``export`` and ``import``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcrun.cli.choose import runs_option

if TYPE_CHECKING:
    from hpcrun.recipe import Model
from hpcrun.cli.ckpt_inspect import chosen_checkpoint, step_option


@click.command(
    epilog="""\b
Example:
  hpcrun ckpt reshard my-run resharded --tp 8 --pp 4
"""
)
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@runs_option
@step_option
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor parallel size.")
@click.option("--pp", type=click.IntRange(min=1), default=1, show_default=True, help="Pipeline ranks.")
def reshard(source: str, target: Path, runs: Path | None, step: int | None, tp: int, pp: int) -> None:
    """Write a checkpoint anew as tp x pp files, cut as such ranks hold it; memory stays small.

    A run does not need this: any layout reads any checkpoint. It makes every rank's reads contiguous.
    Generators are left out, because they belong to the ranks of one layout.
    """
    from hpcrun.ckpt.find import opened
    from hpcrun.ckpt.reshard import reshard as write
    from hpcrun.units import show_bytes

    folder = chosen_checkpoint(source, runs, step)
    with _read(folder):
        made = write(folder, opened(folder), target, tp, pp)
    click.echo(f"{target}: {len(made.files)} files, {show_bytes(made.bytes)}")


@click.command(
    epilog="""\b
Example:
  hpcrun ckpt export --to hf my-run model-hf
  hpcrun ckpt export --to hf --dtype bfloat16 --max-shard-size 2GB my-run model-hf
"""
)
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@runs_option
@step_option
@click.option(
    "--to", "kind", type=click.Choice(["hf"]), required=True, help="hf: safetensors and config.json."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of weights.",
)
@click.option("--max-shard-size", default="5GB", show_default=True, help="Of one file, e.g. 500MB.")
def export(
    source: str, target: Path, runs: Path | None, step: int | None, kind: str, dtype: str, max_shard_size: str
) -> None:
    """Write a checkpoint's weights so that the from_pretrained of transformers loads them.

    Llama, Qwen3 and GPT-2 style models. The bytes are the same whatever layout wrote the checkpoint.
    """
    from hpcrun.ckpt.find import opened
    from hpcrun.ckpt.huggingface import export_weights
    from hpcrun.errors import UserError
    from hpcrun.units import parse_bytes

    try:
        largest = parse_bytes(max_shard_size)
    except ValueError as error:
        raise UserError(f"--max-shard-size: {error}") from error
    folder = chosen_checkpoint(source, runs, step)
    with _read(folder):
        files = export_weights(folder, opened(folder), target, dtype, largest)
    click.echo(f"{target}: {', '.join(files)}")


@click.command(
    "import",
    epilog="""\b
Example:
  hpcrun ckpt import --from hf Llama-3.2-1B llama-start
  hpcrun ckpt import --from megatron --allow-pickle --recipe recipe.yaml megatron-run start
""",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "kind",
    type=click.Choice(["hf", "dcp", "megatron"]),
    required=True,
    help="hf: transformers with safetensors; dcp: torch.distributed.checkpoint; megatron: Megatron-LM.",
)
@click.option("--recipe", type=click.Path(path_type=Path), help="Whose model it is; for dcp and megatron.")
@click.option("--allow-pickle", is_flag=True, help="Read the pickles of dcp and megatron; nothing is run.")
def import_(source: Path, target: Path, kind: str, recipe: Path | None, allow_pickle: bool) -> None:
    """Make a checkpoint of weights from another format, and print the recipe's lines that start from it.

    Pickles are read by a reader that knows tensors and plain values; whatever else they ask for is
    refused by name.
    """
    from hpcrun.config import dump_yaml

    if kind == "hf":
        from hpcrun.ckpt.huggingface import import_weights

        model = import_weights(source, target)
    else:
        model = _import_pickled(source, target, kind, recipe, allow_pickle)
    lines = {
        "model": model.model_dump(mode="json", exclude_defaults=True),
        "checkpoint": {"init": str(target.resolve())},
    }
    click.echo(dump_yaml(lines), nl=False)


def _import_pickled(source: Path, target: Path, kind: str, recipe: Path | None, allowed: bool) -> Model:
    from hpcrun.ckpt.dcp import import_dcp
    from hpcrun.ckpt.megatron import import_megatron
    from hpcrun.errors import UserError
    from hpcrun.recipe import load_recipe

    if not allowed:
        raise UserError(f"--from {kind}: these files are pickles; say --allow-pickle to have them read")
    if recipe is None:
        raise UserError(f"--from {kind}: its files do not say the model in full; give --recipe")
    model = load_recipe(recipe).model
    (import_dcp if kind == "dcp" else import_megatron)(source, target, model)
    return model


@contextmanager
def _read(folder: Path) -> Iterator[None]:
    """Long reads: retention leaves the folder alone, and what is damaged is one line."""
    from hpcrun.blocks import Damaged
    from hpcrun.errors import UserError
    from hpcrun.retention import reading

    try:
        with reading(folder):
            yield
    except Damaged as error:
        raise UserError(str(error)) from error
