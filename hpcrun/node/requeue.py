"""Giving the job back to Slurm when no batch script can, or when srun keeps the batch script waiting.

With ``--no-kill`` a job whose batch node died stays RUNNING without a batch
script (docs/slurm_facts.md), so a surviving agent requeues it. The survivors try
in the order of their nodes, and only while the job is still in the very restart
that they belong to: a requeue that comes late would hit the next attempt.
"""

from __future__ import annotations

import time
from contextlib import suppress

from hpcrun.errors import UserError
from hpcrun.node.journal import RunJournal
from hpcrun.node.placement import Placement
from hpcrun.slurm.control import kill_step, requeue
from hpcrun.slurm.query import job_info, node_state

_TURN = 5.0
_ALIVE_AFTER = 120.0
"""Slurm misses a node within a third of SlurmdTimeout, by default 100 s."""


class GiveBack:
    """Requeues this agent's job once, when it is this agent's turn."""

    def __init__(self, place: Placement, journal: RunJournal) -> None:
        self._place = place
        self._journal = journal
        self._not_before: float | None = None
        self._refused_since: float | None = None

    def as_survivor(self, refused: bool) -> bool:
        """Try, now that the first node's agent is gone; True when nothing is left to do.

        ``refused``: the node itself answers, but nobody listens there. Then either its
        agent alone has died, and its batch script acts once this step ends, or the node
        has crashed and come up again without a batch script, which Slurm soon sees.

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
        state = node_state(self._place.nodes[0])
        if state.startswith("down"):
            return self._requeue()
        return self._only_the_agent_died(refused and bool(state) and not state.endswith("*"))

    def _only_the_agent_died(self, answers: bool) -> bool:
        """Whether the first node has answered both us and Slurm for long enough to be alive."""
        if not answers:
            self._refused_since = None
            return False
        self._refused_since = self._refused_since or time.monotonic()
        return time.monotonic() - self._refused_since > _ALIVE_AFTER

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


def end_frozen_agents(hosts: set[str], place: Placement, journal: RunJournal) -> None:
    """Kill the step, this process included, when an agent that was lost still runs on a living node.

    srun waits for every task, so a frozen agent would hold the batch script until the time limit.
    A node that is only cut off is not ended so: srun returns when Slurm has declared it down.
    """
    answered_since: dict[str, float] = {}
    while hosts:
        time.sleep(_TURN)
        for host in sorted(hosts):
            state = node_state(host)
            if state.startswith("down"):
                hosts.remove(host)
            elif not state or state.endswith("*"):
                answered_since.pop(host, None)
            elif time.monotonic() - answered_since.setdefault(host, time.monotonic()) > _ALIVE_AFTER:
                journal.event("step_killed", reason=f"the agent on {host} is frozen, its node is not")
                with suppress(UserError):
                    kill_step(place.job_id, place.step)
