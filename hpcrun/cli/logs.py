"""``hpcrun logs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcrun.cli.choose import chosen_run, run_argument, runs_option

if TYPE_CHECKING:
    from hpcrun.records import RunDir

_LAST_LINES = 50
_EXAMPLE = """\b
Example:
  hpcrun logs -f
  hpcrun logs gpt-1b-0f3a99c1 --rank 37 --attempt 2
  hpcrun logs gpt-1b-0f3a99c1 --json
"""


@click.command(epilog=_EXAMPLE)
@run_argument(required=False)
@runs_option
@click.option("-f", "--follow", is_flag=True, help="Go on, through restarts and requeues, to the run's end.")
@click.option(
    "--rank", type=click.IntRange(0), help="One rank; default: all of up to 4, else the one that logs."
)
@click.option("--attempt", type=click.IntRange(1), help="One attempt; default: the newest with a log.")
@click.option("--json", "as_json", is_flag=True, help="Print where the log files are, as one JSON object.")
def command(
    wanted: str | None, runs: Path | None, follow: bool, rank: int | None, attempt: int | None, as_json: bool
) -> None:
    """Show what the ranks of a run printed. RUN: a name, the start of one, a path or a job id.

    Before any rank has started it shows what the job itself printed.
    """
    from hpcrun.errors import UserError
    from hpcrun.runs.logs import attempts_with_logs

    if follow and (attempt is not None or as_json):
        raise UserError("--follow goes on with the newest attempt; leave --attempt and --json out")
    run = chosen_run(wanted, runs)
    if as_json:
        click.echo(json.dumps(_files(run, rank, attempt)))
    elif follow:
        _follow(run, rank)
    elif attempt is None and not attempts_with_logs(run):
        _show_job(run)
    else:
        _show(run, rank, attempt or attempts_with_logs(run)[-1])


def _files(run: RunDir, rank: int | None, attempt: int | None) -> dict[str, object]:
    from hpcrun.runs.logs import attempts_with_logs, job_files, rank_logs

    files = [
        {"attempt": number, "rank": of_rank, "path": str(path), "bytes": path.stat().st_size}
        for number in attempts_with_logs(run)
        if attempt in (None, number)
        for of_rank, path in rank_logs(run, number).items()
        if rank in (None, of_rank)
    ]
    return {"run": run.name, "logs": files, "job": [str(path) for path in job_files(run)]}


def _show(run: RunDir, rank: int | None, attempt: int) -> None:
    from hpcrun.errors import UserError
    from hpcrun.runs.logs import choose_logs, rank_logs, read_logs

    logs = choose_logs(run, attempt, rank)
    if not logs:
        there = ", ".join(str(number) for number in rank_logs(run, attempt)) or "none"
        wanted = "" if rank is None else f" of rank {rank}"
        raise UserError(f"{run.name} has no log{wanted} in attempt {attempt}; ranks with one: {there}")
    for number, line in read_logs(logs):
        click.echo(line if len(logs) == 1 else f"[rank {number}] {line}")


def _show_job(run: RunDir) -> None:
    """No rank has written: the run waits, or it failed before it came so far."""
    from hpcrun.runs.logs import job_files, tail
    from hpcrun.runs.status import run_status

    status = run_status(run)
    reason = f" ({status.reason})" if status.reason else ""
    click.echo(f"{run.name} is {status.state}{reason}: no rank has written yet", err=True)
    for path in job_files(run):
        click.echo(f"==> {path} <==", err=True)
        for line in tail(path, _LAST_LINES):
            click.echo(line)


def _follow(run: RunDir, rank: int | None) -> None:
    from hpcrun.runs.logs import attempts_with_logs, follow_logs
    from hpcrun.runs.status import EndWatch

    if not attempts_with_logs(run):
        _show_job(run)
    shown = 0
    for attempt, number, line in follow_logs(run, rank, EndWatch(run).over):
        if attempt != shown:
            shown = attempt
            click.echo(f"==> attempt {attempt} <==", err=True)
        click.echo(line if rank is not None else f"[rank {number}] {line}")
