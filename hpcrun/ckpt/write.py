"""A whole checkpoint from parts that are read while they are written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrun.errors import UserError
from hpcrun.manifest import MANIFEST, File, Manifest, Piece, Tensor, manifest_text
from hpcrun.records import replace_text, sync_folder
from hpcrun.shardfile import Part, write_shard


def write_checkpoint(folder: Path, files: Sequence[Sequence[Part]], **facts: Any) -> Manifest:
    """Write one HDF5 file per element of ``files``, and the manifest last; on any error nothing is left.

    Args:
        folder: must not exist.
        facts: the manifest's ``run attempt claim step layout model state``.

    Raises:
        UserError: the folder exists, or the disk refuses.
    """
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise UserError("writing a checkpoint takes h5py: pip install h5py") from error
    try:
        folder.mkdir(mode=0o750, parents=True)
    except FileExistsError as error:
        raise UserError(f"{folder}: exists already; choose another name") from error
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from error
    try:
        return _write(folder, files, facts)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{error.filename or folder}: {error.strerror}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(folder: Path, files: Sequence[Sequence[Part]], facts: dict[str, Any]) -> Manifest:
    tensors: dict[str, Tensor] = {}
    described: list[File] = []
    for parts in files:
        if not parts:
            continue
        path = folder / f"rank{len(described):05d}.h5"
        written, size, frame = write_shard(path, list(parts))
        for one in written:
            part = one.part
            tensor = Tensor(dtype=part.dtype, shape=list(part.shape), pieces=[])
            piece = Piece(file=len(described), offset=one.offset, box=list(part.box), hashes=one.hashes)
            tensors.setdefault(part.name, tensor).pieces.append(piece)
        described.append(File(name=path.name, size=size, frame_hash=frame))
    manifest = Manifest(written=time.time(), files=described, tensors=tensors, **facts)
    sync_folder(folder)
    replace_text(folder / MANIFEST, manifest_text(manifest))
    sync_folder(folder.parent)
    return manifest
