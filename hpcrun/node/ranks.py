"""The ranks of one node: starting, watching and killing them.

hpcrun's trainer is forked from the warm parent ``python -m training.zygote``,
which has imported torch once; a user's own command is started directly. The agent
never stands between a rank and its log.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class RankSpec:
    """One rank to start."""

    rank: int
    env: Mapping[str, str]
    log: Path
    cwd: str


@dataclass(frozen=True)
class RankExit:
    """One rank that ended: by ``code``, or killed by ``signal``."""

    rank: int
    code: int | None
    signal: int | None


class Launcher(Protocol):
    """Starts ranks and reports their ends."""

    def start(self, specs: list[RankSpec]) -> None: ...

    def poll(self) -> list[RankExit]:
        """The ranks that ended since the last call."""

    def send_signal(self, signum: int) -> None:
        """To every live rank."""

    def kill(self) -> None:
        """SIGKILL every live rank's process group. Safe from any thread."""

    def close(self) -> None: ...

    @property
    def busy(self) -> bool:
        """Whether a rank is alive, or its end has not been polled yet."""


def die_with_parent(parent: int) -> None:
    """In a child of ``parent``: ask the kernel to SIGKILL it when the parent ends (prctl(2)).

    A parent that died before the kernel was asked leaves no other trace than the new parent's pid.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _deaf(parent: int) -> None:
    """In a child of ``parent`` that is to hear no signal of Slurm's before it can tell what it means.

    Slurm sends ``--signal`` to every process of a step, also to one that is still importing.
    """
    die_with_parent(parent)
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _kill_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)


class CommandLauncher:
    """Runs the user's own command once per rank."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._live: dict[int, subprocess.Popen[bytes]] = {}
        self._failed: list[RankExit] = []

    def start(self, specs: list[RankSpec]) -> None:
        for spec in specs:
            with spec.log.open("ab") as log:
                try:
                    self._live[spec.rank] = subprocess.Popen(
                        self._command,
                        env=dict(spec.env),
                        cwd=spec.cwd,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=partial(die_with_parent, os.getpid()),
                    )
                except OSError as error:
                    log.write(f"hpcrun: cannot start {self._command[0]!r}: {error.strerror}\n".encode())
                    code = 127 if isinstance(error, FileNotFoundError) else 126
                    self._failed.append(RankExit(spec.rank, code, None))

    def poll(self) -> list[RankExit]:
        ended, self._failed = self._failed, []
        for rank, process in list(self._live.items()):
            status = process.poll()
            if status is not None:
                del self._live[rank]
                ended.append(RankExit(rank, status, None) if status >= 0 else RankExit(rank, None, -status))
        return ended

    def send_signal(self, signum: int) -> None:
        for process in list(self._live.values()):
            _kill_group(process.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()

    @property
    def busy(self) -> bool:
        return bool(self._live or self._failed)


class TrainerLauncher:
    """Forks ranks from a warm parent, over JSON lines on its stdin and stdout."""

    def __init__(self, interpreter: str, env: Mapping[str, str], log: Path) -> None:
        self._argv = [interpreter, "-P", "-m", "training.zygote"]
        self._env = dict(env)
        self._log = log
        self._live: dict[int, int | None] = {}
        self._partial = b""
        self._parent = self._start_parent()

    def _start_parent(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            parent = subprocess.Popen(
                self._argv,
                env=self._env,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(_deaf, os.getpid()),
            )
        assert parent.stdout is not None
        os.set_blocking(parent.stdout.fileno(), False)
        self._partial = b""
        return parent

    def start(self, specs: list[RankSpec]) -> None:
        if self._parent.poll() is not None:
            self._parent = self._start_parent()
        for spec in specs:
            self._live[spec.rank] = None
            request = {"op": "spawn", "rank": spec.rank, "env": dict(spec.env)}
            self._tell(request | {"log": str(spec.log), "cwd": spec.cwd})

    def poll(self) -> list[RankExit]:
        ended = [self._ended(line) for line in self._lines()]
        exits = [rank_exit for rank_exit in ended if rank_exit]
        status = self._parent.poll()
        if status is not None and self._live:
            code, signum = (status, None) if status > 0 else (None, -status)
            exits += [
                RankExit(rank, code if code is not None or signum else 1, signum) for rank in self._live
            ]
            self._live.clear()
        return exits

    def send_signal(self, signum: int) -> None:
        for pid in list(self._live.values()):
            if pid is not None:
                _kill_group(pid, signum)

    def kill(self) -> None:
        if None in list(self._live.values()):
            self._parent.kill()
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._parent.kill()
        self._parent.wait()

    @property
    def busy(self) -> bool:
        return bool(self._live)

    def _tell(self, request: dict[str, object]) -> None:
        assert self._parent.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._parent.stdin.write(json.dumps(request).encode() + b"\n")
            self._parent.stdin.flush()

    def _lines(self) -> list[bytes]:
        assert self._parent.stdout is not None
        while True:
            try:
                data = os.read(self._parent.stdout.fileno(), 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self._partial += data
        *lines, self._partial = self._partial.split(b"\n")
        return lines

    def _ended(self, line: bytes) -> RankExit | None:
        report = json.loads(line)
        if report["event"] == "spawned":
            self._live[report["rank"]] = report["pid"]
        elif report["event"] == "exited" and self._live.get(report["rank"]) == report["pid"]:
            del self._live[report["rank"]]
            return RankExit(report["rank"], report["code"], report["signal"])
        return None
