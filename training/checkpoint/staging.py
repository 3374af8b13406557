"""Host memory that holds one copy of a rank's tensors while the step goes on."""

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
        pinned = any(tensor.data.is_cuda for tensor in tensors)
        return pack(tensors, self._reserve(packed_bytes(tensors), pinned))

    def _reserve(self, size: int, pinned: bool) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None
            if size > free_host_memory():
                raise NoRoom(size)
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer


def packed_bytes(tensors: list[LocalTensor]) -> int:
    """What :func:`pack` takes."""
    return sum(_padded(tensor) for tensor in tensors)


def placed(tensors: list[LocalTensor], buffer: torch.Tensor) -> list[LocalTensor]:
    """The tensors as views of ``buffer`` (bytes), one behind the other; nothing is copied."""
    views, offset = [], 0
    for tensor in tensors:
        place = buffer[offset : offset + tensor.bytes].view(tensor.data.dtype)
        views.append(replace(tensor, data=place.reshape(lengths(tensor.box))))
        offset += _padded(tensor)
    return views


def pack(tensors: list[LocalTensor], buffer: torch.Tensor) -> list[LocalTensor]:
    """Copy the tensors into ``buffer``, a tensor of bytes on the host; returns them as they lie there."""
    copies = placed(tensors, buffer)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.data.copy_(tensor.data, non_blocking=True)
    if any(tensor.data.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return copies


def _padded(tensor: LocalTensor) -> int:
    return -(-tensor.bytes // _ALIGNMENT) * _ALIGNMENT
