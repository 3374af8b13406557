"""Making a run directory."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from hpcrun import __version__
from hpcrun.errors import UserError
from hpcrun.recipe import Recipe
from hpcrun.records import RunDir, replace_text
from hpcrun.runs.runfile import RunFile, Versions, run_file_text
from hpcrun.runs.snapshot import Tree, copy_tree
from hpcrun.sites.model import Site

RUNS_VARIABLE = "HPCRUN_RUNS"
_FOLDERS = ("control", "attempts", "events", "metrics", "logs", "checkpoints")


def runs_folder(site: Site, chosen: Path | None = None) -> Path:
    """Where runs lie: ``chosen``, $HPCRUN_RUNS, the site's filesystem.runs, or ``runs`` here."""
    text = str(chosen) if chosen else os.environ.get(RUNS_VARIABLE) or site.filesystem.runs or "runs"
    folder = Path(os.path.expandvars(text)).expanduser()
    if "$" in str(folder) and not chosen:
        raise UserError(f"{text}: a variable in filesystem.runs or ${RUNS_VARIABLE} is not set")
    return folder.absolute()


def new_run(folder: Path, name: str) -> RunDir:
    """A name that no run has; nothing is made yet.

    Raises:
        UserError: the path holds a line end, which neither Slurm nor a log can carry.
    """
    run = RunDir(folder / f"{name}-{secrets.token_hex(4)}")
    if any(ord(letter) < 32 for letter in str(run.path)):
        raise UserError(f"{str(run.path)!r}: the path holds a control character; choose another with --runs")
    return run


def make_run_file(
    run: RunDir,
    recipe: Recipe,
    site: Site,
    *,
    nodes: int,
    ranks_per_node: int,
    tree: Tree | None,
    secrets_file: Path | None,
) -> RunFile:
    """What will stand in run.yaml. Ranks start in the snapshot's copy of the current folder."""
    here = Path.cwd()
    working_dir = run.code / here.relative_to(tree.root) if tree and here.is_relative_to(tree.root) else here
    return RunFile(
        run=run.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        nonce=secrets.token_hex(4),
        versions=Versions(schema=1, hpcrun=__version__, python=sys.version.split()[0]),
        interpreter=sys.executable,
        working_dir=str(working_dir),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        secrets_file=str(secrets_file) if secrets_file else None,
        site=site,
        recipe=recipe,
    )


def create_run(run: RunDir, file: RunFile, tree: Tree | None) -> None:
    """Make the directory with everything that Slurm expects to exist; run.yaml comes last.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        run.path.mkdir(parents=True, mode=0o750)
        for name in _FOLDERS:
            (run.path / name).mkdir(mode=0o750)
        run.job.mkdir(mode=0o700)
        run.code.mkdir(mode=0o750)
        replace_text(run.job / "token", secrets.token_hex(32), mode=0o600)
        if tree:
            copy_tree(tree, run)
        Path(file.working_dir).mkdir(parents=True, exist_ok=True)
        replace_text(run.run_yaml, run_file_text(file))
    except OSError as error:
        raise UserError(
            f"{error.filename or run.path}: the run directory cannot be made: {error.strerror}"
        ) from error


def secrets_path(run_name: str) -> Path:
    """Owner-only, in the user's state folder: never in a run directory that others may read."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "hpcrun" / "secrets" / f"{run_name}.json"


def collect_secrets(names: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The values of the recipe's ``secrets`` from the caller's environment.

    Raises:
        UserError: one is not set.
    """
    for name in names:
        if name not in environ:
            raise UserError(f"secrets: {name} is not set in your environment; export it before you submit")
    return {name: environ[name] for name in names}
