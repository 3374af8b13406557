"""The warm parent: imports torch once and forks ranks on request.

The agent writes JSON lines to its stdin and reads them from its stdout::

    {"op": "spawn", "rank": 3, "env": {...}, "log": "/path", "cwd": "/path"}
    {"event": "ready", "pid": 71}
    {"event": "spawned", "rank": 3, "pid": 80}
    {"event": "exited", "rank": 3, "pid": 80, "code": null, "signal": 9}

It has one thread and touches no GPU, so that forking is safe. When its stdin ends
it kills its ranks; they also die with it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import hpcrun.records
import training
from training.exit import end_with, leave
from training.train import main_from_environment

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Zygote:
    """Forks ranks and reports their ends."""

    def __init__(self, requests: int, reports: int) -> None:
        self._requests, self._reports = requests, reports
        self._ranks: dict[int, int] = {}
        self._partial = b""

    def serve(self, woken: int) -> None:
        """Until the agent closes our stdin. ``woken`` becomes readable when a child has ended."""
        self._report(event="ready", pid=os.getpid())
        while True:
            ready, _, _ = select.select([self._requests, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
                self._reap()
            if self._requests in ready:
                data = os.read(self._requests, 65536)
                if not data:
                    break
                self._partial += data
                *lines, self._partial = self._partial.split(b"\n")
                for line in lines:
                    self._spawn(json.loads(line))
        for pid in self._ranks:
            os.killpg(pid, signal.SIGKILL)

    def _spawn(self, request: dict[str, Any]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(self._reports)
            try:
                become_rank(request, parent)
            except BaseException:  # noqa: BLE001 - os._exit below would swallow the reason
                traceback.print_exc()
            finally:
                os._exit(1)
        os.setpgid(pid, pid)
        self._ranks[pid] = request["rank"]
        self._report(event="spawned", rank=request["rank"], pid=pid)

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            end = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
            self._report(event="exited", rank=self._ranks.pop(pid), pid=pid, **end)

    def _report(self, **report: object) -> None:
        os.write(self._reports, json.dumps(report).encode() + b"\n")


def become_rank(request: dict[str, Any], parent: int) -> None:
    """In the child of ``parent``: take on environment, log and folder of one rank, train, and end."""
    os.setpgid(0, 0)
    end_with(parent)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.set_wakeup_fd(-1)
    # USR2 and TERM stay ignored until the trainer listens; the agent repeats them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.enable()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    leave(main_from_environment())


def main() -> int:
    home = Path(hpcrun.__file__).resolve().parent.parent
    if Path(training.__file__).resolve().parent.parent != home:
        print(
            f"hpcrun: the package training in {training.__file__} is not hpcrun's ({home}): "
            "another package of that name stands before it on PYTHONPATH",
            file=sys.stderr,
        )
        return 2
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    reports = os.dup(1)
    os.dup2(2, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    Zygote(0, reports).serve(woken)
    return 0


if __name__ == "__main__":
    sys.exit(main())
