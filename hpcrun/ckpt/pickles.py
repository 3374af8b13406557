"""Reading torch's pickled files without torch and without running anything that they ask for.

Only names on a list are looked up. Each stands for a plain value, or for :class:`Inert`, which keeps what
it is given and does nothing.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcrun.errors import UserError

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_INERT_PACKAGES = ("argparse.", "megatron.", "numpy.", "torch.distributed.checkpoint.")
"""Settings, enumerations, generators and lists of contents: nothing of them is run."""


_Numbers = tuple[int, ...]


class Inert:
    """Whatever a pickle would have made; its attributes are what the pickle sets."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


@dataclass(frozen=True)
class Storage:
    """The bytes that a tensor views."""

    key: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class View:
    """A tensor: part of a storage, by elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_pickle(data: bytes, source: str) -> Any:
    """What a pickle of torch's holds, with tensors as :class:`View`.

    Raises:
        UserError: it asks for a name that is not on the list, or is no pickle.
    """
    try:
        return _Unpickler(io.BytesIO(data), source).load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source}: cannot be read: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, source: str) -> None:
        super().__init__(file)
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        found = _allowed(module, name)
        if found is None:
            raise UserError(
                f"{self._source}: its pickle asks for {module}.{name}, which is refused; nothing was run"
            )
        return found

    def persistent_load(self, pid: Any) -> Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], str)):
            raise UserError(f"{self._source}: its pickle refers to {pid!r}, which is no storage")
        return Storage(str(pid[2]), pid[1], int(pid[4]))


def _allowed(module: str, name: str) -> Any:
    if module == "torch" and name in _STORAGES:
        return _STORAGES[name]
    if module == "torch.storage" and name in _STORAGES:
        return _STORAGES[name]
    if module == "torch" and name in _DTYPES:
        return name
    known: dict[tuple[str, str], Callable[..., Any]] = {
        ("torch", "Size"): _size,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_parameter"): _first,
        ("torch.serialization", "_get_layout"): _first,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "set"): set,
        ("_codecs", "encode"): Inert,
        ("pathlib", "PosixPath"): Inert,
        ("numpy", "ndarray"): Inert,
        ("numpy", "dtype"): Inert,
    }
    if (module, name) in known:
        return known[module, name]
    if any(f"{module}.".startswith(package) for package in _INERT_PACKAGES):
        return Inert
    return None


def _size(lengths: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(lengths)


def _first(value: Any, *_: object) -> Any:
    return value


def _tensor(storage: Storage, offset: int, shape: _Numbers, strides: _Numbers, *_: object) -> View:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a tensor that is none")
    return View(storage, offset, tuple(shape), tuple(strides))
