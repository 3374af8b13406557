"""The everyday commands on a real Slurm with accounting, also while its controller is down."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from hpcrun.records import JsonLines, RunDir
from tests.cluster import Cluster
from tests.installed import Installed

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

_SAVES = """\
trap 'echo saved; exit 85' USR2 TERM
echo attempt $HPCRUN_ATTEMPT
while ! test -e "$HPCRUN_RUN_DIR/enough"; do sleep 0.2; done
"""


class LoginNode:
    """An ordinary user's shell on the login node."""

    def __init__(self, cluster: Cluster, installed: Installed) -> None:
        self._cluster = cluster
        self._hpcrun = installed.hpcrun
        self._folder = cluster.shared / "everyday"
        cluster.run(["mkdir", "-p", str(self._folder)])

    def __call__(self, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        site = {"HPCRUN_SITE": "testcluster"}
        done = self._cluster.run([*self._hpcrun, *args], cwd=self._folder, env=site, timeout=60, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "--json").stdout)

    def submit(self, name: str, nodes: int) -> RunDir:
        command = ["submit", "--name", name, "--nodes", str(nodes), "--gpus-per-node", "2", "--time", "10m"]
        done = self(*command, "--no-snapshot", "--json", "--", "sh", "-c", _SAVES)
        return RunDir(self._folder / json.loads(done.stdout)["path"])

    def wait_for(self, run: RunDir, state: str, seconds: float = 60) -> dict[str, Any]:
        told: dict[str, Any] = {}

        def arrived() -> bool:
            told.update(self.json("status", run.name))
            return bool(told["state"] == state)

        wait_until(arrived, seconds, lambda: f"{state}: {told}")
        return told


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what()}"
        time.sleep(0.3)


@pytest.fixture(scope="module")
def login(cluster: Cluster, installed: Installed) -> LoginNode:
    return LoginNode(cluster, installed)


def test_a_run_is_followed_cancelled_resumed_and_ends(cluster: Cluster, login: LoginNode) -> None:
    """Field reports: resume-auto-first-run, no-accounting."""
    run = login.submit("life", nodes=2)
    told = login.wait_for(run, "running")
    assert (told["run"], told["slurm"], told["slurm_state"]) == (run.name, "ok", "RUNNING")
    assert (len(told["nodes"]), told["attempts"]) == (2, 1)
    assert run.name in login("ls").stdout
    assert "is RUNNING; cancel it first" in login("resume", run.name, code=2).stderr

    login("cancel", told["job_id"])
    first = login.wait_for(run, "cancelled")["job_id"]
    wait_until(lambda: cluster.job(first)["JobState"] == "CANCELLED", 30, lambda: str(cluster.job(first)))

    resumed = login.json("resume", run.name, "--time", "20m")
    assert resumed["path"] == str(run.path) and resumed["job_id"] != first
    assert cluster.job(resumed["job_id"])["TimeLimit"] == "00:20:00"
    login.wait_for(run, "running")
    cluster.run(["touch", str(run.path / "enough")])
    told = login.wait_for(run, "completed")
    assert (told["job_id"], told["attempts"]) == (resumed["job_id"], run.last_attempt())
    shown = login("logs", "-f", run.name, "--rank", "3").stdout
    assert shown == f"attempt {run.last_attempt()}\n"
    assert "has completed" in login("resume", run.name, code=2).stderr


def test_a_job_that_waits_is_queued_and_can_be_cancelled(cluster: Cluster, login: LoginNode) -> None:
    runs = [login.submit("first", nodes=3), login.submit("second", nodes=2)]
    login.wait_for(runs[0], "running")
    told = login.wait_for(runs[1], "queued")
    assert told["reason"] in ("Resources", "Priority")
    assert "is queued" in login("logs", runs[1].name).stderr
    login("cancel", runs[1].name)
    login.wait_for(runs[1], "cancelled")
    login("cancel", runs[0].name, "--save")
    login.wait_for(runs[0], "cancelled")
    assert "saved" in login("logs", runs[0].name, "--rank", "0").stdout


def test_a_job_that_slurm_does_not_know_is_unknown_not_finished(cluster: Cluster, login: LoginNode) -> None:
    run = login.submit("forgotten", nodes=1)
    login.wait_for(run, "running")
    login("cancel", run.name)
    login.wait_for(run, "cancelled")
    (run.control / "STOP").unlink()
    log = JsonLines(run.job / "jobs.jsonl")
    log.write(time=time.time(), job_id="999999", kind="slurm")
    log.close()
    told = login.json("status", run.name)
    assert (told["state"], told["slurm"], told["job_id"]) == ("unknown", "unknown job", "999999")


def test_while_the_controller_is_down_nothing_is_taken_for_ended(cluster: Cluster, login: LoginNode) -> None:
    """Field report: squeue-timeout-means-finished."""
    run = login.submit("silent", nodes=1)
    login.wait_for(run, "running")
    cluster.stop_controller()
    try:
        began = time.monotonic()
        told = login.json("status", run.name)
        assert time.monotonic() - began < 15
        assert (told["state"], told["slurm"]) == ("running", "silent")
        assert "control/STOP is in place" in login("cancel", run.name, code=2).stderr
        # The agents obey control/STOP without Slurm.
        wait_until(lambda: "saved" in run.rank_log(1, 0).read_text(), 30, lambda: "the save")
    finally:
        cluster.start_controller()
    login.wait_for(run, "cancelled")
