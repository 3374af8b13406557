"""What a rank contributes to a checkpoint: rectangles of canonically named tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcrun.blocks import Box
from hpcrun.manifest import ITEM_BYTES
from hpcrun.shardfile import Part

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


@dataclass(frozen=True)
class LocalTensor:
    """The values of one rectangle of a whole tensor; loading copies into ``data``."""

    name: str
    """Canonical, with its kind first: ``model/layers.3.attention.q.weight``, ``exp_avg/...``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    """Start and stop per dimension."""
    data: torch.Tensor
    """Exactly the box's values; may be a view that is not contiguous."""

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def part(tensor: LocalTensor) -> Part:
    """The tensor as something to write; its bytes are copied to the host only when they are asked for."""

    def chunks() -> list[memoryview]:
        flat = tensor.data.detach().contiguous().reshape(-1).cpu()
        return [flat.view(torch.uint8).numpy().data]

    return Part(tensor.name, dtype_name(tensor.data), tensor.shape, tensor.box, chunks)
