"""The warm parent: forks ranks with their own environment, log and death."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrun.records import EXIT_STOP
from training.zygote import become_rank


class Parent:
    """A running zygote and its conversation."""

    def __init__(self, cwd: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.zygote"],
            cwd=cwd,
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        heard: dict[str, Any] = json.loads(self.process.stdout.readline())
        return heard

    def spawn(self, rank: int, log: Path, env: dict[str, str], cwd: Path | None = None) -> None:
        assert self.process.stdin is not None
        request = {"op": "spawn", "rank": rank, "env": env, "log": str(log), "cwd": str(cwd or log.parent)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    """A zygote started in a folder whose files have the names of packages that it needs."""
    cwd = tmp_path_factory.mktemp("user")
    for name in ("numpy.py", "secrets.py", "json.py", "hpcrun.py"):
        (cwd / name).write_text("raise SystemExit('the wrong file')\n")
    (cwd / "training").mkdir()
    (cwd / "training" / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    started = Parent(cwd, {"OMP_NUM_THREADS": "1"})
    assert started.hear() == {"event": "ready", "pid": started.process.pid}
    yield started
    started.process.kill()
    started.process.communicate()


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, path.read_text() if path.exists() else f"no {path}"
        time.sleep(0.02)


def test_a_rank_without_its_place_says_which_variable_is_missing(parent: Parent, tmp_path: Path) -> None:
    """Field report: local-rank-missing-makes-many-rank0."""
    log = tmp_path / "log"
    environment = {"HPCRUN_RUN_DIR": str(tmp_path), "HPCRUN_CLAIM": "c", "HPCRUN_ATTEMPT": "1", "RANK": "0"}
    parent.spawn(0, log, environment)
    spawned, exited = parent.hear(), parent.hear()
    assert (spawned["event"], exited["event"]) == ("spawned", "exited")
    assert (exited["rank"], exited["pid"], exited["code"]) == (0, spawned["pid"], EXIT_STOP)
    assert log.read_text() == "hpcrun: LOCAL_RANK is not set: start ranks with hpcrun submit or torchrun\n"


def test_a_rank_that_fails_before_its_trainer_starts_says_why(parent: Parent, tmp_path: Path) -> None:
    parent.spawn(0, tmp_path / "log", {}, cwd=tmp_path / "gone")
    assert [parent.hear()["event"], parent.hear()["code"]] == ["spawned", 1]
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith("FileNotFoundError: ")


def waiting_rank(parent: Parent, folder: Path) -> psutil.Process:
    """A rank of two that waits for the other at the rendezvous."""
    (folder / "run.yaml").write_text("recipe: {train: {device: cpu}}\n")
    environment = {"HPCRUN_RUN_DIR": str(folder), "HPCRUN_CLAIM": "c", "HPCRUN_ATTEMPT": "1"}
    environment |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    parent.spawn(1, folder / "log", environment)
    spawned = parent.hear()
    assert spawned["event"] == "spawned"
    return psutil.Process(spawned["pid"])


def test_a_killed_rank_is_reported_with_its_signal(parent: Parent, tmp_path: Path) -> None:
    rank = waiting_rank(parent, tmp_path)
    rank.kill()
    exited = parent.hear()
    assert (exited["code"], exited["signal"], exited["pid"]) == (None, signal.SIGKILL, rank.pid)


def test_signals_before_the_trainer_listens_do_not_kill_a_rank(parent: Parent, tmp_path: Path) -> None:
    """Field report: preempted-again-before-first-save."""
    rank = waiting_rank(parent, tmp_path)
    for signum in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2):
        rank.send_signal(signum)
    assert rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE
    os.killpg(rank.pid, signal.SIGKILL)
    assert parent.hear()["signal"] == signal.SIGKILL, (tmp_path / "log").read_text()


def test_a_rank_whose_parent_died_at_the_fork_does_not_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    alive, held = os.pipe()
    parent = os.fork()
    if parent == 0:
        pid = os.getpid()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                while os.getppid() == pid:
                    time.sleep(0.001)
                become_rank({"log": str(log), "env": {}, "cwd": str(tmp_path)}, pid)
        os._exit(0)
    os.close(held)
    os.waitpid(parent, 0)
    ended, _, _ = select.select([alive], [], [], 30)
    os.close(alive)
    assert ended and not log.exists()


@pytest.mark.parametrize("how", ["killed", "left alone"])
def test_ranks_die_with_their_parent_and_when_the_agent_leaves(tmp_path: Path, how: str) -> None:
    parent = Parent(tmp_path, {})
    parent.hear()
    ranks = [waiting_rank(parent, tmp_path), waiting_rank(parent, tmp_path)]
    if how == "killed":
        parent.process.kill()
    assert parent.process.stdin is not None
    parent.process.stdin.close()
    assert parent.process.wait(timeout=30) == (-signal.SIGKILL if how == "killed" else 0)
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive


def test_a_training_package_of_the_users_on_pythonpath_is_refused(tmp_path: Path) -> None:
    """Field report: launcher-overrides-pythonpath."""
    import training

    for path in Path(training.__file__).parent.rglob("*.py"):
        copy = tmp_path / "training" / path.relative_to(Path(training.__file__).parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    parent = Parent(tmp_path, {"PYTHONPATH": str(tmp_path)})
    _, errors = parent.process.communicate(timeout=60)
    assert parent.process.returncode == 2
    assert errors.startswith("hpcrun: the package training in") and errors.count("\n") == 1
