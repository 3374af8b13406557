"""The manifest of a checkpoint: what it holds and where each byte lies.

A checkpoint is a folder ``step_<8>.a<4>/`` with one HDF5 file per writing rank
and ``manifest.json``, renamed into place last. Its presence is the commit. Its text is
``{"sha256":"...","manifest":{...}}``, the hash being that of the inner object's bytes.
Tensors carry canonical names: global layer number, unfused, unpadded, tied once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hpcrun.records import RunDir, parse_checkpoint_name

MANIFEST = "manifest.json"
HASH_BLOCK = 4 << 20
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


class Tensor(_Strict):
    dtype: str
    shape: list[int]
    pieces: list[Piece]


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
        text = path.read_bytes()
        framed = _FRAME.fullmatch(text)
        if not framed or hashlib.sha256(framed[2]).hexdigest().encode() != framed[1]:
            raise ManifestError(f"{path}: torn or changed since it was written")
        return Manifest.model_validate_json(framed[2])
    except FileNotFoundError as error:
        raise ManifestError(f"{folder}: no {MANIFEST}: the save never committed") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ManifestError(f"{path}: not a valid manifest: {first['loc']}: {first['msg']}") from error


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
