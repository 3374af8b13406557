"""Parameters that know which part of which canonical tensor they are.

A tensor's initial values depend on its name, the place in it and the seed alone, so every layout
starts from the same weights.
"""

from __future__ import annotations

from typing import cast

import torch
import xxhash
from torch import nn

from training.parallel.pieces import Piece

_BLOCK = 256
"""Rows that one generator draws: a rank draws only the blocks that it holds rows of."""


class ModelParameter(nn.Parameter):
    """A local matrix or vector: what this rank computes with.

    Vectors get their gradient from autograd. That of matrices is summed into ``gradient``, which
    :mod:`training.parallel.sharding` provides: it may come when the weights are not here.
    """

    gradient: torch.Tensor | None

    pieces: list[Piece]
    decays: bool
    """Whether weight decay applies."""
    expert: bool
    """Whether it belongs to experts, which fewer data ranks hold."""
    tied: bool
    """Whether another pipeline rank holds it too, and their gradients are to be summed."""


def add_gradient(parameter: ModelParameter, output_grad: torch.Tensor, x: torch.Tensor) -> None:
    """gradient += output_grad^T x, of (tokens, rows) and (tokens, columns)."""
    assert parameter.gradient is not None
    if output_grad.dtype == parameter.gradient.dtype:
        parameter.gradient.addmm_(output_grad.t(), x)
    else:
        parameter.gradient.add_(output_grad.t() @ x)


class Maker:
    """Makes parameters on one device from one seed; without ``draw`` all matrices are zero."""

    def __init__(self, seed: int, device: torch.device, *, draw: bool = True) -> None:
        self._seed, self._device, self._draw, self.dtype = seed, device, draw, torch.float32

    def normal(
        self, pieces: list[Piece], rows: int, columns: int, std: float, *, expert: bool = False
    ) -> ModelParameter:
        """A matrix with normal values; rows that no piece covers are zero."""
        local = torch.zeros(rows, columns, dtype=self.dtype, device=self._device)
        if self._draw:
            for piece in pieces:
                piece.of(local).copy_(draw_normal(self._seed, piece, std))
        return self._parameter(local, pieces, decays=True, expert=expert)

    def constant(self, pieces: list[Piece], rows: int, value: float) -> ModelParameter:
        """A vector of one value, which does not decay."""
        local = torch.full((rows,), value, dtype=self.dtype, device=self._device)
        return self._parameter(local, pieces, decays=False, expert=False)

    def _parameter(
        self, local: torch.Tensor, pieces: list[Piece], *, decays: bool, expert: bool
    ) -> ModelParameter:
        parameter = ModelParameter(local)
        parameter.pieces, parameter.decays = pieces, decays
        parameter.expert, parameter.tied, parameter.gradient = expert, False, None
        return parameter


def draw_normal(seed: int, piece: Piece, std: float) -> torch.Tensor:
    """The piece's part of the whole tensor's initial values, fp32."""
    *leading, (start, stop), columns = piece.box
    prefix = "".join(f"/{index}" for index, _ in leading)
    width = piece.shape[-1]
    parts = []
    for block in range(start // _BLOCK, -(-stop // _BLOCK)):
        first, last = block * _BLOCK, min((block + 1) * _BLOCK, piece.shape[-2])
        generator = torch.Generator().manual_seed(name_seed(seed, f"{piece.name}{prefix}/{block}"))
        values = torch.empty(last - first, width).normal_(0.0, std, generator=generator)
        parts.append(values[max(start - first, 0) : stop - first, slice(*columns)])
    return torch.cat(parts).view(piece.lengths)


def model_parameters(module: nn.Module) -> list[ModelParameter]:
    """All parameters of ``module`` in a fixed order; those of a dry run have the fields, not the class."""
    return cast(list[ModelParameter], list(module.parameters()))


def name_seed(seed: int, name: str) -> int:
    """A seed for one named thing."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1
