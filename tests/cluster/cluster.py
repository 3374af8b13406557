"""The cluster as tests see it."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import daemons, machines, slurm
from tests.cluster.configuration import write_files
from tests.cluster.errors import ClusterError
from tests.cluster.network import free_number
from tests.cluster.processes import end, in_same_machine, time_limited
from tests.cluster.requirements import NEEDS_ROOT, unavailable_reason
from tests.cluster.state import State, load_state, locked, state_folder
from tests.cluster.user import HOME, USER, as_user, make_user, remove_user

SUBFOLDERS = ("log", "shared")


class Cluster:
    """A running cluster. Make one with `up` or `attach`; every method may raise ClusterError."""

    def __init__(self, state: State) -> None:
        self._state = state

    @classmethod
    def up(cls, nodes: int = 4, accounting: bool = True) -> "Cluster":
        """Start nodes c1..cN and wait until all are idle; a cluster that is up is returned as it is."""
        _must_be_able(accounting)
        if not 1 <= nodes <= 100:
            raise ClusterError(f"nodes must be 1 to 100, not {nodes}")
        folder = state_folder()
        with locked(folder):
            found = load_state(folder)
            if found and found.ready:
                _must_match(found, nodes, accounting)
                return cls(found)
            if found:
                _remove(found)
            state = State(folder, [f"c{number}" for number in range(1, nodes + 1)], accounting, free_number())
            _make_folder(folder)
            state.save()
            try:
                state.network.make(state.nodes)
                _start(state)
            except BaseException as error:
                _add_logs(error, state)
                _remove(state)
                raise
            state.ready = True
            state.save()
            return cls(state)

    @classmethod
    def attach(cls) -> "Cluster":
        """The cluster that is up already; ClusterError when there is none."""
        _must_be_root()
        state = load_state(state_folder())
        if state is None or not state.ready:
            raise ClusterError(
                f"no cluster is up in {state_folder()}; start one with: python -m tests.cluster up"
            )
        return cls(state)

    def down(self) -> None:
        """End all processes of the cluster and remove everything that `up` made."""
        down()

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes: c1, c2, ..."""
        return list(self._state.nodes)

    @property
    def shared(self) -> Path:
        """The folder that stands for the shared file system; the ordinary user owns it."""
        return self._state.shared

    @property
    def folder(self) -> Path:
        """The state folder, with `log/` in it."""
        return self._state.folder

    def env(self) -> dict[str, str]:
        """The ordinary user's whole environment."""
        return {
            "SLURM_CONF": str(self._state.slurm_conf),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(HOME),
            "USER": USER,
            "LOGNAME": USER,
            "LANG": "C.UTF-8",
        }

    def login_command(self, argv: Sequence[str], *, cwd: Path | None = None) -> list[str]:
        """`argv` as a command line for root that runs it as the ordinary user on the login node."""
        # Entering a mount namespace moves a process to /, so the folder is set last.
        moved = ["env", f"--chdir={cwd or self.shared}", *argv]
        return machines.login_argv(self._state, as_user(moved))

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the ordinary user on the login node and return its output as text.

        `env` is added to `self.env()`. Raises CalledProcessError with `check`, and TimeoutExpired after
        `timeout` seconds, when the command and its children have been killed.
        """
        command = self.login_command(argv, cwd=cwd)
        return _run(command, self.env() | dict(env or {}), input, timeout, check)

    def on_node(
        self, node: str, argv: Sequence[str], timeout: float = 30, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root on a node, also on one whose link is cut."""
        self._must_know(node)
        command = machines.node_argv(self._state, node, time_limited(argv, timeout))
        env = self.env() | {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
        return _run(command, env, None, timeout + 10, check)

    def cut(self, node: str) -> None:
        """Unplug the node's network cable; its processes live on. Does not wait for Slurm to notice."""
        self._must_know(node)
        self._state.network.set_link(node, up=False)

    def crash(self, node: str) -> None:
        """Kill all the node's processes, which empties its /tmp and /dev/shm. Does not wait."""
        self._must_know(node)
        with locked(self._state.folder):
            self._reload()
            machines.kill_node(self._state, node)

    def heal(self, node: str, timeout: float = 90) -> None:
        """Plug in and start the node as needed; wait until it answers the controller and takes jobs."""
        self._must_know(node)
        with locked(self._state.folder):
            self._reload()
            self._state.network.set_link(node, up=True)
            if self._state.running(node) is None:
                started_at = int(time.time())
                machines.start_node(self._state, node)
                # Without this an old state passes for the new one while Slurm has not noticed the crash.
                slurm.wait_registered(self, node, started_at, timeout)
            slurm.wait_usable(self, [node], timeout)

    def status(self) -> list[str]:
        """One line per node and daemon for a person."""
        self._reload()
        return slurm.describe(self, self._state)

    def node_states(self) -> dict[str, str]:
        """Slurm's state of each node, such as IDLE or DOWN+NOT_RESPONDING, by name."""
        return slurm.node_states(self)

    def job(self, job_id: int | str) -> dict[str, str]:
        """The fields of `scontrol show job`; empty when Slurm no longer knows the job."""
        return slurm.job(self, job_id)

    def wait_state(
        self, job_id: int | str, states: str | Sequence[str], timeout: float = 60
    ) -> dict[str, str]:
        """Wait until the job's JobState is among `states`; returns its fields."""
        wanted = [states] if isinstance(states, str) else list(states)
        return slurm.wait_state(self, job_id, wanted, timeout)

    def stop_controller(self, freeze: bool = False) -> None:
        """Silence slurmctld: stopped, so that clients are refused, or frozen, so that they hang."""
        self._reload()
        daemons.stop_controller(self._state, freeze)

    def start_controller(self) -> None:
        """Bring slurmctld back and wait until it answers."""
        self._reload()
        daemons.start_controller(self._state)

    def _reload(self) -> None:
        # Another process may have crashed or healed nodes since.
        state = load_state(self._state.folder)
        if state is None:
            raise ClusterError(f"the cluster in {self._state.folder} has been taken down")
        self._state = state

    def _must_know(self, node: str) -> None:
        if node not in self._state.nodes:
            raise ClusterError(f"no node {node}; there are {', '.join(self._state.nodes)}")


def down() -> bool:
    """Take down whatever cluster is recorded, whole or half-made; False when there is none."""
    _must_be_root()
    with locked(state_folder()):
        state = load_state(state_folder())
        if state is None:
            return False
        _remove(state)
        return True


def _must_be_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError(NEEDS_ROOT)


def _must_be_able(accounting: bool) -> None:
    if reason := unavailable_reason(accounting):
        raise ClusterError(reason)


def _must_match(state: State, nodes: int, accounting: bool) -> None:
    if len(state.nodes) != nodes or state.accounting != accounting:
        kind = "with" if state.accounting else "without"
        raise ClusterError(
            f"a cluster of {len(state.nodes)} nodes {kind} accounting is up: take it down first"
        )


def _make_folder(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ClusterError(f"{folder} is not empty and holds no cluster: move it away")
    folder.mkdir(mode=0o755, exist_ok=True)
    folder.chmod(0o755)
    for name in SUBFOLDERS:
        (folder / name).mkdir()


def _start(state: State) -> None:
    make_user()
    shutil.chown(state.shared, USER, USER)
    write_files(state)
    machines.start_login(state)
    daemons.start_munge(state)
    if state.accounting:
        daemons.start_database(state)
        daemons.start_accounting(state, USER)
    daemons.start_controller(state)
    for node in state.nodes:
        machines.start_node(state, node)
    slurm.wait_usable(Cluster(state), state.nodes, timeout=90)


def _remove(state: State) -> None:
    alive = [process for name in state.processes if (process := state.running(name))]
    login = state.running(machines.LOGIN)
    if login:
        # What users left running on the login node, such as a submission that waits for its job.
        alive += in_same_machine(login.pid)
    end(alive)
    state.network.remove(state.nodes)
    remove_user()
    shutil.rmtree(state.folder)


def _add_logs(error: BaseException, state: State) -> None:
    """Attach the ends of the logs to the error, since the logs are about to be removed."""
    for log in sorted((state.folder / "log").glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-5:]
        if lines:
            error.add_note(f"{log.name}: " + " | ".join(lines))


def _run(
    command: list[str], env: dict[str, str], input: str | None, timeout: float, check: bool
) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check and done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, stdout, stderr)
    return done
