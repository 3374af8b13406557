"""One rank's HDF5 file: libhdf5 lays out the frame, the tensor bytes are ours.

Datasets are contiguous, allocated early and never filled, large ones aligned to
4096, so that each lies at one offset: readers need no libhdf5, and people have
h5ls, h5py and numpy.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import h5py

from hpcrun.errors import one_line
from hpcrun.manifest import HASH_BLOCK, block_hash, hash_frame
from training.checkpoint.local import STORED_AS, LocalTensor, dtype_name, lengths, raw_bytes

_ALIGNMENT = 4096


@dataclass(frozen=True)
class WrittenPiece:
    """Where one local tensor went."""

    tensor: LocalTensor
    offset: int
    hashes: list[str]


def write_shard(path: Path, tensors: list[LocalTensor]) -> tuple[list[WrittenPiece], int, str]:
    """Write one file and fsync it; returns its pieces, size and frame hash.

    Raises:
        OSError: disk full, quota, I/O error.
    """
    offsets = _write_frame(path, tensors)
    pieces = []
    fd = os.open(path, os.O_RDWR)
    try:
        for tensor, offset in zip(tensors, offsets, strict=True):
            pieces.append(WrittenPiece(tensor, offset, _write_bytes(fd, offset, raw_bytes(tensor.data))))
        os.fsync(fd)
        size = os.fstat(fd).st_size
        frame = hash_frame(fd, size, [(piece.offset, piece.tensor.bytes) for piece in pieces])
    finally:
        os.close(fd)
    return pieces, size, frame


def _write_frame(path: Path, tensors: list[LocalTensor]) -> list[int]:
    """Lay out the file; returns each tensor's offset. libhdf5's own errors become OSError."""
    try:
        return _frame(path, tensors)
    except (OSError, RuntimeError, ValueError) as error:
        if "No space" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise OSError(errno.EIO, one_line(str(error))) from error


def _frame(path: Path, tensors: list[LocalTensor]) -> list[int]:
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
        for tensor in tensors:
            box = ",".join(f"{start}-{stop}" for start, stop in tensor.box) or "scalar"
            dataset = file.create_dataset(
                f"{tensor.name}/{box}", lengths(tensor.box) or (1,), STORED_AS[tensor.data.dtype], dcpl=create
            )
            dataset.attrs["torch_dtype"] = dtype_name(tensor.data)
            dataset.attrs["whole_shape"] = list(tensor.shape)
            offsets.append(dataset.id.get_offset())
    path.chmod(0o640)
    return offsets


def _write_bytes(fd: int, offset: int, data: memoryview) -> list[str]:
    hashes = []
    for start in range(0, len(data), HASH_BLOCK):
        block = data[start : start + HASH_BLOCK]
        done = 0
        while done < len(block):
            done += os.pwrite(fd, block[done:], offset + start + done)
        hashes.append(block_hash(block))
    return hashes
