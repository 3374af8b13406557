"""How the job ended, for those who wait outside: submitit and the batch script."""

from __future__ import annotations

import pickle
from pathlib import Path

from hpcrun.node.placement import Placement
from hpcrun.records import EXIT_DONE, EXIT_REQUEUE, RunDir, replace_text


def clear_result(run: RunDir, place: Placement) -> None:
    """A result of an earlier restart must not be taken for this one's."""
    _result(run, place).unlink(missing_ok=True)


def write_result(run: RunDir, place: Placement, code: int) -> None:
    """The exit code for the batch script, and once the run is over submitit's result file.

    ``submitit.Job.result()`` reads a pickled ("success", value) or ("error", text).
    srun's own exit code is no use after a lost node.
    """
    replace_text(run.job / f"exit-{place.job_id}-{place.restart}", f"{code}\n")
    if code == EXIT_REQUEUE:
        return
    outcome = (
        ("success", code) if code == EXIT_DONE else ("error", f"hpcrun: the run stopped with code {code}")
    )
    result = _result(run, place)
    temporary = result.with_suffix(".tmp")
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.replace(result)


def _result(run: RunDir, place: Placement) -> Path:
    return run.job / f"{place.job_id}_0_result.pkl"
