"""Finding the newest checkpoint that verifies, and loading it at today's layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrun.errors import UserError
from hpcrun.manifest import (
    HASH_BLOCK,
    Manifest,
    ManifestError,
    Piece,
    Tensor,
    block_hash,
    checkpoints_newest_first,
    hash_frame,
    read_manifest,
)
from hpcrun.records import RESUMED, RunDir, read_json_lines
from training.checkpoint.local import DTYPES, LocalTensor, lengths, overlap, volume, within
from training.parallel.exchange import broadcast_json, gather_json, rank_of_job, ranks_in_job

RNG = "rng/"


class Damaged(Exception):
    """A checkpoint whose bytes are not what was written; says tensor, file and place."""


@dataclass(frozen=True)
class Restored:
    """What was loaded."""

    folder: Path
    step: int
    state: dict[str, Any]
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """Newer checkpoints that were passed over: (folder name, reason)."""


def restore(run: RunDir, model: dict[str, Any], tensors: list[LocalTensor]) -> Restored | None:
    """Fill ``tensors`` from the newest checkpoint that verifies; None when there is none. Collective.

    Any layout reads any other: a rank reads only the blocks that its boxes touch.
    Random-number states of ranks that did not exist then stay as they are.

    Raises:
        UserError: the checkpoint is of another model, or lacks tensors, or has more.
    """
    rejected: list[tuple[str, str]] = []
    wanted = {name for names in gather_json([tensor.name for tensor in tensors]) for name in names}
    candidates = broadcast_json([path.name for _, _, path in checkpoints_newest_first(run)])
    for name in candidates:
        folder = run.checkpoints / name
        reason = _try(run, folder, model, tensors, wanted)
        if reason is None:
            manifest = read_manifest(folder)
            return Restored(folder, manifest.step, manifest.state, rejected)
        rejected.append((name, reason))
    if rejected:
        listed = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise UserError(
            f"{run.checkpoints}: no checkpoint can be loaded ({listed}); remove them to start anew"
        )
    return None


def _try(
    run: RunDir, folder: Path, model: dict[str, Any], tensors: list[LocalTensor], wanted: set[str]
) -> str | None:
    """Load ``folder`` on all ranks; the reason why it cannot be, or None.

    The one collective stands at the end, where every rank arrives whatever it met.
    """
    problem, mistake = None, None
    try:
        manifest = read_manifest(folder)
        if reason := _superseded(run, manifest):
            problem = reason
        else:
            mistake = _other_model(folder, manifest, model) or _other_keys(folder, manifest, wanted)
            if not mistake:
                _verify_files(folder, manifest)
                for tensor in tensors:
                    _load(folder, manifest, tensor)
    except (ManifestError, Damaged) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or folder}: {error.strerror}"
    answers = gather_json([problem, mistake])
    mistakes = [answer[1] for answer in answers if answer[1]]
    if mistakes and not any(answer[0] for answer in answers):
        raise UserError(mistakes[0])
    return next((answer[0] for answer in answers if answer[0]), None)


def _superseded(run: RunDir, manifest: Manifest) -> str | None:
    """A checkpoint that an old attempt committed after a later one had started from an older one."""
    for attempt in range(manifest.attempt + 1, run.last_attempt() + 1):
        resumed = next(read_json_lines(run.attempt(attempt) / RESUMED), None)
        if resumed and resumed["step"] < manifest.step:
            return f"superseded: attempt {attempt} went on from step {resumed['step']}"
    return None


def _other_model(folder: Path, manifest: Manifest, model: dict[str, Any]) -> str | None:
    keys = sorted(set(model) | set(manifest.model))
    differ = [
        f"{key} {manifest.model.get(key)!r} there, {model.get(key)!r} here"
        for key in keys
        if manifest.model.get(key) != model.get(key)
    ]
    if not differ:
        return None
    return f"{folder} is of another model: {', '.join(differ)}; mend the recipe or start a new run"


def _other_keys(folder: Path, manifest: Manifest, wanted: set[str]) -> str | None:
    stored = set(manifest.tensors)
    missing = sorted(name for name in wanted - stored if not name.startswith(RNG))
    extra = sorted(name for name in stored - wanted if not name.startswith(RNG))
    if not missing and not extra:
        return None
    parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"has also {_some(extra)}"] * bool(extra)
    return f"{folder}: {' and '.join(parts)}; it was written by another version or model"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _verify_files(folder: Path, manifest: Manifest) -> None:
    """Sizes of all files, and the frames of this rank's share of them."""
    ranges = manifest.data_ranges()
    world, rank = ranks_in_job(), rank_of_job()
    for index, file in enumerate(manifest.files):
        path = folder / file.name
        size = path.stat().st_size
        if size != file.size:
            raise Damaged(f"{path}: {size} bytes, {file.size} were written")
        if index % world == rank:
            fd = os.open(path, os.O_RDONLY)
            try:
                if hash_frame(fd, size, ranges[index]) != file.frame_hash:
                    raise Damaged(f"{path}: bytes outside the tensors have changed")
            finally:
                os.close(fd)


def _load(folder: Path, manifest: Manifest, local: LocalTensor) -> None:
    tensor = manifest.tensors.get(local.name)
    if tensor is None or not local.data.numel():
        return
    if tuple(tensor.shape) != local.shape:
        raise Damaged(f"{local.name}: shape {tensor.shape} there, {list(local.shape)} here")
    filled = 0
    for piece, shared in _touched(tensor, local):
        values = _read_piece(folder / manifest.files[piece.file].name, local.name, tensor, piece, shared)
        local.data[within(shared, local.box)].copy_(values[within(shared, tuple(piece.box))])
        filled += volume(shared)
    if filled != volume(local.box):
        raise Damaged(f"{local.name}: only {filled} of {volume(local.box)} elements are stored")


def _touched(tensor: Tensor, local: LocalTensor) -> Iterator[tuple[Piece, tuple[tuple[int, int], ...]]]:
    for piece in tensor.pieces:
        shared = overlap(tuple(piece.box), local.box)
        if shared is not None:
            yield piece, shared


def _read_piece(
    path: Path, name: str, tensor: Tensor, piece: Piece, shared: tuple[tuple[int, int], ...]
) -> torch.Tensor:
    """The piece as a tensor in which only the blocks around ``shared`` have been read and verified."""
    dtype = DTYPES[tensor.dtype]
    box = tuple(piece.box)
    shape = lengths(box)
    total = tensor.bytes_of(piece)
    buffer = np.empty(total, dtype=np.uint8)
    first, last = _byte_span(shared, box, dtype.itemsize)
    fd = os.open(path, os.O_RDONLY)
    try:
        for index in range(first // HASH_BLOCK, -(-last // HASH_BLOCK)):
            start, stop = index * HASH_BLOCK, min((index + 1) * HASH_BLOCK, total)
            block = os.pread(fd, stop - start, piece.offset + start)
            if block_hash(block) != piece.hashes[index]:
                raise Damaged(
                    f"{path}: {name}: bytes {piece.offset + start} to {piece.offset + stop} have changed"
                )
            buffer[start:stop] = np.frombuffer(block, dtype=np.uint8)
    finally:
        os.close(fd)
    return torch.from_numpy(buffer).view(dtype).reshape(shape)


def _byte_span(
    shared: tuple[tuple[int, int], ...], box: tuple[tuple[int, int], ...], width: int
) -> tuple[int, int]:
    """From the first to behind the last byte of ``shared`` in the row-major piece ``box``."""
    shape = lengths(box)
    index = within(shared, box)
    first = last = 0
    for part, length in zip(index, shape, strict=True):
        first, last = first * length + part.start, last * length + part.stop - 1
    return first * width, (last + 1) * width
