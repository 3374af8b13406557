"""Which part of which whole tensor a local tensor holds.

A local parameter lies in rows: its last dimension is one, everything before it the other. Its rows are
cut into pieces, each a rectangle of one canonically named tensor: fused q, k and v are three
pieces, eight experts are eight. A checkpoint is the list of them, whatever the layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from training.parallel.mesh import Mesh

Box = tuple[tuple[int, int], ...]
Holders = Literal["one", "tp", "kv"]


@dataclass(frozen=True)
class Piece:
    """A rectangle of a whole tensor, in consecutive rows of a local one."""

    name: str
    """Canonical: global layer number, unfused, unpadded."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    """Start and stop per dimension of what lies here."""
    row: int = 0
    """First row of the local tensor. A vector's rows are its elements."""
    holders: Holders = "one"
    """Which ranks beside those of the data dimension hold the same values: one, all of tp, or of kv."""
    partial: bool = False
    """Whether each holder computes a part of the gradient only: they are to be summed."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def rows(self) -> int:
        return math.prod(self.lengths[:-1]) if len(self.box) > 1 else self.lengths[0]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The piece's values as a view of ``local``, in the shape of the box."""
        return local[self.row : self.row + self.rows].view(self.lengths)

    def narrow(self, start: int, stop: int) -> Piece | None:
        """What rows ``start`` to ``stop`` of the local tensor hold of it, as rows from 0; None if nothing.

        Only the second to last dimension is cut, so all before it must be of length 1.
        """
        first, last = max(self.row, start), min(self.row + self.rows, stop)
        if first >= last:
            return None
        dim = max(0, len(self.box) - 2)
        begin = self.box[dim][0] - self.row
        box = (*self.box[:dim], (begin + first, begin + last), *self.box[dim + 1 :])
        return replace(self, box=box, row=first - start)


def whole(name: str, shape: tuple[int, ...], holders: Holders = "tp", partial: bool = False) -> list[Piece]:
    """A tensor that is not split."""
    return [Piece(name, shape, tuple((0, length) for length in shape), holders=holders, partial=partial)]


def split_rows(name: str, shape: tuple[int, ...], size: int, index: int) -> list[Piece]:
    """Rows ``index * size`` and the next ``size``; those beyond the shape are padding, no piece."""
    start, stop = (min(rows, shape[0]) for rows in (index * size, (index + 1) * size))
    return [Piece(name, shape, ((start, stop), *((0, length) for length in shape[1:])))] * (start < stop)


def split_columns(name: str, shape: tuple[int, int], parts: int, index: int) -> list[Piece]:
    """Column block ``index`` of ``parts``."""
    size = shape[1] // parts
    return [Piece(name, shape, ((0, shape[0]), (index * size, (index + 1) * size)))]


def stack(*parts: list[Piece]) -> list[Piece]:
    """Local tensors one below the other."""
    stacked: list[Piece] = []
    for pieces in parts:
        below = rows_of(stacked)
        stacked += [replace(piece, row=piece.row + below) for piece in pieces]
    return stacked


def of_experts(pieces: list[Piece], experts: int, mine: range) -> list[Piece]:
    """The same pieces for each of ``mine``, one expert below the other, on a leading axis ``experts``."""
    copies = [
        [
            replace(piece, shape=(experts, *piece.shape), box=((expert, expert + 1), *piece.box))
            for piece in pieces
        ]
        for expert in mine
    ]
    return stack(*copies)


def rows_of(pieces: list[Piece]) -> int:
    """Rows of the local tensor that ends with the last of ``pieces``."""
    return max((piece.row + piece.rows for piece in pieces), default=0)


def copies(piece: Piece, mesh: Mesh) -> int:
    """How many ranks of one data index hold the piece's values."""
    return {"one": 1, "tp": mesh.layout.tp, "kv": mesh.kv_copies}[piece.holders]
