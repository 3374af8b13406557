"""Reading a checkpoint's tensors: by the manifest's offsets, without libhdf5, every block verified."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from hpcrun.manifest import HASH_BLOCK, Manifest, Piece, Tensor, block_hash

Box = tuple[tuple[int, int], ...]

_SMALL = 256 << 10
"""Bytes below which handing a read to a thread costs more than the read."""
_MOST_THREADS = 4


class Damaged(Exception):
    """A checkpoint whose bytes are not what was written; says file, tensor and place."""


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


def element_span(inner: Box, outer: Box) -> tuple[int, int]:
    """From the first to behind the last element of ``inner`` in the row-major array ``outer``."""
    first = last = 0
    for part, length in zip(within(inner, outer), lengths(outer), strict=True):
        first, last = first * length + part.start, last * length + part.stop - 1
    return first, last + 1


def block_span(start: int, stop: int, total: int) -> tuple[int, int]:
    """The whole hash blocks around the bytes ``start`` to ``stop`` of a piece of ``total`` bytes."""
    return start // HASH_BLOCK * HASH_BLOCK, min(-(-stop // HASH_BLOCK) * HASH_BLOCK, total)


class BlockReader:
    """Open files of one checkpoint, read and hashed by a few threads. For one caller at a time.

    Args:
        threads: at most; default: this process's CPUs over the node's ranks.
    """

    def __init__(self, folder: Path, manifest: Manifest, threads: int | None = None) -> None:
        self.folder, self._manifest = folder, manifest
        self._files: dict[int, int] = {}
        self._pool = ThreadPoolExecutor(threads or _threads(), "read")
        self._begun: list[Future[None]] = []

    def read(self, name: str, piece: Piece, start: int, into: memoryview) -> None:
        """Fill ``into`` with the piece's bytes from ``start`` on: whole blocks (:func:`block_span`).

        Raises:
            Damaged: a block has changed, or the file ends early.
            OSError: the file cannot be read.
        """
        self.begin(name, piece, start, into)
        self.settle()

    def begin(self, name: str, piece: Piece, start: int, into: memoryview) -> None:
        """Like :meth:`read`, but ``into`` is filled and verified only when :meth:`settle` has returned."""
        fd = self._open(piece.file)
        for at in range(0, len(into), HASH_BLOCK):
            work = (fd, name, piece, start + at, into[at : at + HASH_BLOCK])
            if len(into) < _SMALL:
                self._block(*work)
            else:
                self._begun.append(self._pool.submit(self._block, *work))

    def settle(self) -> None:
        """Wait for everything that was begun; raises like :meth:`read`."""
        begun, self._begun = self._begun, []
        wait(begun)
        for one in begun:
            one.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _block(self, fd: int, name: str, piece: Piece, start: int, block: memoryview) -> None:
        done = 0
        while done < len(block):
            got = os.preadv(fd, [block[done:]], piece.offset + start + done)
            if not got:
                raise Damaged(self._told(name, piece, start, len(block), "are missing"))
            done += got
        if block_hash(block) != piece.hashes[start // HASH_BLOCK]:
            raise Damaged(self._told(name, piece, start, len(block), "have changed"))

    def _open(self, file: int) -> int:
        if file not in self._files:
            self._files[file] = os.open(self.folder / self._manifest.files[file].name, os.O_RDONLY)
        return self._files[file]

    def _told(self, name: str, piece: Piece, start: int, length: int, what: str) -> str:
        path = self.folder / self._manifest.files[piece.file].name
        first = piece.offset + start
        return f"{path}: {name}: block {start // HASH_BLOCK}: bytes {first} to {first + length} {what}"


def _threads() -> int:
    cpus = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(_MOST_THREADS, max(1, cpus))


@contextmanager
def open_blocks(folder: Path, manifest: Manifest) -> Iterator[BlockReader]:
    """A :class:`BlockReader` that is closed at the end."""
    reader = BlockReader(folder, manifest)
    try:
        yield reader
    finally:
        reader.close()


def touched(tensor: Tensor, box: Box) -> Iterator[tuple[Piece, Box]]:
    """The pieces that hold part of ``box``, each with what it shares."""
    for piece in tensor.pieces:
        shared = overlap(tuple(piece.box), box)
        if shared is not None:
            yield piece, shared
