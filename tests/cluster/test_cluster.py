"""The test cluster itself: nodes are apart, break as asked, and come back."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.configuration import GPUS_PER_NODE
from tests.cluster.requirements import NEEDS_ROOT
from tests.cluster.user import USER

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(60)]

# The imports come before the rights go: the interpreter may lie where only root can read.
AS_USER = f"""
import os, pwd
from tests.cluster.__main__ import main
user = pwd.getpwnam({USER!r})
os.setgroups([])
os.setgid(user.pw_gid)
os.setuid(user.pw_uid)
main([COMMAND])
"""


def submit(cluster: Cluster, name: str, *options: str, command: str) -> str:
    argv = ["sbatch", "--parsable", f"--output={cluster.shared}/{name}.log", *options, f"--wrap={command}"]
    return cluster.run(argv).stdout.strip()


def test_a_job_spans_four_nodes_with_own_names_and_gpus(cluster: Cluster) -> None:
    show = 'echo $(hostname) $(id -un) "$CUDA_VISIBLE_DEVICES"'
    argv = ["srun", "--nodes=4", "--gpus-per-node=2", "--time=1", "bash", "-c", show]
    lines = cluster.run(argv, timeout=50).stdout.splitlines()
    assert sorted(lines) == [f"{node} {USER} 0,1" for node in cluster.nodes]


def test_gpus_of_a_node_are_not_given_twice(cluster: Cluster) -> None:
    gpus = f"--gpus-per-node={GPUS_PER_NODE}"
    first = submit(cluster, "first", "--nodelist=c1", gpus, command="sleep 60")
    cluster.wait_state(first, "RUNNING", timeout=30)
    second = submit(cluster, "second", "--nodelist=c1", "--gpus-per-node=1", command="true")
    cluster.wait_state(second, "PENDING", timeout=10)
    cluster.run(["scancel", first])
    cluster.wait_state(second, "COMPLETED", timeout=40)


def test_memory_folders_and_processes_of_a_node_are_its_own(cluster: Cluster) -> None:
    for folder in ("/dev/shm", "/tmp"):
        cluster.on_node("c1", ["touch", f"{folder}/only-on-c1"])
        assert cluster.on_node("c2", ["ls", folder]).stdout == ""
        assert not (Path(folder) / "only-on-c1").exists()
    commands = cluster.on_node("c2", ["ps", "-e", "-o", "args="]).stdout
    assert "slurmd -D -N c2" in commands
    assert "slurmd -D -N c1" not in commands


@pytest.mark.timeout(120)
def test_a_crashed_node_loses_its_job_and_comes_back_empty(cluster: Cluster) -> None:
    job = submit(cluster, "crash", "--nodelist=c3", "--no-requeue", command="sleep 600")
    cluster.wait_state(job, "RUNNING", timeout=30)
    cluster.on_node("c3", ["touch", "/dev/shm/before", "/tmp/before"])
    cluster.crash("c3")
    try:
        cluster.wait_state(job, "NODE_FAIL", timeout=60)
    finally:
        cluster.heal("c3")
    assert cluster.node_states()["c3"] == "IDLE"
    assert cluster.on_node("c3", ["ls", "/dev/shm", "/tmp"]).stdout.split() == ["/dev/shm:", "/tmp:"]


def test_a_cut_node_reaches_nobody_until_it_is_healed(cluster: Cluster) -> None:
    def ping() -> int:
        return cluster.on_node("c4", ["timeout", "5", "scontrol", "ping"], check=False).returncode

    assert ping() == 0
    cluster.cut("c4")
    try:
        assert ping() != 0
    finally:
        cluster.heal("c4")
    assert ping() == 0


@pytest.mark.parametrize("freeze", [False, True])
def test_the_controller_falls_silent_and_returns(cluster: Cluster, freeze: bool) -> None:
    cluster.stop_controller(freeze=freeze)
    try:
        if freeze:
            with pytest.raises(subprocess.TimeoutExpired):
                cluster.run(["squeue"], timeout=3)
        else:
            assert cluster.run(["timeout", "3", "squeue"], check=False).returncode != 0
    finally:
        cluster.start_controller()
    assert cluster.run(["squeue", "--noheader"]).returncode == 0


def test_up_again_gives_the_same_cluster(cluster: Cluster) -> None:
    assert Cluster.up(nodes=4).nodes == cluster.nodes
    assert Cluster.attach().shared == cluster.shared


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_an_ordinary_user_is_refused_in_one_line(cluster: Cluster, command: str) -> None:
    refused = subprocess.run(
        [sys.executable, "-c", AS_USER.replace("COMMAND", repr(command))],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr == f"error: {NEEDS_ROOT}\n"
