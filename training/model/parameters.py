"""Parameters that know which part of which canonical tensor they are.

A tensor's initial values depend on its name and the seed alone, so every layout
starts from the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash
from torch import nn

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sharded:
    """A rectangle of a whole tensor, held in a local tensor that may be padded at its end."""

    shape: tuple[int, ...]
    """Of the whole tensor, unpadded."""
    local_shape: tuple[int, ...]
    """Of the local tensor, padding included."""
    box: Box
    """Start and stop per dimension of what the local tensor holds of the whole."""
    replicated: bool
    """Whether every tensor parallel rank holds the same values."""

    @classmethod
    def along(cls, dim: int, shape: tuple[int, ...], size: int, index: int) -> Sharded:
        """Part ``index`` of ``size`` rows along ``dim``; a stop beyond the whole is padding."""
        local = (*shape[:dim], size, *shape[dim + 1 :])
        start, stop = min(index * size, shape[dim]), min((index + 1) * size, shape[dim])
        box = tuple((start, stop) if d == dim else (0, length) for d, length in enumerate(shape))
        return cls(shape, local, box, replicated=False)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Sharded:
        return cls(shape, shape, tuple((0, length) for length in shape), replicated=True)

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The part of a local tensor that is not padding."""
        return local[tuple(slice(0, stop - start) for start, stop in self.box)]


class ModelParameter(nn.Parameter):
    """A parameter with its canonical name and place."""

    canonical: str
    sharded: Sharded
    decays: bool


def make_parameter(
    name: str, sharded: Sharded, std: float | None, seed: int, device: torch.device
) -> ModelParameter:
    """A new parameter: normal with ``std``, or ones where ``std`` is None (norms, which do not decay)."""
    local = torch.zeros(sharded.local_shape)
    part = tuple(slice(start, stop) for start, stop in sharded.box)
    if std is None:
        sharded.view(local).fill_(1.0)
    else:
        generator = torch.Generator().manual_seed(name_seed(seed, name))
        sharded.view(local).copy_(torch.empty(sharded.shape).normal_(0.0, std, generator=generator)[part])
    parameter = ModelParameter(local.to(device))
    parameter.canonical, parameter.sharded, parameter.decays = name, sharded, std is not None
    return parameter


def model_parameters(module: nn.Module) -> list[ModelParameter]:
    """All parameters of ``module`` in a fixed order."""
    return [parameter for parameter in module.parameters() if isinstance(parameter, ModelParameter)]


def name_seed(seed: int, name: str) -> int:
    """A seed for one named thing."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1
