"""Leaving a rank."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from hpcrun.records import EXIT_DONE, EXIT_REQUEUE


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
