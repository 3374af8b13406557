"""``hpcrun ckpt ls``, ``show``, ``verify``, ``diff`` and ``prune``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcrun.cli.choose import chosen_run, run_argument, runs_option

if TYPE_CHECKING:
    from hpcrun.ckpt.diff import Difference
    from hpcrun.manifest import Manifest

step_option = click.option("--step", type=int, help="Of a run: the checkpoint of this step, not the newest.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def chosen_checkpoint(target: str, runs: Path | None, step: int | None = None) -> Path:
    """The checkpoint that TARGET means: a folder, a manifest.json, or a run's newest."""
    from hpcrun.ckpt.find import checkpoint_at, newest

    folder = checkpoint_at(target) if step is None else None
    return folder or newest(chosen_run(target, runs), step)


@click.command(
    epilog="""\b
Example:
  hpcrun ckpt ls my-run
"""
)
@run_argument(required=True)
@runs_option
@json_option
def ls(wanted: str, runs: Path | None, as_json: bool) -> None:
    """List the checkpoints of a run, newest first, with those that do not count."""
    from hpcrun.ckpt.contents import layout_text
    from hpcrun.ckpt.find import listed
    from hpcrun.cli.show import age, table
    from hpcrun.units import show_bytes

    run = chosen_run(wanted, runs)
    found = listed(run)
    if as_json:
        rows = [
            {"folder": str(one.folder), "step": one.step, "attempt": one.attempt, "state": one.state}
            | ({"bytes": one.manifest.bytes, "written": one.manifest.written, "layout": one.manifest.layout,
                "loss": one.manifest.state.get("loss")} if one.manifest else {})
            for one in found
        ]  # fmt: skip
        click.echo(json.dumps(rows))
        return
    if not found:
        click.echo(f"no checkpoints in {run.checkpoints}")
        return
    lines = []
    for one in found:
        told = one.manifest
        loss = told.state.get("loss") if told else None
        lines.append(
            (
                one.folder.name,
                show_bytes(told.bytes) if told else "-",
                age(time.time() - told.written) if told else "-",
                f"{loss:.4f}" if isinstance(loss, float) else "-",
                layout_text(told.layout) if told else "-",
                one.state,
            )
        )
    click.echo(table(("NAME", "BYTES", "WRITTEN", "LOSS", "LAYOUT", "STATE"), lines))


@click.command(
    epilog="""\b
Example:
  hpcrun ckpt show my-run
  hpcrun ckpt show my-run --step 4000 --all
  hpcrun ckpt show runs/my-run-1a2b3c4d/checkpoints/step_00004000.a0001
"""
)
@click.argument("target")
@runs_option
@step_option
@click.option("--all", "every", is_flag=True, help="Every layer, also those that are alike.")
@json_option
def show(target: str, runs: Path | None, step: int | None, every: bool, as_json: bool) -> None:
    """What is in a checkpoint: TARGET is a run, whose newest is meant, or a checkpoint's folder."""
    from hpcrun.ckpt.contents import bytes_by_kind, parameters, rows
    from hpcrun.ckpt.find import opened
    from hpcrun.cli.show import table
    from hpcrun.units import show_bytes

    folder = chosen_checkpoint(target, runs, step)
    manifest = opened(folder)
    tensors = rows(manifest, every=every)
    if as_json:
        told = manifest.model_dump(exclude={"tensors", "files"}) | {
            "folder": str(folder),
            "bytes": manifest.bytes,
            "parameters": parameters(manifest),
            "bytes_by_kind": bytes_by_kind(manifest),
            "files": {file.name: file.size for file in manifest.files},
            "tensors": [asdict(row) for row in rows(manifest, every=True)],
        }
        click.echo(json.dumps(told))
        return
    _show(folder, manifest)
    lines = [
        (
            row.name,
            row.dtype,
            "x".join(map(str, row.shape)) or "scalar",
            str(row.pieces),
            show_bytes(row.bytes),
        )
        for row in tensors
    ]
    click.echo(table(("TENSOR", "DTYPE", "SHAPE", "PIECES", "BYTES"), lines))


def _show(folder: Path, manifest: Manifest) -> None:
    from hpcrun.ckpt.contents import bytes_by_kind, layout_text, parameters
    from hpcrun.cli.show import age
    from hpcrun.units import show_bytes

    sizes = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in bytes_by_kind(manifest).items())
    click.echo(f"folder      {folder}")
    written = age(time.time() - manifest.written)
    click.echo(f"step        {manifest.step}, attempt {manifest.attempt} of {manifest.run}, {written} ago")
    click.echo(f"layout      {layout_text(manifest.layout)}; {len(manifest.files)} files")
    click.echo(f"parameters  {parameters(manifest):,}; {sizes}")
    click.echo(f"model       {json.dumps(manifest.model)}")
    click.echo(f"state       {json.dumps(manifest.state)}\n")


@click.command(
    epilog="""\b
Example:
  hpcrun ckpt verify my-run
  hpcrun ckpt verify --deep --all my-run
"""
)
@click.argument("target")
@runs_option
@step_option
@click.option("--deep", is_flag=True, help="Read every byte; without it: manifest, sizes and frames.")
@click.option("--all", "every", is_flag=True, help="Every committed checkpoint of a run, superseded or not.")
@json_option
def verify(target: str, runs: Path | None, step: int | None, deep: bool, every: bool, as_json: bool) -> int:
    """Whether a checkpoint is whole. Exits 0 if it is, 1 if not, 2 if there is none.

    Each damaged place is one line: file, tensor, block and bytes.
    """
    from hpcrun.ckpt.find import committed
    from hpcrun.ckpt.verify import verify as examine
    from hpcrun.errors import UserError
    from hpcrun.manifest import ManifestError
    from hpcrun.retention import reading

    folders = committed(chosen_run(target, runs)) if every else [chosen_checkpoint(target, runs, step)]
    found: dict[str, list[str]] = {}
    for folder in folders:
        try:
            with reading(folder), _progress(folder.name) as progress:
                damages = examine(folder, deep=deep, progress=progress)
        except ManifestError as error:
            if every:
                continue  # retention took it meanwhile
            raise UserError(str(error)) from error
        found[str(folder)] = damages
        word = f"{len(damages)} damaged" if damages else "whole" if deep else "whole, tensor data not read"
        if not as_json:
            click.echo("\n".join([*damages, f"{folder}: {word}"]))
    if not found:
        raise UserError(f"{target}: no checkpoint yet")
    if as_json:
        click.echo(json.dumps(found))
    return 1 if any(found.values()) else 0


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@click.command(
    epilog="""\b
Example:
  hpcrun ckpt diff my-run other-run
  hpcrun ckpt diff checkpoints/step_00000100.a0001 checkpoints/step_00000100.a0002 --tolerance 1e-6
"""
)
@click.argument("first")
@click.argument("second")
@runs_option
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Values that differ by no more are the same; default: every bit counts.",
)
@json_option
def diff(first: str, second: str, runs: Path | None, tolerance: float | None, as_json: bool) -> int:
    """How two checkpoints differ, whatever layouts wrote them. Exits 0 if they do not, 1 if they do."""
    from hpcrun.blocks import Damaged
    from hpcrun.ckpt.diff import compare
    from hpcrun.ckpt.find import opened
    from hpcrun.errors import UserError
    from hpcrun.retention import reading

    one, other = (chosen_checkpoint(target, runs) for target in (first, second))
    try:
        with reading(one), reading(other):
            found = compare(one, opened(one), other, opened(other), tolerance)
    except Damaged as error:
        raise UserError(str(error)) from error
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        _show_difference(found)
    return 1 if found else 0


def _show_difference(found: Difference) -> None:
    for key in found.keys:
        click.echo(key)
    for names, which in ((found.only_first, "first"), (found.only_second, "second")):
        for name in names:
            click.echo(f"{name}: only in the {which}")
    for line in found.shapes:
        click.echo(line)
    for change in found.values:
        largest = "" if change.largest is None else f", by at most {change.largest:.3g}"
        click.echo(f"{change.name}: {change.differing} of {change.elements} elements differ{largest}")
    if not found:
        click.echo("the same")


@click.command(
    epilog="""\b
Example:
  hpcrun ckpt prune my-run --dry-run
  hpcrun ckpt prune my-run --keep 2 --yes
"""
)
@run_argument(required=True)
@runs_option
@click.option("--keep", type=click.IntRange(min=1), help="The newest so many stay; default: the recipe's.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Steps that are multiples of it stay.")
@click.option("--keep-best", type=click.IntRange(min=1), help="So many with the lowest loss stay.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def prune(
    wanted: str,
    runs: Path | None,
    keep: int | None,
    keep_every: int | None,
    keep_best: int | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove old checkpoints of a run, void ones, and what failed saves have left.

    The newest that the run could resume from always stays, and so does one that is being read.
    """
    from hpcrun.ckpt.find import folder_bytes
    from hpcrun.errors import UserError
    from hpcrun.retention import removable, remove_checkpoint
    from hpcrun.runs.runfile import read_run_file
    from hpcrun.units import show_bytes

    run = chosen_run(wanted, runs)
    recipe = read_run_file(run).recipe.checkpoint
    candidates = partial(
        removable,
        run,
        unfinished_before=run.last_attempt(),
        keep=keep or recipe.keep,
        keep_every=keep_every or recipe.keep_every,
        keep_best=keep_best or recipe.keep_best,
    )
    doomed = candidates()
    if not doomed:
        click.echo("nothing to remove")
        return
    sizes = {folder: folder_bytes(folder) for folder in doomed}
    for folder, size in sizes.items():
        click.echo(f"{folder.name}  {show_bytes(size)}")
    total = show_bytes(sum(sizes.values()))
    if dry_run or not (yes or click.confirm(f"remove these, {total}?", err=True)):
        click.echo(f"{total} would be freed")
        return
    freed = 0
    for folder in sorted(sizes.keys() & set(candidates())):  # somebody may read one since the question
        try:
            remove_checkpoint(folder)
        except OSError as error:
            told = f"{error.filename or folder}: cannot be removed: {error.strerror}"
            raise UserError(f"{told}; {show_bytes(freed)} freed") from error
        freed += sizes[folder]
    click.echo(f"{show_bytes(freed)} freed")
