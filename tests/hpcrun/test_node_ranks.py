"""A node's ranks: started with their own environment and log, watched, killed with all they started."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hpcrun.node.ranks import CommandLauncher, Launcher, RankExit, RankSpec, TrainerLauncher


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


def ends(launcher: Launcher, count: int) -> list[RankExit]:
    found: list[RankExit] = []

    def all_there() -> bool:
        found.extend(launcher.poll())
        return len(found) >= count

    wait_for(all_there)
    return sorted(found, key=lambda rank_exit: rank_exit.rank)


def spec(rank: int, folder: Path, **env: str) -> RankSpec:
    base = {"PATH": "/usr/bin:/bin", "RANK": str(rank)}
    return RankSpec(rank, base | env, folder / f"rank{rank}.log", str(folder))


@pytest.fixture
def shell() -> Iterator[Callable[[str], CommandLauncher]]:
    launchers: list[CommandLauncher] = []

    def make(script: str) -> CommandLauncher:
        launchers.append(CommandLauncher(["/bin/sh", "-c", script]))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.close()


def test_each_rank_has_its_environment_log_and_exit(
    shell: Callable[[str], CommandLauncher], tmp_path: Path
) -> None:
    """Field report: env-dropped-in-task-groups."""
    launcher = shell('echo "rank $RANK says $WORD"; pwd; exit $RANK')
    launcher.start([spec(0, tmp_path, WORD="a,b c"), spec(3, tmp_path, WORD="$(id)")])
    assert ends(launcher, 2) == [RankExit(0, 0, None), RankExit(3, 3, None)]
    assert (tmp_path / "rank0.log").read_text() == f"rank 0 says a,b c\n{tmp_path}\n"
    assert (tmp_path / "rank3.log").read_text().startswith("rank 3 says $(id)\n")
    assert not launcher.busy


def test_killing_takes_the_ranks_children_too(
    shell: Callable[[str], CommandLauncher], tmp_path: Path
) -> None:
    launcher = shell("sleep 1000 & echo $!; wait")
    launcher.start([spec(0, tmp_path)])
    log = tmp_path / "rank0.log"
    wait_for(lambda: log.exists() and log.read_text().strip() != "")
    child = psutil.Process(int(log.read_text()))
    launcher.kill()
    assert ends(launcher, 1) == [RankExit(0, None, signal.SIGKILL)]
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_command_that_does_not_exist_is_an_exit_with_the_reason_in_the_log(tmp_path: Path) -> None:
    launcher = CommandLauncher(["/no/such/program"])
    launcher.start([spec(0, tmp_path)])
    assert launcher.poll() == [RankExit(0, 127, None)]
    assert "cannot start '/no/such/program': No such file" in (tmp_path / "rank0.log").read_text()


def test_ranks_die_with_their_agent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from hpcrun.node.ranks import *;"
        "CommandLauncher(['/bin/sh', '-c', 'echo $$; exec sleep 1000']).start("
        f"[RankSpec(0, {{}}, Path({str(tmp_path / 'log')!r}), '/')]); time.sleep(1000)"
    )
    agent = psutil.Popen([sys.executable, "-c", script])
    log = tmp_path / "log"
    wait_for(lambda: log.exists() and log.read_text().strip() != "")
    rank = psutil.Process(int(log.read_text()))
    agent.kill()
    agent.wait()
    wait_for(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)


def test_the_warm_parent_ignores_stop_signals_while_it_still_imports(tmp_path: Path) -> None:
    """Field report: preempted-again-before-first-save: a signal then ended all ranks of a node."""
    interpreter = tmp_path / "slow-python"
    interpreter.write_text("#!/bin/sh\nexec sleep 1000\n")
    interpreter.chmod(0o755)
    before = set(psutil.Process().children())
    launcher = TrainerLauncher(str(interpreter), {"PATH": "/usr/bin:/bin"}, tmp_path / "log")
    (parent,) = set(psutil.Process().children()) - before
    try:
        for signum in (signal.SIGUSR2, signal.SIGTERM):
            parent.send_signal(signum)
        wait_for(lambda: parent.name() == "sleep")
        assert parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE
    finally:
        launcher.close()
