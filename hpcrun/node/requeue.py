"""Giving the job back to Slurm when no batch script can.

With ``--no-kill`` a job whose batch node died stays RUNNING without a batch
script (docs/slurm_facts.md), so a surviving agent requeues it. The survivors try
in the order of their nodes, and only while the job is still in the very restart
that they belong to: a requeue that comes late would hit the next attempt.
"""

from __future__ import annotations

import time

from hpcrun.errors import UserError
from hpcrun.node.journal import RunJournal
from hpcrun.node.placement import Placement
from hpcrun.slurm.control import requeue
from hpcrun.slurm.query import job_info, node_is_down

_TURN = 5.0


class GiveBack:
    """Requeues this agent's job once, when it is this agent's turn."""

    def __init__(self, place: Placement, journal: RunJournal) -> None:
        self._place = place
        self._journal = journal
        self._not_before: float | None = None

    def as_survivor(self) -> bool:
        """Try, now that the first node cannot be reached; True when nothing is left to do.

        Slurm must have declared the first node down: if only the way to it is cut, the
        others may be training on; and a requeue before that leaves Slurm's GPU counts
        wrong, so that the next attempt cannot start a step (docs/slurm_facts.md).
        """
        if self._not_before is None:
            self._journal.event("coordinator_unreachable", node=self._place.nodes[0])
            self._not_before = time.monotonic() + self._place.index * _TURN
        if time.monotonic() < self._not_before:
            return False
        self._not_before = time.monotonic() + _TURN
        if self._not_ours():
            return True
        if not node_is_down(self._place.nodes[0]):
            return False
        return self._requeue()

    def _not_ours(self) -> bool:
        info = job_info(self._place.job_id)
        if info.state is None or (info.state == "RUNNING" and info.restarts == self._place.restart):
            return False
        self._journal.event("requeue_not_needed", state=info.state, restarts=info.restarts)
        return True

    def _requeue(self) -> bool:
        try:
            requeue(self._place.job_id)
        except UserError as error:
            self._journal.event("requeue_failed", reason=str(error))
            return False
        self._journal.event("requeued", job_id=self._place.job_id)
        return True
