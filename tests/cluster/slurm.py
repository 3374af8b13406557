"""Asking Slurm for node and job states."""

from __future__ import annotations

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


def node_states(cluster: Cluster) -> dict[str, str]:
    """State of each node by name, such as IDLE or DOWN+NOT_RESPONDING."""
    shown = cluster.run(["scontrol", "--oneliner", "show", "node"]).stdout
    rows = [_fields(line) for line in shown.splitlines() if line.startswith("NodeName=")]
    return {row["NodeName"]: row["State"] for row in rows}


def wait_registered(cluster: Cluster, node: str, since: float, timeout: float) -> None:
    """Wait until the controller knows a slurmd on `node` started at or after `since` (epoch seconds)."""

    def registered() -> bool:
        shown = _fields(cluster.run(["scontrol", "--oneliner", "show", "node", node]).stdout)
        started = shown.get("SlurmdStartTime", "None")
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
    shown = cluster.run(["scontrol", "--oneliner", "show", "job", str(job_id)], check=False)
    if shown.returncode != 0 and "Invalid job id" not in shown.stderr:
        raise ClusterError(f"scontrol show job {job_id}: {shown.stderr.strip()}")
    return _fields(shown.stdout)


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
    states = node_states(cluster)
    for node in state.nodes:
        link = "" if state.network.link_is_up(node) else ", link cut"
        machine = "" if state.running(node) else ", crashed"
        lines.append(f"{node:10} {states.get(node, 'unknown to Slurm')}{link}{machine}")
    return lines
