"""``hpcrun status``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcrun.cli.choose import chosen_run, run_argument, runs_option

if TYPE_CHECKING:
    from hpcrun.runs.status import RunStatus

_EXAMPLE = """\b
Example:
  hpcrun status
  hpcrun status gpt-1b-0f3a99c1 --json
  hpcrun status 123456
"""


@click.command(epilog=_EXAMPLE)
@run_argument(required=False)
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(wanted: str | None, runs: Path | None, as_json: bool) -> None:
    """Show what a run is doing, and what happened to it. RUN: a name, the start of one, a path or a job id.

    Without RUN it is the newest. Works without accounting and while Slurm is silent, from
    the run directory alone.
    """
    from hpcrun.runs.status import run_status

    status = run_status(chosen_run(wanted, runs))
    click.echo(json.dumps(status.as_dict()) if as_json else _text(status))


def _text(status: RunStatus) -> str:
    from hpcrun.cli.show import age, of_total, pairs

    trains = status.total_steps is not None or status.step > 0
    checkpoint = "none yet" if status.last_checkpoint_step is None else f"step {status.last_checkpoint_step}"
    if status.save_failure:
        checkpoint += f"; the newest save failed: {status.save_failure}"
    attempts = f"{status.attempts} ({status.restarts} restarts, {status.requeues} requeues)"
    rows = [
        ("run", status.run),
        ("state", status.state + (f": {status.reason}" if status.reason else "")),
        ("job", _job(status)),
        ("nodes", ", ".join(status.nodes)),
        ("step", of_total(status.step, status.total_steps) if trains else ""),
        (
            "loss",
            ""
            if status.loss is None
            else f"{status.loss:.4f}"
            if isinstance(status.loss, float)
            else status.loss,
        ),
        ("speed", f"{status.tokens_per_s:,.0f} tokens/s" if status.tokens_per_s else ""),
        ("updated", f"{age(status.updated)} ago" if status.updated is not None else ""),
        ("checkpoint", checkpoint if trains else ""),
        ("attempts", attempts),
        ("in", status.path),
    ]
    return "\n".join([pairs(rows), *(f"recovered: {told.describe()}" for told in status.recoveries)])


def _job(status: RunStatus) -> str:
    if status.job_id is None:
        return "none"
    said = {"ok": status.slurm_state, "silent": "Slurm is silent"}.get(status.slurm, status.slurm)
    return f"{status.job_id} ({said})"
