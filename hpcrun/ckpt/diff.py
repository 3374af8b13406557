"""How two checkpoints differ, whatever layouts wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcrun.blocks import BlockReader, Box, Damaged, open_blocks, overlap, volume
from hpcrun.ckpt.stream import read_box, tiles
from hpcrun.ckpt.verify import incoherent
from hpcrun.manifest import Manifest, Tensor

_FLOATS = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
_WORDS = {"bfloat16": "<u2", "int64": "<i8", "int32": "<i4"}


@dataclass(frozen=True)
class Change:
    """A tensor whose values differ."""

    name: str
    differing: int
    """Elements."""
    elements: int
    largest: float | None
    """Difference; None for types that are compared by their bits."""

    def within(self, tolerance: float | None) -> bool:
        return tolerance is not None and self.largest is not None and self.largest <= tolerance


@dataclass
class Difference:
    """All that differs. ``keys``: ``section.key: old -> new`` of model, layout, state and step."""

    keys: list[str] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    values: list[Change] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.keys, self.only_first, self.only_second, self.shapes, self.values))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no word for infinity: text, as in metrics."""
        told = asdict(self)
        for change in told["values"]:
            if change["largest"] == math.inf:
                change["largest"] = "inf"
        return told


def compare(
    first: Path, one: Manifest, second: Path, other: Manifest, tolerance: float | None = None
) -> Difference:
    """Read both as far as needed: tensors with the same pieces and hashes are not read.

    Args:
        tolerance: values that differ by no more are the same; None compares bits, so that 0.0 is not -0.0.

    Raises:
        Damaged: a block that had to be read has changed, or pieces do not make whole tensors.
        OSError: a file cannot be read.
    """
    for folder, manifest in ((first, one), (second, other)):
        if problem := next(incoherent(manifest), None):
            raise Damaged(f"{folder}/{problem}")
    found = Difference(keys=list(_keys(one, other)))
    found.only_first = sorted(set(one.tensors) - set(other.tensors))
    found.only_second = sorted(set(other.tensors) - set(one.tensors))
    with open_blocks(first, one) as left, open_blocks(second, other) as right:
        for name in sorted(set(one.tensors) & set(other.tensors)):
            a, b = one.tensors[name], other.tensors[name]
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                found.shapes.append(f"{name}: {a.dtype} {a.shape} -> {b.dtype} {b.shape}")
            elif not _same_hashes(a, b):
                change = _values(name, a, left, b, right)
                if change.differing and not change.within(tolerance):
                    found.values.append(change)
    return found


def _keys(one: Manifest, other: Manifest) -> Iterator[str]:
    if one.step != other.step:
        yield f"step: {one.step} -> {other.step}"
    for section in ("model", "layout", "state"):
        before, after = _flat(getattr(one, section)), _flat(getattr(other, section))
        for key in sorted(set(before) | set(after)):
            if before.get(key) != after.get(key):
                yield f"{section}.{key}: {before.get(key)!r} -> {after.get(key)!r}"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _same_hashes(a: Tensor, b: Tensor) -> bool:
    def told(tensor: Tensor) -> list[tuple[list[tuple[int, int]], list[str]]]:
        return sorted((piece.box, piece.hashes) for piece in tensor.pieces)

    return told(a) == told(b)


def _values(name: str, a: Tensor, left: BlockReader, b: Tensor, right: BlockReader) -> Change:
    differing, largest = 0, 0.0
    for box in _common(a, b):
        for tile in tiles(box, a):
            before, after = (
                read_box(reader, name, tensor, tile) for reader, tensor in ((left, a), (right, b))
            )
            if before == after:
                continue
            unequal = _bits(before, a.dtype) != _bits(after, a.dtype)
            differing += int(np.count_nonzero(unequal))
            numbers = [_numbers(data, a.dtype) for data in (before, after)]
            if numbers[0] is not None and numbers[1] is not None:
                largest = max(largest, _largest(numbers[0][unequal], numbers[1][unequal]))
    shown = largest if _numbers(b"", a.dtype) is not None else None
    return Change(name, differing, volume(tuple((0, length) for length in a.shape)), shown)


def _largest(before: np.ndarray, after: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        gaps = np.abs(before - after)
    return float("inf") if np.isnan(gaps).any() else float(gaps.max())


def _common(a: Tensor, b: Tensor) -> Iterator[Box]:
    """The boxes that a piece of each shares: each is read once from both."""
    for piece in a.pieces:
        for other in b.pieces:
            if shared := overlap(tuple(piece.box), tuple(other.box)):
                yield shared


def _bits(data: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(data, _FLOATS.get(dtype, "").replace("f", "u") or _WORDS.get(dtype, "u1"))


def _numbers(data: bytes, dtype: str) -> np.ndarray | None:
    """As float64; None for types whose differences mean nothing to a person."""
    if dtype in _FLOATS:
        return np.frombuffer(data, _FLOATS[dtype]).astype(np.float64)
    if dtype == "bfloat16":
        upper = np.frombuffer(data, "<u2").astype("<u4") << 16
        return upper.view("<f4").astype(np.float64)
    return None
