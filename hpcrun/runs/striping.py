"""Spreading checkpoints over the servers of a Lustre file system, as the site file says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from hpcrun.sites.model import Filesystem

_TIMEOUT_S = 30


def stripe(folder: Path, wanted: Filesystem) -> list[str]:
    """``lfs setstripe`` on an empty folder, which files in it inherit; a warning where it cannot be done.

    Lustre Operations Manual, 19.3 ("Setting the File Layout/Striping Configuration").
    """
    options = []
    if wanted.stripe_count is not None:
        options.append(f"--stripe-count={wanted.stripe_count}")
    if wanted.stripe_size is not None:
        options.append(f"--stripe-size={wanted.stripe_size}")
    if not options:
        return []
    lfs = shutil.which("lfs")
    if lfs is None:
        return ["warning: filesystem.stripe_* of the site: no lfs here, so checkpoints are not striped"]
    try:
        done = subprocess.run(
            [lfs, "setstripe", *options, str(folder)], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"warning: lfs setstripe on {folder} failed: {error}"]
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        return [f"warning: lfs setstripe on {folder} failed: {said}"]
    return []
