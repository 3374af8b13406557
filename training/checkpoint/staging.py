"""Host memory that holds one copy of a rank's share while the step goes on."""

from __future__ import annotations

from dataclasses import replace

import torch

from hpcrun.blocks import lengths
from training.checkpoint.local import LocalTensor
from training.monitor.memory import free_host_memory

_ALIGNMENT = 64


class NoRoom(Exception):
    """The copy does not fit into the memory that this host, or the job's limit, has left."""


class Staging:
    """Made at the first copy and used again: only the first pays for pages and pinning."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def copy(self, tensors: list[LocalTensor]) -> list[LocalTensor]:
        """The same tensors with their values of now, in host memory. The next call overwrites them.

        Raises:
            NoRoom: there is too little memory.
        """
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += -(-tensor.bytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(tensor.data.is_cuda for tensor in tensors)
        buffer = self._reserve(total, on_gpu)
        copies = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            place = buffer[offset : offset + tensor.bytes].view(tensor.data.dtype)
            copied = place.reshape(lengths(tensor.box))
            copied.copy_(tensor.data, non_blocking=True)
            copies.append(replace(tensor, data=copied))
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def _reserve(self, size: int, pinned: bool) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None
            if size > free_host_memory():
                raise NoRoom(size)
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer
