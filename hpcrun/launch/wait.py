"""Waiting for a run's end, and helping it there: a requeued job starts again at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcrun.errors import UserError
from hpcrun.records import RunDir
from hpcrun.runs.status import ENDED, UNKNOWN, run_status
from hpcrun.slurm.control import start_now
from hpcrun.slurm.query import job_info

_PAUSE = 3.0


def wait_for_end(run: RunDir, say: Callable[[str], object] | None) -> str:
    """Returns the run's last state. ``say`` hears every change of state.

    Slurm holds a requeued job back for two minutes; only someone outside the job can
    lift that, and whoever waits does.
    """
    last = ""
    while True:
        status = run_status(run)
        if status.state != last and say:
            step = f"  step {status.step} of {status.total_steps}" if status.total_steps else ""
            say(f"{time.strftime('%H:%M:%S')}  {status.state}{step}")
        last = status.state
        if last in ENDED or (last == UNKNOWN and status.slurm != "silent"):
            return last
        if status.job_id and last == "requeued":
            _lift_wait(status.job_id)
        time.sleep(_PAUSE)


def _lift_wait(job_id: str) -> None:
    if job_info(job_id).reason == "BeginTime":
        try:
            start_now(job_id)
        except UserError:
            return
