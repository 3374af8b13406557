"""JSON between ranks. torch's own object collectives use pickle; these do not."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any) -> list[Any]:
    """Every rank's ``value`` in the order of ranks, on every rank."""
    if ranks_in_job() == 1:
        return [json.loads(json.dumps(value))]
    device = _device()
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(ranks_in_job())]
    dist.all_gather(sizes, size)
    longest = max(int(one) for one in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part[: int(one)].cpu().numpy())) for part, one in zip(parts, sizes, strict=True)]


def broadcast_json(value: Any) -> Any:
    """Rank 0's ``value`` on every rank; what other ranks pass is ignored."""
    if ranks_in_job() == 1:
        return json.loads(json.dumps(value))
    device = _device()
    first = dist.get_rank() == 0
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel() if first else 0], device=device)
    dist.broadcast(size, 0)
    if not first:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0)
    return json.loads(bytes(data.cpu().numpy()))


def rank_of_job() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks_in_job() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _device() -> torch.device:
    cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
