"""Weights from a folder of torch.distributed.checkpoint: a pickle that lists pieces, and files of pieces."""

from __future__ import annotations

from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hpcrun.blocks import Box, overlap, volume, within
from hpcrun.ckpt.families import family_of, matches
from hpcrun.ckpt.foreign import Found, canonical_names, parts_of, write_weights
from hpcrun.ckpt.pickles import Inert, View, read_pickle
from hpcrun.ckpt.torchfile import read_torch_file
from hpcrun.errors import UserError
from hpcrun.recipe import Model

METADATA = ".metadata"
_PREFIXES = ("", "model.", "model/", "module.", "model.module.", "state.model.", "app.model.")


def import_dcp(source: Path, target: Path, model: Model) -> None:
    """Make a checkpoint of weights from the names of hpcrun or of Hugging Face in ``source``.

    Raises:
        UserError: not such a folder, other names or shapes, or a pickle that asks for anything else.
    """
    stored = _stored(source)
    write_weights(target, parts_of(_named(stored, model, source), model, source), model, "dcp", source)


def _stored(source: Path) -> dict[str, Found]:
    """Every tensor by its name there."""
    path = source / METADATA
    try:
        listed = read_pickle(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a folder of torch.distributed.checkpoint?") from error
    try:
        places = {
            (key.fqn, tuple(key.offset)): info
            for key, info in listed.storage_data.items()
            if getattr(key, "offset", None) is not None
        }
        return {
            name: Found(tuple(told.size), partial(_assembled, source, name, told, places))
            for name, told in listed.state_dict_metadata.items()
            if hasattr(told, "chunks")
        }
    except (AttributeError, TypeError) as error:
        raise UserError(f"{path}: not a list of torch.distributed.checkpoint: {error}") from error


def _named(stored: dict[str, Found], model: Model, source: Path) -> dict[str, Found]:
    """The tensors by canonical name, by whichever naming and prefix fits all of them."""
    for prefix in _PREFIXES:
        if all(f"{prefix}{name}" in stored for name in canonical_names(model)):
            return {name: stored[f"{prefix}{name}"] for name in canonical_names(model)}
        theirs = list(matches(family_of(model), model))
        if all(f"{prefix}{match.theirs}" in stored for match in theirs):
            return {
                name: found
                for match in theirs
                for name, found in _split(stored[f"{prefix}{match.theirs}"], match.ours, match.transposed)
            }
    some = ", ".join(sorted(stored)[:3])
    raise UserError(
        f"{source}: holds neither hpcrun's nor Hugging Face's names of this model, but {some} ..."
    )


def _split(found: Found, names: tuple[str, ...], transposed: bool) -> list[tuple[str, Found]]:
    """Canonical tensors that lie one above the other in ``found``."""
    shape = found.shape[::-1] if transposed else found.shape
    rows = shape[0] // len(names)

    def read(first: int) -> np.ndarray:
        whole = found.read()
        return (whole.T if transposed else whole)[first : first + rows]

    return [
        (name, Found((rows, *shape[1:]), partial(read, index * rows))) for index, name in enumerate(names)
    ]


def _assembled(
    source: Path, name: str, told: Any, places: dict[tuple[str, tuple[int, ...]], Any]
) -> np.ndarray:
    shape = tuple(told.size)
    whole, filled = np.empty(shape, "f4"), 0
    everything: Box = tuple((0, length) for length in shape)
    for chunk in told.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        box: Box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        info = places.get((name, offsets))
        if info is None or overlap(box, everything) != box:
            raise UserError(f"{source}: {name}: the piece at {list(offsets)} has no place")
        whole[within(box, everything)] = _piece(source, name, info, sizes)
        filled += volume(box)
    if filled != volume(everything):
        raise UserError(f"{source}: {name}: its pieces hold {filled} of {volume(everything)} elements")
    return whole


def _piece(source: Path, name: str, info: Inert, sizes: tuple[int, ...]) -> np.ndarray:
    relative, offset, length = (getattr(info, key) for key in ("relative_path", "offset", "length"))
    if PurePosixPath(relative).is_absolute() or ".." in PurePosixPath(relative).parts:
        raise UserError(f"{source}: {name}: lies outside the folder: {relative}")
    file = read_torch_file(source / relative, offset, length)
    if not isinstance(file.content, View) or file.content.shape != sizes:
        raise UserError(f"{source / relative}: {name}: is no tensor of shape {list(sizes)}")
    return file.tensor(file.content, name).read()
