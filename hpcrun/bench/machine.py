"""The machine that a benchmark ran on, as far as it bears on the figures."""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("hpcrun", "torch", "numpy", "h5py", "submitit")


def describe_machine(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Plain values for ``json.dumps``; memory in bytes, load averaged over 1, 5 and 15 minutes.

    Call it before the measurement, so that the load is other people's. ``cores`` are physical
    (``None`` where the kernel does not say), ``cpus`` the logical ones this process may use.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")),
        "cores": psutil.cpu_count(logical=False),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "load": list(os.getloadavg()),
        "gpus": gpu_names(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in packages},
    }


def cpu_model(cpuinfo: str) -> str:
    """The model in the text of ``/proc/cpuinfo``, which Arm kernels leave out; then the architecture."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def package_version(name: str) -> str | None:
    """The installed version, without importing the package; ``None`` when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpu_names() -> list[str]:
    """Names of NVIDIA GPUs by NVML; none without the package nvidia-ml-py or without a driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return [nvml.nvmlDeviceGetName(handle) for handle in handles]
    finally:
        nvml.nvmlShutdown()
