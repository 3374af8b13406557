"""Running commands and waiting for conditions, always with a time limit."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tests.cluster.errors import ClusterError
from tests.cluster.requirements import SYSTEM_PATH

T = TypeVar("T")
SYSTEM_ENV = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}


def call(
    argv: Sequence[str], *, timeout: float = 30, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as root; raises ClusterError, naming it, when it fails or outlasts `timeout` seconds."""
    try:
        done = subprocess.run(
            argv,
            env=SYSTEM_ENV | dict(env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"no end after {timeout:g} s: {' '.join(argv)}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise ClusterError(f"exit code {done.returncode}: {' '.join(argv)}: {said}")
    return done


def wait_for(what: str, condition: Callable[[], T | None], timeout: float, interval: float = 0.2) -> T:
    """Ask `condition` until it gives something true and return that; ClusterError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout:g} s in vain for {what}")
        time.sleep(interval)
