"""Hugging Face's safetensors files, streamed: the length of a JSON header, the header, the bytes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np

from hpcrun.errors import UserError

NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Name of a dtype in the header -> ours. Others are no weights."""

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def rows(self, first: int, last: int) -> np.ndarray:
        """Rows of a matrix, or elements of a vector, as stored words (bfloat16 as uint16)."""
        word = {8: "<f8", 4: "<f4"}.get(_BYTES[self.dtype], "<f2" if self.dtype == "float16" else "<u2")
        width = math.prod(self.shape[1:])
        with self.path.open("rb") as file:
            file.seek(self.offset + first * width * _BYTES[self.dtype])
            data = np.fromfile(file, word, (last - first) * width)
        return data.reshape(last - first, *self.shape[1:])


def write_file(path: Path, entries: list[Entry]) -> None:
    """Write and fsync one file.

    Raises:
        OSError: the disk.
    """
    names = {ours: theirs for theirs, ours in NAMES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        place = [offset, offset + entry.bytes]
        header[entry.name] = {"dtype": names[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
        offset = place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            for chunk in entry.chunks():
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def read_header(path: Path) -> list[Stored]:
    """The tensors of a file; their bytes are not read.

    Raises:
        UserError: not such a file, or its header points outside it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise UserError(f"{path}: not a safetensors file, or cut short")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise UserError(f"{path}: not a safetensors file: its header is no object")
    header.pop("__metadata__", None)
    return [_stored(path, name, told, 8 + length, size) for name, told in header.items()]


def _stored(path: Path, name: str, told: object, start: int, size: int) -> Stored:
    if not isinstance(told, dict):
        raise UserError(f"{path}: {name}: no description")
    dtype, shape, place = told.get("dtype"), told.get("shape"), told.get("data_offsets")
    if dtype not in NAMES:
        raise UserError(f"{path}: {name}: type {dtype} is none of {', '.join(NAMES)}")
    if not _naturals(shape) or not _naturals(place) or len(place) != 2:
        raise UserError(f"{path}: {name}: shape {shape} or place {place} is not valid")
    expected = math.prod(shape) * _BYTES[NAMES[dtype]]
    if place[1] - place[0] != expected or start + place[1] > size:
        raise UserError(f"{path}: {name}: bytes {place} do not hold {dtype} {shape}, or lie outside the file")
    return Stored(path, name, NAMES[dtype], tuple(shape), start + place[0])


def _naturals(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
