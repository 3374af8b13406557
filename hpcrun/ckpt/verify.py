"""Whether a checkpoint holds what was written: quickly by sizes and frames, or down to every block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcrun.blocks import Box, overlap, volume
from hpcrun.manifest import (
    HASH_BLOCK,
    MANIFEST,
    Manifest,
    ManifestError,
    Piece,
    Tensor,
    block_hash,
    hash_frame,
    read_manifest,
)

_AHEAD = 4
"""Blocks in memory per thread."""


def verify(
    folder: Path,
    *,
    deep: bool,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Every damaged place, one line each; empty when the checkpoint is whole.

    Args:
        deep: read every byte. Otherwise: the manifest, sizes, all bytes outside tensor data, and that the
            pieces make whole tensors.
        progress: called with bytes done and bytes in all.

    Raises:
        ManifestError: ``folder`` is no checkpoint.
    """
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        if (folder / MANIFEST).exists():
            return [str(error)]
        raise
    damages = list(incoherent(manifest))
    manifest = _in_files(manifest)
    damages += _files(folder, manifest)
    if deep:
        damages += _blocks(folder, manifest, threads or min(8, os.cpu_count() or 1), progress)
    return damages


def incoherent(manifest: Manifest) -> Iterator[str]:
    """Pieces that do not make whole tensors, or lie in no file; nothing but the manifest is read."""
    for name, tensor in manifest.tensors.items():
        yield from _coverage(name, tensor, manifest)


def _in_files(manifest: Manifest) -> Manifest:
    """Without pieces in files that the manifest does not have."""

    def kept(tensor: Tensor) -> Tensor:
        pieces = [piece for piece in tensor.pieces if 0 <= piece.file < len(manifest.files)]
        return tensor.model_copy(update={"pieces": pieces})

    tensors = {name: kept(tensor) for name, tensor in manifest.tensors.items()}
    return manifest.model_copy(update={"tensors": tensors})


def _coverage(name: str, tensor: Tensor, manifest: Manifest) -> Iterator[str]:
    boxes: list[Box] = []
    for index, piece in enumerate(tensor.pieces):
        box = tuple(piece.box)
        if len(box) != len(tensor.shape) or any(
            not 0 <= start < stop <= length for (start, stop), length in zip(box, tensor.shape, strict=True)
        ):
            yield f"{MANIFEST}: {name}: piece {index} lies outside the tensor: {piece.box} of {tensor.shape}"
        else:
            if any(overlap(box, other) for other in boxes):
                yield f"{MANIFEST}: {name}: piece {index} overlaps another"
            boxes.append(box)
        if not 0 <= piece.file < len(manifest.files):
            yield f"{MANIFEST}: {name}: piece {index} lies in file {piece.file} of {len(manifest.files)}"
        elif not 0 <= piece.offset <= manifest.files[piece.file].size - tensor.bytes_of(piece):
            yield f"{MANIFEST}: {name}: piece {index} begins before or ends behind its file"
        if len(piece.hashes) != -(-tensor.bytes_of(piece) // HASH_BLOCK):
            yield f"{MANIFEST}: {name}: piece {index} has {len(piece.hashes)} hashes"
    held, whole = sum(map(volume, boxes)), volume(tuple((0, length) for length in tensor.shape))
    if held != whole:
        yield f"{MANIFEST}: {name}: its pieces hold {held} of {whole} elements"


def _files(folder: Path, manifest: Manifest) -> Iterator[str]:
    for file, ranges in zip(manifest.files, manifest.data_ranges(), strict=True):
        path = folder / file.name
        try:
            size = path.stat().st_size
            if size != file.size:
                yield f"{path}: {size} bytes, {file.size} were written"
                continue
            fd = os.open(path, os.O_RDONLY)
            try:
                if hash_frame(fd, size, ranges) != file.frame_hash:
                    yield f"{path}: bytes outside the tensors have changed"
            finally:
                os.close(fd)
        except OSError as error:
            yield f"{path}: {error.strerror}"


def _blocks(
    folder: Path, manifest: Manifest, threads: int, progress: Callable[[int, int], None] | None
) -> Iterator[str]:
    work = [
        (name, tensor, piece, start)
        for name, tensor in manifest.tensors.items()
        for piece in tensor.pieces
        for start in range(0, tensor.bytes_of(piece), HASH_BLOCK)
    ]
    total = sum(tensor.bytes_of(piece) for tensor in manifest.tensors.values() for piece in tensor.pieces)
    files: dict[int, int] = {}
    try:
        for index, file in enumerate(manifest.files):
            try:
                files[index] = os.open(folder / file.name, os.O_RDONLY)
            except OSError:
                continue  # told by _files
        done = 0
        with ThreadPoolExecutor(threads, "verify") as pool:
            for first in range(0, len(work), threads * _AHEAD):
                batch = work[first : first + threads * _AHEAD]
                for size, damage in pool.map(lambda one: _block(folder, manifest, files, *one), batch):
                    done += size
                    if damage:
                        yield damage
                if progress:
                    progress(done, total)
    finally:
        for fd in files.values():
            os.close(fd)


def _block(
    folder: Path,
    manifest: Manifest,
    files: dict[int, int],
    name: str,
    tensor: Tensor,
    piece: Piece,
    start: int,
) -> tuple[int, str | None]:
    size = min(HASH_BLOCK, tensor.bytes_of(piece) - start)
    if piece.file not in files:
        return size, None
    first, number = piece.offset + start, start // HASH_BLOCK
    place = (
        f"{folder / manifest.files[piece.file].name}: {name}: block {number}: bytes {first} to {first + size}"
    )
    try:
        data = _read(files[piece.file], size, first)
    except OSError as error:
        return size, f"{place}: {error.strerror}"
    if len(data) < size:
        return size, f"{place} are missing"
    if number < len(piece.hashes) and block_hash(data) != piece.hashes[number]:
        return size, f"{place} have changed"
    return size, None


def _read(fd: int, size: int, offset: int) -> bytes:
    """``size`` bytes, fewer only at the end of the file: one pread may return less."""
    data = b""
    while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data
