"""How much memory a rank has needed."""

from __future__ import annotations

import resource

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, the process's largest resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
