"""How a rank ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from hpcrun.records import EXIT_DONE, EXIT_REQUEUE

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let the kernel kill this forked process when its parent dies.

    ``parent`` is the pid that the parent had before the fork: one that died before the kernel was
    asked leaves no other trace.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def leave(code: int) -> NoReturn:
    """End the process with ``code`` and nothing else.

    After an orderly end all ranks wait for one another before the group goes: a rank
    that leaves early breaks the others' connections, and a group torn down by the
    interpreter's own exit may abort.
    """
    if dist.is_initialized() and code in (EXIT_DONE, EXIT_REQUEUE):
        dist.barrier()
        dist.destroy_process_group()
    with suppress(OSError):  # the log may lie on a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
