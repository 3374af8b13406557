"""The manifest of a checkpoint: what it holds and where each byte lies.

A checkpoint is a folder ``step_<8>.a<4>/`` with one HDF5 file per writing rank
and ``manifest.json``, renamed into place last. Its presence is the commit. Its text is
``{"sha256":"...","manifest":{...}}``, the hash being that of the inner object's bytes.
Tensors carry canonical names: global layer number, unfused, unpadded, tied once.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from hpcrun.records import RunDir, parse_checkpoint_name

MANIFEST = "manifest.json"
VERSION = 1
HASH_BLOCK = 4 << 20
ITEM_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
"""Of one element, by the name of the dtype."""
_FRAME = re.compile(rb'\{"sha256":"([0-9a-f]{64})","manifest":(\{.*\})\}', re.DOTALL)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Piece(_Strict):
    """One hyper-rectangle of a tensor, contiguous in one file."""

    file: int
    offset: int
    box: list[tuple[int, int]]
    """Start and stop per dimension, in elements of the whole tensor."""
    hashes: list[str]
    """xxh3-64 (hex) of each HASH_BLOCK bytes of the piece."""

    @property
    def elements(self) -> int:
        return math.prod(stop - start for start, stop in self.box)


class Tensor(_Strict):
    dtype: str
    shape: list[int]
    pieces: list[Piece]

    @field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{dtype!r} is none of {', '.join(ITEM_BYTES)}")
        return dtype

    def bytes_of(self, piece: Piece) -> int:
        return piece.elements * ITEM_BYTES[self.dtype]


class File(_Strict):
    name: str
    size: int
    frame_hash: str
    """xxh3-64 (hex) of all bytes outside tensor data."""


class Manifest(_Strict):
    format: Literal["hpcrun-checkpoint"] = "hpcrun-checkpoint"
    version: Literal[1] = 1
    run: str
    attempt: int
    claim: str
    """The random mark that the attempt's claimer wrote; two jobs never share one."""
    step: int
    written: float
    layout: dict[str, int]
    model: dict[str, Any]
    """The recipe's model section: a checkpoint of another model is refused by key."""
    state: dict[str, Any]
    """State that is no tensor: data position, schedule."""
    files: list[File]
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def data_ranges(self) -> list[list[tuple[int, int]]]:
        """Where tensor data lies in each file: (offset, bytes)."""
        ranges: list[list[tuple[int, int]]] = [[] for _ in self.files]
        for tensor in self.tensors.values():
            for piece in tensor.pieces:
                ranges[piece.file].append((piece.offset, tensor.bytes_of(piece)))
        return ranges


class ManifestError(Exception):
    """A manifest that is missing, torn or not ours; the text says which."""


def manifest_text(manifest: Manifest) -> str:
    """What stands in manifest.json."""
    body = manifest.model_dump_json()
    return f'{{"sha256":"{hashlib.sha256(body.encode()).hexdigest()}","manifest":{body}}}'


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint folder.

    Raises:
        ManifestError: missing, unreadable, or not of this format.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(_body(path))
    except FileNotFoundError as error:
        raise ManifestError(f"{folder}: no {MANIFEST}: the save never committed") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        if version := _newer(error):
            told = f"written by a newer hpcrun (format version {version}; this one reads {VERSION})"
            raise ManifestError(f"{path}: {told}: update hpcrun") from error
        first = error.errors()[0]
        raise ManifestError(f"{path}: not a valid manifest: {first['loc']}: {first['msg']}") from error


def manifest_whole(folder: Path) -> bool:
    """Whether the manifest is there as it was written; quick, as it is not parsed."""
    try:
        _body(folder / MANIFEST)
    except (OSError, ManifestError):
        return False
    return True


def _body(path: Path) -> bytes:
    framed = _FRAME.fullmatch(path.read_bytes())
    if not framed or hashlib.sha256(framed[2]).hexdigest().encode() != framed[1]:
        raise ManifestError(f"{path}: torn or changed since it was written")
    return framed[2]


def _newer(error: ValidationError) -> int | None:
    """The version that a manifest claims, if that is why it is not valid."""
    versions = [one["input"] for one in error.errors() if one["loc"] == ("version",)]
    return next((version for version in versions if isinstance(version, int) and version > VERSION), None)


def block_hash(block: bytes | memoryview) -> str:
    """xxh3-64 (hex)."""
    return xxhash.xxh3_64_hexdigest(block)


def hash_frame(fd: int, size: int, data: Iterable[tuple[int, int]]) -> str:
    """xxh3-64 (hex) of all bytes of a file outside the (offset, bytes) ranges of ``data``."""
    digest = xxhash.xxh3_64()
    position = 0
    for offset, length in [*sorted(data), (size, 0)]:
        while position < offset:
            block = os.pread(fd, min(HASH_BLOCK, offset - position), position)
            if not block:
                return "truncated"
            digest.update(block)
            position += len(block)
        position = max(position, offset + length)
    return digest.hexdigest()


def checkpoints_newest_first(run: RunDir) -> Iterator[tuple[int, int, Path]]:
    """(step, attempt, folder) of every folder with a manifest, newest attempt's highest step first."""
    if not run.checkpoints.is_dir():
        return
    found = []
    for entry in run.checkpoints.iterdir():
        parsed = parse_checkpoint_name(entry.name)
        if parsed and (entry / MANIFEST).exists():
            found.append((parsed[0], parsed[1], entry))
    yield from sorted(found, key=lambda item: (item[0], item[1]), reverse=True)


def superseder(starts: Mapping[int, int], step: int, attempt: int) -> int | None:
    """The later attempt that went on from an older step than a checkpoint's, which is then void; or None.

    ``starts``: the step at which each attempt began (:func:`hpcrun.records.resumed_steps`).
    """
    return next((later for later in sorted(starts) if later > attempt and starts[later] < step), None)
