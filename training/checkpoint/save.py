"""Saving a checkpoint, together, or not at all."""

from __future__ import annotations

import errno
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.manifest import MANIFEST, File, Manifest, Piece, Tensor, checkpoints_newest_first, manifest_text
from hpcrun.records import (
    RunDir,
    checkpoint_name,
    parse_checkpoint_name,
    read_claim,
    replace_text,
    sync_folder,
)
from hpcrun.units import show_bytes
from training.checkpoint.local import LocalTensor, dtype_name, overlap, volume
from training.checkpoint.shardfile import write_shard
from training.parallel.exchange import broadcast_json, gather_json, rank_of_job


class SaveError(Exception):
    """No checkpoint was made; older ones are untouched. Raised on every rank alike."""


class Superseded(SaveError):
    """A later attempt holds the run: this one must not write any more."""


@dataclass(frozen=True)
class SaveReport:
    """A checkpoint that has been committed."""

    folder: Path
    bytes: int
    seconds: float


def save_checkpoint(
    run: RunDir,
    *,
    step: int,
    attempt: int,
    claim: str,
    layout: dict[str, int],
    model: dict[str, Any],
    state: dict[str, Any],
    tensors: list[LocalTensor],
) -> SaveReport:
    """Write this rank's share and commit when every rank's is on disk. Collective.

    A tensor that several ranks hold is written by one of them. ``claim`` matters on
    rank 0 only, which writes the manifest.

    Raises:
        Superseded: another attempt has been claimed meanwhile.
        SaveError: a rank could not write; says which, where and why.
    """
    began = time.monotonic()
    folder = run.checkpoints / checkpoint_name(step, attempt)
    leader = rank_of_job() == 0
    tensors = [tensor for tensor in tensors if tensor.bytes]
    problem = broadcast_json(_prepare(run, folder, attempt, claim) if leader else None)
    if problem:
        _raise(problem)
    report = _write_share(folder, _mine(tensors))
    reports = gather_json(report)
    outcome: dict[str, Any] = {}
    if leader:
        try:
            outcome = _commit(run, folder, reports, step, attempt, claim, layout, model, state)
        except OSError as error:
            outcome = {"problem": f"rank 0 on {socket.gethostname()}: {_reason(folder, error)}"}
        if "problem" in outcome:
            shutil.rmtree(folder, ignore_errors=True)
    outcome = broadcast_json(outcome)
    if "problem" in outcome:
        _raise(outcome["problem"])
    return SaveReport(folder, outcome["bytes"], time.monotonic() - began)


def prune_checkpoints(run: RunDir, keep: int | None, attempt: int) -> list[str]:
    """Remove all but the ``keep`` newest, and what earlier attempts left half-written. On one rank.

    The manifest goes first: a folder without one is no checkpoint.
    """
    newest = [path for _, _, path in checkpoints_newest_first(run)]
    doomed = newest[keep:] if keep is not None else []
    for entry in run.checkpoints.iterdir():
        parsed = parse_checkpoint_name(entry.name)
        if parsed and parsed[1] < attempt and not (entry / MANIFEST).exists():
            doomed.append(entry)
    for folder in doomed:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in doomed]


def _prepare(run: RunDir, folder: Path, attempt: int, claim: str) -> str | None:
    """Make the folder; returns what is in the way, or None."""
    if problem := _not_ours(run, attempt, claim):
        return problem
    if (folder / MANIFEST).exists():
        return f"{folder} is committed already; a step is saved once per attempt"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        run.checkpoints.mkdir(mode=0o750, exist_ok=True)
        folder.mkdir(mode=0o750)
    except OSError as error:
        return f"rank 0 on {socket.gethostname()}: {_reason(folder, error)}"
    return None


def _not_ours(run: RunDir, attempt: int, claim: str) -> str | None:
    newest = run.last_attempt()
    if newest > attempt or read_claim(run, attempt).get("claim") != claim:
        return f"superseded: attempt {newest} holds {run.name} now, not this attempt {attempt}"
    return None


def _mine(tensors: list[LocalTensor]) -> list[LocalTensor]:
    """Of each tensor that several ranks hold, one owner writes: the one with the least to write so far."""
    offers = gather_json([[tensor.name, list(map(list, tensor.box)), tensor.bytes] for tensor in tensors])
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, offered in enumerate(offers):
        for name, box, size in offered:
            key = f"{name}{box}"
            holders.setdefault(key, []).append(rank)
            sizes[key] = size
    load = [0] * len(offers)
    owner = {}
    for key, ranks in sorted(holders.items(), key=lambda item: (len(item[1]), item[0])):
        owner[key] = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner[key]] += sizes[key]
    rank = rank_of_job()
    return [tensor for tensor in tensors if owner[f"{tensor.name}{list(map(list, tensor.box))}"] == rank]


def _write_share(folder: Path, tensors: list[LocalTensor]) -> dict[str, Any]:
    """Write this rank's file; a failure is reported, not raised, so that no rank waits for another."""
    if not tensors:
        return {"pieces": []}
    rank = rank_of_job()
    path = folder / f"rank{rank:05d}.h5"
    try:
        pieces, size, frame = write_shard(path, tensors)
    except OSError as error:
        return {"problem": f"rank {rank} on {socket.gethostname()}: {_reason(path, error)}"}
    described = []
    for piece in pieces:
        tensor = piece.tensor
        place = (tensor.box, piece.offset, piece.hashes)
        described.append((tensor.name, dtype_name(tensor.data), tensor.shape, *place))
    return {"file": path.name, "size": size, "frame": frame, "pieces": described}


def _commit(
    run: RunDir,
    folder: Path,
    reports: list[dict[str, Any]],
    step: int,
    attempt: int,
    claim: str,
    layout: dict[str, int],
    model: dict[str, Any],
    state: dict[str, Any],
) -> dict[str, Any]:
    problems = [report["problem"] for report in reports if "problem" in report]
    if problems:
        return {"problem": problems[0]}
    files: list[File] = []
    tensors: dict[str, Tensor] = {}
    for report in reports:
        if "file" in report:
            files.append(File(name=report["file"], size=report["size"], frame_hash=report["frame"]))
        for name, dtype, shape, box, offset, hashes in report["pieces"]:
            tensor = tensors.setdefault(name, Tensor(dtype=dtype, shape=shape, pieces=[]))
            tensor.pieces.append(Piece(file=len(files) - 1, offset=offset, box=box, hashes=hashes))
    for name, tensor in tensors.items():
        if problem := coverage_problem(name, tensor):
            return {"problem": problem}
    sync_folder(folder)
    if problem := _not_ours(run, attempt, claim):
        return {"problem": problem}
    manifest = Manifest(
        run=run.name,
        attempt=attempt,
        claim=claim,
        step=step,
        written=time.time(),
        layout=layout,
        model=model,
        state=state,
        files=files,
        tensors=tensors,
    )
    replace_text(folder / MANIFEST, manifest_text(manifest))
    sync_folder(run.checkpoints)
    return {"bytes": manifest.bytes}


def coverage_problem(name: str, tensor: Tensor) -> str | None:
    """What is wrong with the pieces of a tensor: an overlap or a hole; None when they tile it."""
    boxes = [tuple(piece.box) for piece in tensor.pieces]
    for i, box in enumerate(boxes):
        if any(box and overlap(box, other) for other in boxes[:i]):
            return f"{name}: two ranks hold overlapping parts {box}"
    whole = volume(tuple((0, length) for length in tensor.shape))
    held = sum(volume(box) for box in boxes)
    return None if held == whole else f"{name}: the ranks hold {held} of {whole} elements"


def _reason(path: Path, error: OSError) -> str:
    text = f"{path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent if path.parent.exists() else "/").free
        text += f" ({show_bytes(free)} free): delete old checkpoints, or lower checkpoint.keep"
    return text


def _raise(problem: str) -> None:
    raise Superseded(problem) if problem.startswith("superseded: ") else SaveError(problem)
