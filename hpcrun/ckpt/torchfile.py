"""The zip files that torch.save writes, read without torch; tensors are read when they are asked for."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpcrun.ckpt.numbers import READ_AS, to_float32
from hpcrun.ckpt.pickles import View, read_pickle
from hpcrun.errors import UserError

_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, LookupError, RuntimeError, ValueError, EOFError)
_LOCAL_HEADER = 30
"""Bytes, before name and extra field (PKZIP Application Note, 4.3.7)."""


@dataclass(frozen=True)
class TorchTensor:
    """A tensor in such a file."""

    path: Path
    view: View
    place: int
    """Where its storage's bytes begin in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    def read(self) -> np.ndarray:
        """Its values in fp32."""
        storage = self.view.storage
        dtype = np.dtype(READ_AS[storage.dtype])
        with self.path.open("rb") as file:
            file.seek(self.place)
            words = np.fromfile(file, dtype, storage.elements)
        if len(words) != storage.elements:
            raise UserError(f"{self.path}: cut short: {len(words)} of {storage.elements} elements are there")
        strides = [stride * dtype.itemsize for stride in self.view.strides]
        values = np.ndarray(self.shape, dtype, words, self.view.offset * dtype.itemsize, strides)
        return to_float32(values, storage.dtype)


@dataclass(frozen=True)
class TorchFile:
    """A whole such file, or one inside another file."""

    path: Path
    content: Any
    """As it was saved, tensors as :class:`hpcrun.ckpt.pickles.View`."""
    places: dict[str, int]
    """Storage key -> where its bytes begin in ``path``."""

    def tensor(self, view: View, name: str) -> TorchTensor:
        """
        Raises:
            UserError: the view does not lie in its storage, or is of another type than weights have.
        """
        storage = view.storage
        reach = zip(view.shape, view.strides, strict=True)
        last = view.offset + sum((length - 1) * stride for length, stride in reach)
        inside = last < storage.elements
        if storage.key not in self.places or not (inside or math.prod(view.shape) == 0):
            raise UserError(f"{self.path}: {name}: does not lie in the file")
        if storage.dtype not in READ_AS:
            raise UserError(f"{self.path}: {name}: type {storage.dtype} is no type of weights")
        return TorchTensor(self.path, view, self.places[storage.key])


def read_torch_file(path: Path, offset: int = 0, length: int | None = None) -> TorchFile:
    """Read the pickle of what ``torch.save`` has written at ``offset`` of a file; no tensor is read.

    Raises:
        UserError: not such a file, or its pickle asks for something else than tensors and plain values.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file, offset, length)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        LookupError,
        RuntimeError,
        ValueError,
        EOFError,
    ) as error:
        raise UserError(f"{path}: not a file of torch.save, or cut short: {error}") from error


def _read(path: Path, file: BinaryIO, offset: int, length: int | None) -> TorchFile:
    size = file.seek(0, io.SEEK_END)
    window = _Window(file, offset, size - offset if length is None else length)
    with zipfile.ZipFile(window) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
        if order != b"little":
            raise UserError(f"{path}: its bytes are {order.decode(errors='replace')}-endian")
        content = read_pickle(archive.read(entries["data.pkl"]), str(path))
        places = {
            name.removeprefix("data/"): offset + _place(window, entry)
            for name, entry in entries.items()
            if name.startswith("data/") and entry.compress_type == zipfile.ZIP_STORED
        }
    return TorchFile(path, content, places)


def _place(window: _Window, entry: zipfile.ZipInfo) -> int:
    """Where the bytes of an entry that is stored as it is begin."""
    window.seek(entry.header_offset)
    name, extra = struct.unpack("<26xHH", window.read(_LOCAL_HEADER))
    return entry.header_offset + _LOCAL_HEADER + int(name) + int(extra)


class _Window(io.RawIOBase):
    """Part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(22, "negative seek")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data
