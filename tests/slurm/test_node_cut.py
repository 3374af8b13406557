"""A node's link is cut while a tensor and pipeline parallel run trains; nothing may be lost.

Each case ends COMPLETED with the losses of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcrun.records import RunDir, parse_checkpoint_name
from hpcrun.runs.story import read_events, read_metrics, recoveries
from tests.cluster import Cluster
from tests.installed import Installed
from tests.slurm.runs import RECIPE, finish, start, step_of, wait_for_step, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(420)]

NODE_TIMEOUT = 10


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, installed: Installed) -> dict[int, str]:
    """Loss by step, as text, of a run that nobody touched."""
    run = start(cluster, installed, RECIPE, "undisturbed")
    assert finish(cluster, installed, run)["state"] == "completed"
    assert not recoveries(run)
    return losses(run)


def losses(run: RunDir) -> dict[int, str]:
    return {line["step"]: json.dumps(line["loss"]) for line in read_metrics(run)}


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == name]


def members(run: RunDir) -> list[str]:
    nodes: list[str] = events(run, "attempt_started")[-1]["nodes"]
    return nodes


def assert_story(run: RunDir, node: str, every: int = 10) -> None:
    """The run tells which node, when noticed, which checkpoint, what was repeated, how long it took."""
    told = [recovery for recovery in recoveries(run) if node in recovery.reason]
    assert told, [recovery.reason for recovery in recoveries(run)]
    recovery = told[0]
    assert recovery.noticed > 0
    assert recovery.resumed_step is not None and recovery.resumed_step % every == 0
    assert recovery.steps_repeated is not None and recovery.steps_repeated >= 0
    assert recovery.seconds is not None and recovery.seconds > 0


def no_copies_on(node: str, cluster: Cluster) -> bool:
    return "hpcrun-" not in cluster.on_node(node, ["ls", "/dev/shm"]).stdout


def newest_write(run: RunDir, attempt: int) -> float:
    """When anything of ``attempt`` was last written."""
    paths: list[Path] = [*run.logs(attempt).rglob("*"), run.metrics(attempt)]
    for folder in run.checkpoints.iterdir():
        parsed = parse_checkpoint_name(folder.name)
        if parsed and parsed[1] == attempt:
            paths += [folder, *folder.iterdir()]
    return max(path.stat().st_mtime for path in paths if path.exists())


@pytest.mark.parametrize("victim", ["batch node", "other node"])
def test_without_a_spare_the_job_is_requeued_and_repeats_nothing_else(
    cluster: Cluster, installed: Installed, undisturbed: dict[int, str], victim: str
) -> None:
    run = start(cluster, installed, RECIPE, victim.replace(" ", "-"))
    wait_for_step(run, 25)
    node = members(run)[0 if victim == "batch node" else 1]
    cut_at = time.time()
    cluster.cut(node)
    try:
        wait_until(lambda: run.last_attempt() >= 2, 150, "a second attempt", cluster, run)
        wait_for_step(run, step_of(run) + 2)
        cluster.heal(node)
        status = finish(cluster, installed, run)
    finally:
        cluster.heal(node)
    assert status["state"] == "completed"
    assert losses(run) == undisturbed
    assert newest_write(run, 1) < cut_at + NODE_TIMEOUT / 2 + 3
    assert node not in members(run)
    assert_story(run, node)


def test_with_a_spare_the_allocation_goes_on_and_the_healed_node_returns_as_a_spare(
    cluster: Cluster, installed: Installed, undisturbed: dict[int, str]
) -> None:
    """The state comes from memory: the lost node's is on the other one."""
    options = ["--set", "resources.spares=1", "--set", "checkpoint.memory_every=1"]
    run = start(cluster, installed, RECIPE, "spare", *options)
    wait_for_step(run, 25)
    node = members(run)[1]
    job = events(run, "attempt_started")[0]
    cut_at = time.time()
    cluster.cut(node)
    try:
        wait_until(lambda: run.last_attempt() >= 2, 60, "a second attempt", cluster, run)
        cluster.heal(node)
        status = finish(cluster, installed, run)
    finally:
        cluster.heal(node)
    assert status["state"] == "completed"
    assert losses(run) == undisturbed
    assert newest_write(run, 1) < cut_at + NODE_TIMEOUT / 2 + 3
    assert members(run)[0] == job["nodes"][0] and members(run)[1] != node
    assert [recovery.checkpoint for recovery in recoveries(run)] == ["memory"]
    assert_story(run, node, every=1)
    for name in members(run):
        wait_until(partial(no_copies_on, name, cluster), 30, f"the end of {name}'s agent", cluster, run)
