"""Starting daemons, entering a machine of the cluster, ending processes by recorded pid."""

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from tests.cluster.commands import SYSTEM_ENV
from tests.cluster.errors import ClusterError
from tests.cluster.state import State


def start_daemon(
    state: State, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None
) -> psutil.Process:
    """Start a process that outlives this one, with its output in its log, and record it."""
    with state.log(name).open("a") as log:
        process = subprocess.Popen(
            argv,
            env=SYSTEM_ENV | {"SLURM_CONF": str(state.slurm_conf)} | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    state.record(name, process.pid)
    return psutil.Process(process.pid)


def must_live(state: State, name: str) -> None:
    """Raise ClusterError with the end of its log when the process `name` has ended."""
    if state.running(name) is None:
        last = state.log(name).read_text(errors="replace").strip().splitlines()[-3:]
        raise ClusterError(f"{name} ended at once: {' | '.join(last) or 'its log is empty'}")


def end(processes: Iterable[psutil.Process], timeout: float = 10) -> None:
    """Kill processes with their children and wait until they are gone; ClusterError when one stays."""
    doomed: list[psutil.Process] = []
    for process in processes:
        try:
            doomed += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    for process in doomed:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(doomed, timeout=timeout)
    if alive:
        raise ClusterError(f"processes outlast SIGKILL: {', '.join(str(process.pid) for process in alive)}")


def in_same_machine(pid: int) -> list[psutil.Process]:
    """All other processes with the host name (UTS namespace) of process `pid`."""
    wanted = Path(f"/proc/{pid}/ns/uts").stat().st_ino
    found = []
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/ns/uts").stat().st_ino == wanted and process.pid != pid:
                found.append(process)
        except (FileNotFoundError, PermissionError):
            # Ended meanwhile, or a process that even this root may not look at: not one of ours.
            continue
    return found


def time_limited(argv: Sequence[str], timeout: float) -> list[str]:
    """`argv` with a time limit inside the machine: killing nsenter would leave its child behind."""
    return ["timeout", "--signal=KILL", f"{timeout:g}", *argv]
