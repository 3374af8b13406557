"""Submitting: a recipe and a site become a run directory and a job."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.launch.environment import Export, job_environment
from hpcrun.launch.estimate import data_notes, memory_notes, storage_notes
from hpcrun.launch.render import batch_script, job_comment
from hpcrun.launch.request import Options, Request, make_request, request_of, with_failure_rate
from hpcrun.recipe import Recipe
from hpcrun.records import JsonLines, RunDir, replace_text
from hpcrun.runs.create import (
    collect_secrets,
    create_run,
    make_run_file,
    new_run,
    runs_folder,
    secrets_path,
)
from hpcrun.runs.runfile import RunFile, read_run_file
from hpcrun.runs.snapshot import Tree, find_tree
from hpcrun.runs.striping import stripe
from hpcrun.sites.model import Site
from hpcrun.slurm.control import SubmissionUnknown


@dataclass(frozen=True)
class Draft:
    """A submission that has touched nothing yet."""

    run: RunDir
    file: RunFile
    request: Request
    tree: Tree | None
    secrets: dict[str, str]
    notes: list[str]
    """What the user should know: checkpoint bytes, quota, purge."""

    @property
    def script(self) -> str:
        return batch_script(self.run, self.file, self.request)

    @property
    def environment(self) -> list[Export]:
        return job_environment(self.file.recipe, self.file.site)


def draft(recipe: Recipe, site: Site, options: Options) -> Draft:
    """Check everything and decide every name, without touching disk or Slurm.

    Raises:
        UserError: whatever would fail later and can be seen now.
    """
    request = make_request(recipe, site)
    recipe = with_failure_rate(recipe, site)
    notes = data_notes(recipe)
    run = new_run(runs_folder(site, options.runs), recipe.name)
    tree = find_tree(Path.cwd()) if options.snapshot else None
    values = collect_secrets(recipe.secrets, os.environ)
    file = make_run_file(
        run,
        recipe,
        site,
        nodes=request.nodes,
        ranks_per_node=request.ranks_per_node,
        tree=tree,
        secrets_file=secrets_path(run.name) if values else None,
    )
    notes += storage_notes(recipe, site, run)
    notes += memory_notes(recipe, request.ranks_per_node, request.memory or site.node.memory)
    return Draft(run, file, request, tree, values, notes)


def submit(drafted: Draft) -> str:
    """Make the run directory and hand the job over; returns the job id.

    Raises:
        UserError: the directory cannot be made, or Slurm refused; nothing is left behind.
        SubmissionUnknown: the job may be queued; then the directory stays.
    """
    try:
        create_run(drafted.run, drafted.file, drafted.tree)
        drafted.notes.extend(stripe(drafted.run.checkpoints, drafted.file.site.filesystem))
        _write_secrets(drafted)
        return _start(drafted.run, drafted.file, drafted.request, drafted.script)
    except SubmissionUnknown:
        raise
    except UserError:
        shutil.rmtree(drafted.run.path, ignore_errors=True)
        secrets_path(drafted.run.name).unlink(missing_ok=True)
        raise


def submit_again(run: RunDir) -> str:
    """A new job for a run that exists; returns the job id.

    Raises:
        UserError: not a run directory, or Slurm refused.
    """
    file = read_run_file(run)
    request = request_of(file)
    return _start(run, file, request, batch_script(run, file, request))


def _start(run: RunDir, file: RunFile, request: Request, script: str) -> str:
    from hpcrun.launch.executor import start_local, start_slurm

    if file.site.scheduler.kind == "local":
        agent = [file.interpreter, "-P", "-m", "hpcrun.node", str(run.path)]
        exports = {export.name: export.value for export in job_environment(file.recipe, file.site)}
        agent = ["env", *(f"{name}={value}" for name, value in exports.items()), *agent]
        minutes = request.time.minutes
        job_id = start_local(run.job, agent, request.gpus_per_node, minutes, str(run.path))
    else:
        job_id = start_slurm(run.job, script, job_comment(file), str(run.path))
    log = JsonLines(run.job / "jobs.jsonl")
    log.write(time=time.time(), job_id=job_id, site=file.site.name, kind=file.site.scheduler.kind)
    log.close()
    return job_id


def _write_secrets(drafted: Draft) -> None:
    if not drafted.secrets:
        return
    path = secrets_path(drafted.run.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(path, json.dumps(drafted.secrets), mode=0o600)
    except OSError as error:
        raise UserError(f"{path}: the secrets file cannot be written: {error.strerror}") from error
