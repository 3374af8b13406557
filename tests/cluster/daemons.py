"""munge, the accounting database and Slurm's controller."""

import os
import signal
import subprocess

import psutil

from tests.cluster.commands import SYSTEM_ENV, call, wait_for
from tests.cluster.errors import ClusterError
from tests.cluster.machines import login_argv
from tests.cluster.processes import end, must_live, start_daemon
from tests.cluster.state import State

CONTROLLER = "slurmctld"
ACCOUNT = "research"


def start_munge(state: State) -> None:
    """Start munged with a key and a socket of its own, so that a system munge is left alone."""
    folder = state.folder / "munge"
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "seed", "log")]
    argv = ["munged", "--foreground", f"--socket={folder}/socket", *files]
    start_daemon(state, "munged", argv)

    def answers() -> bool:
        must_live(state, "munged")
        return (folder / "socket").exists()

    wait_for("munged's socket", answers, timeout=20)


def start_database(state: State) -> None:
    """Make and start a MariaDB that only a socket reaches."""
    folder = state.folder / "mariadb"
    socket = folder / "socket"
    install = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={folder}/data"]
    folder.mkdir()
    call(["chown", "mysql:", str(folder)])
    call([*install, "--auth-root-authentication-method=socket", "--skip-test-db"], timeout=90)
    server = ["mariadbd", "--no-defaults", "--user=mysql", "--skip-networking", f"--datadir={folder}/data"]
    # The data live as long as the cluster: nothing is gained by waiting for the disk.
    server += [f"--socket={socket}", "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
    start_daemon(state, "mariadbd", server)

    def answers() -> bool:
        must_live(state, "mariadbd")
        ask = ["mariadb-admin", "--no-defaults", f"--socket={socket}", "ping"]
        return (
            subprocess.run(ask, env=SYSTEM_ENV, capture_output=True, timeout=10, check=False).returncode == 0
        )

    wait_for("the accounting database", answers, timeout=60)
    call(["mariadb", "--no-defaults", f"--socket={socket}", "-e", "create database slurm"])


def start_accounting(state: State, user: str) -> None:
    """Start slurmdbd and enter the ordinary user; needs munge and the database."""
    env = {"MYSQL_UNIX_PORT": f"{state.folder}/mariadb/socket"}
    start_daemon(state, "slurmdbd", login_argv(state, ["slurmdbd", "-D"]), env)
    wait_for("slurmdbd", lambda: _manages(state, ["show", "cluster"]), timeout=60, interval=0.5)
    for what in (["cluster", "hpcrun"], ["account", ACCOUNT], ["user", user, f"account={ACCOUNT}"]):
        if not _manages(state, ["add", *what]):
            raise ClusterError(f"sacctmgr cannot add {' '.join(what)}; see {state.log('slurmdbd')}")


def _manages(state: State, arguments: list[str]) -> bool:
    must_live(state, "slurmdbd")
    argv = login_argv(state, ["sacctmgr", "--immediate", *arguments])
    env = SYSTEM_ENV | {"SLURM_CONF": str(state.slurm_conf)}
    done = subprocess.run(argv, env=env, capture_output=True, timeout=30, check=False)
    return done.returncode == 0


def start_controller(state: State) -> None:
    """Start slurmctld, or let a frozen one go on, and wait until it answers."""
    running = state.running(CONTROLLER)
    if running:
        running.send_signal(signal.SIGCONT)
    else:
        (state.folder / "slurmctld").mkdir(exist_ok=True)
        start_daemon(state, CONTROLLER, login_argv(state, ["slurmctld", "-D"]))
    wait_for("slurmctld to answer", lambda: _controller_answers(state), timeout=60, interval=0.3)


def _controller_answers(state: State) -> bool:
    must_live(state, CONTROLLER)
    argv = login_argv(state, ["scontrol", "ping"])
    env = SYSTEM_ENV | {"SLURM_CONF": str(state.slurm_conf)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False)
    return "is UP" in done.stdout


def stop_controller(state: State, freeze: bool) -> None:
    """Make slurmctld silent: stopped cleanly, or frozen so that its clients hang."""
    process = state.running(CONTROLLER)
    if process is None:
        raise ClusterError("slurmctld is not running")
    if freeze:
        process.send_signal(signal.SIGSTOP)
        return
    process.terminate()
    try:
        process.wait(timeout=30)
    except psutil.TimeoutExpired:
        end([process])
    state.forget(CONTROLLER)
