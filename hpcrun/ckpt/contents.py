"""What is in a checkpoint, told briefly: layers that are alike are told once."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from hpcrun.manifest import ITEM_BYTES, Manifest, Tensor

_LAYER = re.compile(r"(.*\b(?:layers\.|rank))(\d+)([./].*)")
_KINDS = ("model", "exp_avg", "exp_avg_sq", "rng")


@dataclass(frozen=True)
class Row:
    """One tensor, or the same tensor of several layers."""

    name: str
    dtype: str
    shape: list[int]
    pieces: int
    bytes: int
    count: int = 1


def rows(manifest: Manifest, *, every: bool) -> list[Row]:
    """One row per tensor, in the order of layers; layers that are alike together unless ``every``."""
    found = [
        Row(name, tensor.dtype, tensor.shape, len(tensor.pieces), tensor_bytes(tensor))
        for name, tensor in sorted(manifest.tensors.items(), key=lambda item: _order(item[0]))
    ]
    return found if every else _folded(found)


def parameters(manifest: Manifest) -> int:
    """Elements of the weights."""
    return sum(math.prod(one.shape) for name, one in manifest.tensors.items() if name.startswith("model/"))


def bytes_by_kind(manifest: Manifest) -> dict[str, int]:
    """``model``, ``exp_avg``, ... -> bytes of tensor data."""
    sizes: Counter[str] = Counter()
    for name, tensor in manifest.tensors.items():
        sizes[name.split("/")[0]] += tensor_bytes(tensor)
    return dict(sizes)


def tensor_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def layout_text(layout: dict[str, int]) -> str:
    """The dimensions above one: ``tp2 pp4``."""
    named = [f"{name}{layout[name]}" for name in ("tp", "cp", "dp", "pp", "ep") if layout.get(name, 1) > 1]
    return " ".join(named) or "1 rank"


def _order(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    """Weights first; numbers by value."""
    kind = name.split("/")[0]
    parts = [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS), parts


def _folded(found: list[Row]) -> list[Row]:
    groups: dict[tuple[str, str, str], list[tuple[int, Row]]] = {}
    order: list[Row | tuple[str, str, str]] = []
    for row in found:
        match = _LAYER.fullmatch(row.name)
        if not match:
            order.append(row)
            continue
        key = (match[1], match[3], f"{row.dtype}{row.shape}{row.pieces}")
        if key not in groups:
            order.append(key)
        groups.setdefault(key, []).append((int(match[2]), row))
    return [one if isinstance(one, Row) else _together(one, groups[one]) for one in order]


def _together(key: tuple[str, str, str], members: list[tuple[int, Row]]) -> Row:
    layers, row = [layer for layer, _ in members], members[0][1]
    if len(layers) == 1:
        return row
    consecutive = layers == list(range(layers[0], layers[-1] + 1))
    told = f"{{{layers[0]}..{layers[-1]}}}" if consecutive else f"{{{','.join(map(str, layers))}}}"
    return Row(f"{key[0]}{told}{key[1]}", row.dtype, row.shape, row.pieces, row.bytes, len(layers))
