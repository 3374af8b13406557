"""What a rank contributes to a checkpoint: rectangles of canonically named tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Box = tuple[tuple[int, int], ...]

STORED_AS = {
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.float16: "<f2",
    torch.bfloat16: "<u2",
    torch.float8_e4m3fn: "|u1",
    torch.float8_e5m2: "|u1",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.uint8: "|u1",
    torch.bool: "|u1",
}
"""How each dtype lies in HDF5; those that numpy lacks as unsigned integers of the same width."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_AS}


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


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's values as bytes, copied to the host if need be."""
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().data


def lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Elements in a box; 1 for the box of a scalar."""
    return math.prod(lengths(box))


def overlap(left: Box, right: Box) -> Box | None:
    """The box that both share, or None."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Index of ``inner`` in an array that holds ``outer``."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))
