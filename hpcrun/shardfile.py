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

import h5py

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

    Hashes are computed in a thread beside the writes.

    Raises:
        OSError: disk full, quota, I/O error.
        ValueError: a part's chunks are not as long as its box.
    """
    offsets = _write_frame(path, parts)
    written = []
    fd = os.open(path, os.O_RDWR)
    try:
        with ThreadPoolExecutor(1, "hash") as hasher:
            pending = [
                _write_part(fd, offset, part, hasher) for part, offset in zip(parts, offsets, strict=True)
            ]
            os.fsync(fd)
            for part, offset, hashes in zip(parts, offsets, pending, strict=True):
                written.append(Written(part, offset, [one.result() for one in hashes]))
        size = os.fstat(fd).st_size
        frame = hash_frame(fd, size, [(piece.offset, piece.part.bytes) for piece in written])
    finally:
        os.close(fd)
    return written, size, frame


def _write_frame(path: Path, parts: list[Part]) -> list[int]:
    """Lay out the file; returns each part's offset. libhdf5's own errors become OSError."""
    try:
        return _frame(path, parts)
    except (OSError, RuntimeError, ValueError) as error:
        if "No space" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise OSError(errno.EIO, one_line(str(error))) from error


def _frame(path: Path, parts: list[Part]) -> list[int]:
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_layout(h5py.h5d.CONTIGUOUS)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
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
            dataset = file.create_dataset(
                f"{part.name}/{box}", part.lengths or (1,), STORED_AS[part.dtype], dcpl=create
            )
            dataset.attrs["torch_dtype"] = part.dtype
            dataset.attrs["whole_shape"] = list(part.shape)
            offsets.append(dataset.id.get_offset())
    path.chmod(0o640)
    return offsets


def _write_part(fd: int, offset: int, part: Part, hasher: ThreadPoolExecutor) -> list[Future[str]]:
    hashes, place = [], offset
    for chunk in part.chunks():
        for start in range(0, len(chunk), HASH_BLOCK):
            block = chunk[start : start + HASH_BLOCK]
            hashes.append(hasher.submit(block_hash, block))
            if len(hashes) > _AHEAD:
                hashes[-_AHEAD].result()
            done = 0
            while done < len(block):
                done += os.pwrite(fd, block[done:], place + done)
            place += len(block)
    if place - offset != part.bytes:
        raise ValueError(f"{part.name}: {place - offset} bytes for a box of {part.bytes}")
    return hashes
