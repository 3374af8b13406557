"""What a run will take on disk, and whether the place suits it."""

from __future__ import annotations

import shutil
from pathlib import Path

from hpcrun.counts import parameter_count
from hpcrun.errors import UserError
from hpcrun.recipe import Recipe
from hpcrun.records import RunDir
from hpcrun.sites.model import Site
from hpcrun.units import show_bytes

BYTES_PER_PARAMETER = 12
"""fp32 weight and Adam's two moments."""


def checkpoint_bytes(recipe: Recipe) -> int:
    """Bytes of one checkpoint; 0 for a command of the user's."""
    return 0 if recipe.command else BYTES_PER_PARAMETER * parameter_count(recipe.model)


def kept_bytes(recipe: Recipe) -> int | None:
    """Bytes of all checkpoints that lie there at once: those kept, and the one being written.

    None where nobody can say: all are kept, and the interval is a time.
    """
    wanted, steps = recipe.checkpoint, recipe.train.steps
    saves = -(-steps // wanted.every_steps) if wanted.every_steps else None
    if wanted.keep is None:
        return None if saves is None else checkpoint_bytes(recipe) * saves
    kept = wanted.keep + 1 + (wanted.keep_best or 0)
    kept += steps // wanted.keep_every if wanted.keep_every else 0
    return checkpoint_bytes(recipe) * (kept if saves is None else min(saves, kept))


def memory_bytes(recipe: Recipe, ranks_per_node: int) -> int:
    """Bytes that copies in memory take on a node at most: two generations, its own and its neighbour's."""
    if recipe.checkpoint.memory_every is None:
        return 0
    split = recipe.parallel.tp * recipe.parallel.pp
    return 4 * ranks_per_node * checkpoint_bytes(recipe) // split


def data_notes(recipe: Recipe) -> list[str]:
    """A warning where the data cannot be seen from here.

    Raises:
        UserError: the trainer would find no data at all.
    """
    if recipe.command:
        return []
    if recipe.data.path is None:
        raise UserError("data.path is not set; make a token file with python -m training.data.prepare")
    if not Path(recipe.data.path).exists():
        return [f"warning: data.path {recipe.data.path} is not visible from this machine"]
    init = recipe.checkpoint.init
    if init and not Path(init).is_dir():
        raise UserError(f"checkpoint.init: no folder {init}")
    return []


def memory_notes(recipe: Recipe, ranks_per_node: int, limit: int | None) -> list[str]:
    """One line about copies in memory, beside the memory that a node gives."""
    need = memory_bytes(recipe, ranks_per_node)
    if not need:
        return []
    told = f"copies in memory take at most {show_bytes(need)} per node"
    if limit is not None and need > limit:
        return [f"warning: {told}, and the job gets {show_bytes(limit)}: they will be left out"]
    return [told]


def storage_notes(recipe: Recipe, site: Site, run: RunDir) -> list[str]:
    """One line each about size, free space, quota, purging and the place of the run."""
    notes, kept = [], kept_bytes(recipe)
    filesystem = site.filesystem
    parent = next(folder for folder in run.path.parents if folder.exists())
    free = shutil.disk_usage(parent).free
    each = checkpoint_bytes(recipe)
    if each:
        at_once = f"at most {show_bytes(kept)} at once" if kept is not None else "and all of them are kept"
        notes.append(f"checkpoints take {show_bytes(each)} each, {at_once}; {show_bytes(free)} are free")
    kept = kept if kept is not None else each
    if kept > free:
        notes.append(f"warning: {parent} has only {show_bytes(free)} free")
    if filesystem.quota_bytes is not None and kept > filesystem.quota_bytes:
        notes.append(f"warning: the quota of {site.name} is {show_bytes(filesystem.quota_bytes)}")
    if filesystem.purge_days:
        notes.append(f"warning: {site.name} deletes files untouched for {filesystem.purge_days} days")
    if site.scheduler.kind == "slurm":
        notes += _place_notes(run.path)
    return notes


def _place_notes(path: Path) -> list[str]:
    if path.is_relative_to(Path.home()):
        return [f"warning: {path} is under your home, which is often small and slow; see --runs"]
    if any(path.is_relative_to(local) for local in ("/tmp", "/dev/shm")):
        return [f"warning: {path} is not shared between nodes on most clusters; see --runs"]
    return []
