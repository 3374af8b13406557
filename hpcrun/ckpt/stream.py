"""Any part of a tensor of a checkpoint, verified, in memory that does not grow with the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from hpcrun.blocks import BlockReader, Box, block_span, element_span, lengths, touched, within
from hpcrun.manifest import HASH_BLOCK, ITEM_BYTES, Tensor

_WORDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


_SPAN = 4 * HASH_BLOCK
"""Bytes of the whole tensor between the first and the last element of a tile: what has to be read for it."""


def tiles(box: Box, tensor: Tensor, span: int = _SPAN) -> Iterator[Box]:
    """``box`` in row-major order, cut into boxes that lie within ``span`` bytes (or are one element)."""
    budget = max(1, span // ITEM_BYTES[tensor.dtype])
    inner = len(box)
    while inner > 0 and lengths(box)[inner - 1] * math.prod(tensor.shape[inner:]) <= budget:
        inner -= 1
    if inner == 0:
        yield box
        return
    step = max(1, budget // math.prod(tensor.shape[inner:]))
    start, stop = box[inner - 1]
    outer = [range(first, last) for first, last in box[: inner - 1]]
    for place in itertools.product(*outer):
        for first in range(start, stop, step):
            head = tuple((at, at + 1) for at in place)
            yield (*head, (first, min(first + step, stop)), *box[inner:])


def read_box(reader: BlockReader, name: str, tensor: Tensor, box: Box) -> bytes:
    """The values of ``box`` in row-major order, whatever pieces hold them; for small boxes.

    Raises:
        Damaged: a block has changed, or no piece holds part of the box.
        OSError: a file cannot be read.
    """
    width = ITEM_BYTES[tensor.dtype]
    values = np.zeros(lengths(box), _WORDS[width])
    for piece, shared in touched(tensor, box):
        whole = tuple(piece.box)
        first, last = element_span(shared, whole)
        start, stop = block_span(first * width, last * width, tensor.bytes_of(piece))
        buffer = bytearray(stop - start)
        reader.read(name, piece, start, memoryview(buffer))
        shape = lengths(whole)
        strides = [math.prod(shape[axis + 1 :]) * width for axis in range(len(shape))]
        values[within(shared, box)] = np.ndarray(
            lengths(shared), values.dtype, buffer, first * width - start, strides
        )
    return values.tobytes()


def chunks(reader: BlockReader, name: str, tensor: Tensor, box: Box) -> Iterator[memoryview]:
    """The values of ``box`` in row-major order, in chunks of whole hash blocks; only the last is shorter."""
    return in_blocks(read_box(reader, name, tensor, tile) for tile in tiles(box, tensor))


def in_blocks(data: Iterable[bytes]) -> Iterator[memoryview]:
    """The same bytes in chunks of one hash block; only the last is shorter."""
    pending = bytearray()
    for one in data:
        pending += one
        while len(pending) > HASH_BLOCK:
            yield memoryview(bytes(pending[:HASH_BLOCK]))
            del pending[:HASH_BLOCK]
    if pending:
        yield memoryview(bytes(pending))
