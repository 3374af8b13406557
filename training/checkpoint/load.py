"""Finding the newest checkpoint that verifies, and loading it at today's layout."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpcrun.blocks import (
    BlockReader,
    Box,
    Damaged,
    block_span,
    element_span,
    lengths,
    open_blocks,
    touched,
    volume,
    within,
)
from hpcrun.errors import UserError
from hpcrun.manifest import (
    Manifest,
    ManifestError,
    Piece,
    Tensor,
    checkpoints_newest_first,
    hash_frame,
    read_manifest,
    superseder,
)
from hpcrun.records import RunDir, resumed_steps
from training.checkpoint.local import DTYPES, LocalTensor, dtype_name
from training.parallel.exchange import broadcast_json, gather_json, rank_of_job, ranks_in_job

RNG, WEIGHTS = "rng/", "model/"


@dataclass(frozen=True)
class Restored:
    """What was loaded."""

    folder: Path
    step: int
    layout: dict[str, int]
    """That of the ranks which wrote it."""
    state: dict[str, Any]
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """Newer checkpoints that were passed over: (folder name, reason)."""


def restore(run: RunDir, model: dict[str, Any], tensors: list[LocalTensor]) -> Restored | None:
    """Fill ``tensors`` from the newest checkpoint that verifies; None when there is none. Collective.

    Any layout reads any other: a rank reads only the blocks that its boxes touch. Rank 0 decides which
    checkpoint it is. Random-number states of ranks that did not exist then stay as they are.

    Raises:
        UserError: the checkpoint is of another model, or lacks tensors, or has more; or there are
            checkpoints, and none can be loaded.
    """
    rejected: list[tuple[str, str]] = []
    wanted = {name for names in gather_json([tensor.name for tensor in tensors]) for name in names}
    listed = broadcast_json(_candidates(run) if rank_of_job() == 0 else None)
    if "problem" in listed:
        raise UserError(listed["problem"])
    for name in listed["names"]:
        folder = run.checkpoints / name
        told = broadcast_json(_manifest(run, folder) if rank_of_job() == 0 else None)
        reason = told.get("problem")
        if reason is None:
            manifest = Manifest.model_validate(told["manifest"])
            if mistake := _other_model(folder, manifest, model) or _other_keys(folder, manifest, wanted):
                raise UserError(mistake)
            reason = next(filter(None, gather_json(_fill(folder, manifest, tensors))), None)
            if reason is None:
                return Restored(folder, manifest.step, manifest.layout, manifest.state, rejected)
        rejected.append((name, reason))
    if rejected:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise UserError(
            f"{run.checkpoints}: no checkpoint can be loaded ({reasons}); remove them to start anew"
        )
    return None


def newest_step(run: RunDir) -> int:
    """Of the checkpoints on disk that count; 0 when there is none, or nobody can tell."""
    starts = resumed_steps(run)
    with suppress(OSError):
        for step, attempt, _ in checkpoints_newest_first(run):
            if not superseder(starts, step, attempt):
                return step
    return 0


def begin_with(folder: Path, model: dict[str, Any], tensors: list[LocalTensor]) -> None:
    """Fill the weights among ``tensors`` from the checkpoint in ``folder``, and nothing else. Collective.

    Raises:
        UserError: it is damaged, of another model, or lacks a tensor.
    """
    weights = [tensor for tensor in tensors if tensor.name.startswith(WEIGHTS)]
    told = broadcast_json(_manifest(None, folder) if rank_of_job() == 0 else None)
    if "problem" in told:
        raise UserError(f"checkpoint.init: {told['problem']}")
    manifest = Manifest.model_validate(told["manifest"])
    wanted = {name for names in gather_json([tensor.name for tensor in weights]) for name in names}
    missing = sorted(wanted - set(manifest.tensors))
    problem = _other_model(folder, manifest, model)
    if not problem and missing:
        problem = f"{folder}: lacks {_some(missing)}"
    problem = problem or next(filter(None, gather_json(_fill(folder, manifest, weights))), None)
    if problem:
        raise UserError(f"checkpoint.init: {problem}")


def _candidates(run: RunDir) -> dict[str, Any]:
    """Rank 0's list of committed checkpoints, newest first. Other ranks' view of the disk may lag behind."""
    try:
        return {"names": [path.name for _, _, path in checkpoints_newest_first(run)]}
    except OSError as error:
        return {"problem": f"{run.checkpoints}: cannot be read: {error.strerror}; nothing was started anew"}


def _manifest(run: RunDir | None, folder: Path) -> dict[str, Any]:
    """Rank 0's manifest of a checkpoint, or why it is none to go on from. The others verify files by it."""
    try:
        manifest = read_manifest(folder)
        reason = _superseded(run, manifest) if run else None
    except (ManifestError, OSError) as error:
        reason = str(error)
    return {"problem": reason} if reason else {"manifest": manifest.model_dump()}


def _fill(folder: Path, manifest: Manifest, tensors: list[LocalTensor]) -> str | None:
    """Load this rank's tensors; why that cannot be, or None."""
    try:
        _verify_files(folder, manifest)
        with open_blocks(folder, manifest) as reader:
            for tensor in tensors:
                _load(reader, manifest, tensor)
            reader.settle()
    except Damaged as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    return None


def _superseded(run: RunDir, manifest: Manifest) -> str | None:
    """A checkpoint that an old attempt committed after a later one had started from an older one."""
    starts = resumed_steps(run)
    later = superseder(starts, manifest.step, manifest.attempt)
    return f"superseded: attempt {later} went on from step {starts[later]}" if later else None


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


def _load(reader: BlockReader, manifest: Manifest, local: LocalTensor) -> None:
    tensor = manifest.tensors.get(local.name)
    if tensor is None or not local.data.numel():
        return
    if tuple(tensor.shape) != local.shape:
        raise Damaged(f"{local.name}: shape {tensor.shape} there, {list(local.shape)} here")
    filled = 0
    for piece, shared in touched(tensor, local.box):
        if not _straight(reader, tensor, piece, local, shared):
            values = _read_piece(reader, local.name, tensor, piece, shared)
            local.data[within(shared, local.box)].copy_(values)
        filled += volume(shared)
    if filled != volume(local.box):
        raise Damaged(f"{local.name}: only {filled} of {volume(local.box)} elements are stored")


def _straight(reader: BlockReader, tensor: Tensor, piece: Piece, local: LocalTensor, shared: Box) -> bool:
    """Begin to read a piece that lies here as it does in the file, without a copy; False if it does not."""
    data = local.data
    alike = data.device.type == "cpu" and data.is_contiguous() and tensor.dtype == dtype_name(data)
    if not alike or shared != tuple(piece.box):
        return False
    first, last = element_span(shared, local.box)
    if last - first != volume(shared):
        return False
    target = data.detach().view(-1)[first:last].view(torch.uint8)
    reader.begin(local.name, piece, 0, target.numpy().data)
    return True


def _read_piece(reader: BlockReader, name: str, tensor: Tensor, piece: Piece, shared: Box) -> torch.Tensor:
    """The values of ``shared``; only the blocks around them are read and verified."""
    dtype = DTYPES[tensor.dtype]
    box = tuple(piece.box)
    first, last = element_span(shared, box)
    width = dtype.itemsize
    start, stop = block_span(first * width, last * width, tensor.bytes_of(piece))
    buffer = torch.empty(stop - start, dtype=torch.uint8)
    reader.read(name, piece, start, buffer.numpy().data)
    strides = [math.prod(lengths(box)[axis + 1 :]) for axis in range(len(box))]
    return buffer.view(dtype).as_strided(lengths(shared), strides, first - start // width)
