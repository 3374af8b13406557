"""A checkpoint of weights from tensors that another program has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hpcrun.blocks import Box
from hpcrun.ckpt.families import family_of, matches
from hpcrun.ckpt.stream import in_blocks
from hpcrun.ckpt.write import write_checkpoint
from hpcrun.errors import UserError
from hpcrun.recipe import Model
from hpcrun.shardfile import Part

_FILE_BYTES = 8 << 30
"""Of one file."""


@dataclass(frozen=True)
class Found:
    """A canonical tensor that can be read whole, in fp32."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def canonical_names(model: Model) -> list[str]:
    """Of the weights of a model without experts, in the order of the forward."""
    return [name for match in matches(family_of(model), model) for name in match.ours]


def canonical_shape(model: Model, name: str) -> tuple[int, ...]:
    """Of one of :func:`canonical_names`."""
    query, key = model.heads * model.head_size, model.kv * model.head_size
    *_, part, kind = name.split(".")
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (model.vocab, model.hidden),
        "head": (model.vocab, model.hidden),
        "positions": (model.sequence, model.hidden),
        "q": (query, model.hidden),
        "k": (key, model.hidden),
        "v": (key, model.hidden),
        "o": (model.hidden, query),
        "gate": (model.ffn, model.hidden),
        "up": (model.ffn, model.hidden),
        "down": (model.hidden, model.ffn),
        "q_norm": (model.head_size,),
        "k_norm": (model.head_size,),
    }
    shape = shapes.get(part, (model.hidden,))
    return shape[:1] if kind == "bias" else shape


def write_weights(target: Path, parts: list[Part], model: Model, origin: str, source: Path) -> None:
    """Write a checkpoint of weights alone, at step 0.

    Raises:
        UserError: ``target`` exists, or the disk refuses.
    """
    write_checkpoint(
        target,
        _in_files(parts),
        run=source.name,
        attempt=0,
        claim="",
        step=0,
        layout={},
        model=model.model_dump(),
        state={"imported": {"from": origin, "path": str(source)}},
    )


def parts_of(found: Mapping[str, Found], model: Model, source: Path) -> list[Part]:
    """All weights of ``model`` as parts; each tensor is read whole when it is written.

    Raises:
        UserError: one is missing, or has another shape.
    """
    parts = []
    for name in canonical_names(model):
        shape = canonical_shape(model, name)
        if name not in found:
            raise UserError(f"{source}: {name} is missing; is the recipe's model that of the checkpoint?")
        if found[name].shape != shape:
            raise UserError(
                f"{source}: {name} has shape {list(found[name].shape)}, the recipe's {list(shape)}"
            )
        box: Box = tuple((0, length) for length in shape)
        parts.append(Part(f"model/{name}", "float32", shape, box, partial(_chunks, found[name])))
    return parts


def _chunks(found: Found) -> Iterator[memoryview]:
    return in_blocks([np.ascontiguousarray(found.read(), "<f4").tobytes()])


def _in_files(parts: list[Part]) -> list[list[Part]]:
    files: list[list[Part]] = [[]]
    for part in parts:
        if files[-1] and sum(one.bytes for one in files[-1]) + part.bytes > _FILE_BYTES:
            files.append([])
        files[-1].append(part)
    return files
