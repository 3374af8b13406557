"""Writing one HDF5 file of a checkpoint: libhdf5 lays out the frame, the tensor bytes are ours.

Datasets are contiguous, allocated early and never filled, large ones aligned to
4096, so that each lies at one offset: readers need no libhdf5, and people have
h5ls, h5py and numpy.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcrun.errors import one_line
from hpcrun.manifest import HASH_BLOCK, ITEM_BYTES, block_hash, hash_frame

STORED_AS = {
    "float32": "<f4",
    "float64": "<f8",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e5m2": "|u1",
    "int64": "<i8",
    "int32": "<i4",
    "uint8": "|u1",
    "bool": "|u1",
}
"""How each dtype lies in HDF5; those that numpy lacks as unsigned integers of the same width."""

_ALIGNMENT = 4096
_FLUSH = 32 << 20
"""Bytes after which those written so far are sent to the disk."""
_AHEAD = 8
"""Blocks that may wait for their hash: they bound the memory of a stream."""


@dataclass(frozen=True)
class Part:
    """One hyper-rectangle of a tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: tuple[tuple[int, int], ...]
    """Start and stop per dimension."""
    chunks: Callable[[], Iterable[memoryview]]
    """The box's values in row-major order, little-endian; all chunks but the last whole hash blocks."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def bytes(self) -> int:
        return math.prod(self.lengths) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Written:
    """Where one part went."""

    part: Part
    offset: int
    hashes: list[str]


def write_shard(path: Path, parts: list[Part]) -> tuple[list[Written], int, str]:
    """Write one file and fsync it; returns its pieces, size and frame hash.

    Hashes are computed, and what has been written is sent to the disk, in threads beside the writes.

    Raises:
        OSError: disk full, quota, I/O error.
        ValueError: a part's chunks are not as long as its box.
    """
    offsets = _write_frame(path, parts)
    written = []
    fd = os.open(path, os.O_RDWR)
    try:
        with ThreadPoolExecutor(1, "hash") as hasher, ThreadPoolExecutor(1, "flush") as flusher:
            disk = _Disk(fd, flusher)
            pending = [
                _write_part(disk, offset, part, hasher) for part, offset in zip(parts, offsets, strict=True)
            ]
            disk.settle()
            for part, offset, hashes in zip(parts, offsets, pending, strict=True):
                written.append(Written(part, offset, [one.result() for one in hashes]))
        size = os.fstat(fd).st_size
        frame = hash_frame(fd, size, [(piece.offset, piece.part.bytes) for piece in written])
    finally:
        os.close(fd)
    return written, size, frame


class _Disk:
    """Writes to a file, and keeps the disk busy meanwhile: a flush is always under way."""

    def __init__(self, fd: int, flusher: ThreadPoolExecutor) -> None:
        self._fd, self._flusher = fd, flusher
        self._flush: Future[None] | None = None
        self._unflushed = 0

    def write(self, block: memoryview, offset: int) -> None:
        done = 0
        while done < len(block):
            done += os.pwrite(self._fd, block[done:], offset + done)
        self._unflushed += len(block)
        if self._unflushed >= _FLUSH and (self._flush is None or self._flush.done()):
            if self._flush:
                self._flush.result()
            self._flush, self._unflushed = self._flusher.submit(os.fdatasync, self._fd), 0

    def settle(self) -> None:
        """Return when everything is on the disk."""
        if self._flush:
            self._flush.result()
        os.fsync(self._fd)


def _write_frame(path: Path, parts: list[Part]) -> list[int]:
    """Lay out the file; returns each part's offset. libhdf5's own errors become OSError."""
    try:
        return _frame(path, parts)
    except (OSError, RuntimeError, ValueError) as error:
        if "No space" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise OSError(errno.EIO, one_line(str(error))) from error


def _frame(path: Path, parts: list[Part]) -> list[int]:
    """By h5py's low-level calls: a third of the time per dataset of the high-level ones."""
    import h5py
    from h5py import h5a, h5d, h5p, h5s, h5t

    def attribute(dataset: Any, name: bytes, space: Any, value: np.ndarray) -> None:
        h5a.create(dataset, name, h5t.py_create(value.dtype, logical=True), space).write(value)

    create = h5p.create(h5p.DATASET_CREATE)
    create.set_layout(h5d.CONTIGUOUS)
    create.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5d.FILL_TIME_NEVER)
    link = h5p.create(h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    offsets = []
    with h5py.File(
        path,
        "w",
        libver=("earliest", "v110"),
        locking=False,
        alignment_threshold=_ALIGNMENT,
        alignment_interval=_ALIGNMENT,
    ) as file:
        for part in parts:
            box = ",".join(f"{start}-{stop}" for start, stop in part.box) or "scalar"
            name = f"{part.name}/{box}".encode()
            space = h5s.create_simple(part.lengths or (1,))
            stored = h5t.py_create(np.dtype(STORED_AS[part.dtype]))
            dataset = h5d.create(file.id, name, stored, space, create, link)
            word = np.array(part.dtype, h5py.string_dtype())
            attribute(dataset, b"torch_dtype", h5s.create(h5s.SCALAR), word)
            shape = np.array(part.shape, "<i8")
            attribute(dataset, b"whole_shape", h5s.create_simple(shape.shape), shape)
            offsets.append(dataset.get_offset())
    path.chmod(0o640)
    return offsets


def _write_part(disk: _Disk, offset: int, part: Part, hasher: ThreadPoolExecutor) -> list[Future[str]]:
    hashes, place = [], offset
    for chunk in part.chunks():
        for start in range(0, len(chunk), HASH_BLOCK):
            block = chunk[start : start + HASH_BLOCK]
            hashes.append(hasher.submit(block_hash, block))
            if len(hashes) > _AHEAD:
                hashes[-_AHEAD].result()
            disk.write(block, place)
            place += len(block)
    if place - offset != part.bytes:
        raise ValueError(f"{part.name}: {place - offset} bytes for a box of {part.bytes}")
    return hashes
