"""Giving the job back to Slurm when no batch script can.

With ``--no-kill`` a job whose batch node died stays RUNNING without a batch
script (docs/slurm_facts.md), so a surviving agent requeues it. The survivors try
in the order of their nodes, each a little later, and only while the job is still
in the very restart that they belong to: a requeue that comes late would hit the
next attempt.
"""

from __future__ import annotations

import time

from hpcrun.errors import UserError
from hpcrun.node.journal import RunJournal
from hpcrun.node.placement import Placement
from hpcrun.slurm.control import requeue
from hpcrun.slurm.query import job_info

_TURN = 5.0
_TRIES = 6


def requeue_orphan(place: Placement, journal: RunJournal) -> None:
    """Requeue this agent's job unless somebody else has, or Slurm cannot be reached."""
    time.sleep(place.index * _TURN)
    for _ in range(_TRIES):
        info = job_info(place.job_id)
        if info.state != "RUNNING" or info.restarts != place.restart:
            journal.event("requeue_not_needed", state=info.state)
            return
        try:
            requeue(place.job_id)
        except UserError as error:
            journal.event("requeue_failed", reason=str(error))
        else:
            journal.event("requeued", job_id=place.job_id)
            return
        time.sleep(_TURN)
