"""How much memory a rank has needed, and how much more it may take."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, the process's largest resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_host_memory(cgroups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this rank may still take: its share of what the host and the job's limit have left."""
    left = [psutil.virtual_memory().available, *_headrooms(cgroups, mine)]
    return max(0, min(left)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _headrooms(cgroups: Path, mine: Path) -> Iterator[int]:
    """What the limit of each control group that holds this process leaves, its page cache counted as free."""
    for line in _lines(mine):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = cgroups / "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            found, used = _lines(group / limit), _lines(group / usage)
            if found and used and found[0].isdigit():
                stat = dict(entry.split() for entry in _lines(group / "memory.stat"))
                yield int(found[0]) - int(used[0]) + int(stat.get(cache, 0))
            if group == root:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
