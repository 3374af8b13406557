"""Running Slurm's commands: a scrubbed environment, a time limit, no shell."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "SLURM_CONF", "KRB5CCNAME")
TIMEOUT = 10.0


class SlurmSilent(Exception):
    """Slurm gave no answer: the command is missing, timed out or could not reach a daemon."""


class SlurmRefused(Exception):
    """Slurm answered, and said no; the text is its own."""


_NO_CONTACT = (
    "Unable to contact slurm controller",
    "Connection refused",
    "Socket timed out",
    "Connection timed out",
    "Unable to connect",
    "Problem talking to the database",
    "Slurm accounting storage is disabled",
)


def slurm_environment() -> dict[str, str]:
    """The caller's environment without SLURM_*, SQUEUE_*, SBATCH_* and the like, which change answers."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def run_slurm(argv: Sequence[str], timeout: float = TIMEOUT) -> str:
    """The output of one Slurm command.

    Raises:
        SlurmSilent: no such command, no answer in time, no contact to a daemon.
        SlurmRefused: Slurm said no.
    """
    try:
        done = subprocess.run(
            list(argv),
            env=slurm_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except FileNotFoundError as error:
        raise SlurmSilent(f"{argv[0]} is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(f"{argv[0]} gave no answer in {timeout:.0f} s") from error
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    if any(text in said for text in _NO_CONTACT):
        raise SlurmSilent(f"{argv[0]}: {said}")
    raise SlurmRefused(f"{argv[0]}: {said}")
