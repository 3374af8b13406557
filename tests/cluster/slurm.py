"""Asking Slurm for node and job states."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from tests.cluster.commands import wait_for
from tests.cluster.errors import ClusterError
from tests.cluster.state import State

if TYPE_CHECKING:
    from tests.cluster.cluster import Cluster

USABLE = {"IDLE", "MIXED", "ALLOCATED"}


def _fields(line: str) -> dict[str, str]:
    """The key=value words of one line of `scontrol --oneliner`."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _show(cluster: Cluster, *what: str) -> str:
    """What `scontrol show` prints; ClusterError when it fails or the controller is silent."""
    argv = ["scontrol", "--oneliner", "show", *what]
    try:
        return cluster.run(argv, timeout=30).stdout
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"{' '.join(argv)}: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(argv)}: no answer within 30 s") from error


def node_states(cluster: Cluster) -> dict[str, str]:
    """State of each node by name, such as IDLE or DOWN+NOT_RESPONDING."""
    rows = [_fields(line) for line in _show(cluster, "node").splitlines()]
    return {row["NodeName"]: row["State"] for row in rows if "NodeName" in row}


def wait_registered(cluster: Cluster, node: str, since: float, timeout: float) -> None:
    """Wait until the controller knows a slurmd on `node` started at or after `since` (epoch seconds)."""

    def registered() -> bool:
        started = _fields(_show(cluster, "node", node)).get("SlurmdStartTime", "None")
        return started not in ("None", "Unknown") and datetime.fromisoformat(started).timestamp() >= since

    wait_for(f"slurmd of {node} to register", registered, timeout)


def wait_usable(cluster: Cluster, nodes: Sequence[str], timeout: float) -> None:
    """Wait until all `nodes` answer the controller and take jobs."""
    last: dict[str, str] = {}

    def usable() -> bool:
        last.update(node_states(cluster))
        # A state of one word: every flag (COMPLETING, NOT_RESPONDING, DRAIN) keeps new jobs away.
        return all(last[node] in USABLE for node in nodes)

    try:
        wait_for(f"nodes {','.join(nodes)} to take jobs", usable, timeout)
    except ClusterError as error:
        states = ", ".join(f"{node} is {last.get(node)}" for node in nodes)
        raise ClusterError(f"{error}: {states}") from error


def job(cluster: Cluster, job_id: int | str) -> dict[str, str]:
    """The fields of `scontrol show job`; empty when Slurm no longer knows the job."""
    try:
        return _fields(_show(cluster, "job", str(job_id)))
    except ClusterError as error:
        if "Invalid job id" in str(error):
            return {}
        raise


def wait_state(cluster: Cluster, job_id: int | str, states: Sequence[str], timeout: float) -> dict[str, str]:
    """Wait until the job's JobState is among `states`; returns its fields."""
    last: dict[str, str] = {}

    def reached() -> dict[str, str] | None:
        last.update(job(cluster, job_id))
        return last if last.get("JobState") in states else None

    try:
        return wait_for(f"job {job_id} to be {' or '.join(states)}", reached, timeout, interval=0.3)
    except ClusterError as error:
        raise ClusterError(f"{error}: it is {last.get('JobState')} ({last.get('Reason')})") from error


def describe(cluster: Cluster, state: State) -> list[str]:
    """One line per daemon and node for a person."""
    lines = []
    for name in state.processes:
        if name not in state.nodes:
            running = state.running(name)
            lines.append(f"{name:10} {f'pid {running.pid}' if running else 'ended'}")
    try:
        states = node_states(cluster)
    except ClusterError as error:
        lines.append(str(error))
        states = {}
    for node in state.nodes:
        link = "" if state.network.link_is_up(node) else ", link cut"
        machine = "" if state.running(node) else ", crashed"
        lines.append(f"{node:10} {states.get(node, 'state unknown')}{link}{machine}")
    return lines
