"""What one rank and the committing rank do for a checkpoint; ``saver`` decides when."""

from __future__ import annotations

import errno
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py  # noqa: F401 - here, so that the warm parent has it before it forks

from hpcrun.blocks import overlap, volume
from hpcrun.manifest import MANIFEST, File, Manifest, Piece, Tensor, manifest_text
from hpcrun.records import RunDir, checkpoint_name, read_claim, replace_text, sync_folder
from hpcrun.shardfile import write_shard
from hpcrun.units import show_bytes
from training.checkpoint.local import LocalTensor, part
from training.parallel.exchange import gather_json, rank_of_job

SUPERSEDED = "superseded: "


@dataclass(frozen=True)
class Facts:
    """What a manifest says of a checkpoint besides where its bytes lie.

    ``claim`` matters on rank 0 only, which writes the manifest.
    """

    run: RunDir
    step: int
    attempt: int
    claim: str
    layout: dict[str, int]
    model: dict[str, Any]
    state: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.run.checkpoints / checkpoint_name(self.step, self.attempt)


def owned(tensors: list[LocalTensor]) -> list[LocalTensor]:
    """Those of ``tensors`` that this rank writes. Collective.

    Of each that several ranks hold, one owner writes: the one with the least to write so far.
    """
    tensors = [tensor for tensor in tensors if tensor.bytes]
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


def prepare(facts: Facts) -> str | None:
    """Make the folder, on rank 0; returns what is in the way, or None."""
    folder = facts.folder
    if problem := _not_ours(facts):
        return problem
    if (folder / MANIFEST).exists():
        return f"{folder} is committed already; a step is saved once per attempt"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        facts.run.checkpoints.mkdir(mode=0o750, exist_ok=True)
        folder.mkdir(mode=0o750)
    except OSError as error:
        return told(folder, error)
    return None


def write_share(folder: Path, tensors: list[LocalTensor]) -> dict[str, Any]:
    """Write this rank's file; a failure is reported, not raised, so that no rank waits for another."""
    if not tensors:
        return {"pieces": []}
    path = folder / f"rank{rank_of_job():05d}.h5"
    try:
        pieces, size, frame = write_shard(path, [part(tensor) for tensor in tensors])
    except OSError as error:
        return {"problem": told(path, error)}
    described = [
        (piece.part.name, piece.part.dtype, piece.part.shape, piece.part.box, piece.offset, piece.hashes)
        for piece in pieces
    ]
    return {"file": path.name, "size": size, "frame": frame, "pieces": described}


def commit(facts: Facts, reports: list[dict[str, Any]]) -> int:
    """Write the manifest of what all ranks have written, on rank 0; returns the checkpoint's bytes.

    Raises:
        ValueError: the ranks' parts do not make whole tensors, or another attempt holds the run.
        OSError: the disk.
    """
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
            raise ValueError(problem)
    if problem := _not_ours(facts):
        raise ValueError(problem)
    manifest = Manifest(
        run=facts.run.name,
        attempt=facts.attempt,
        claim=facts.claim,
        step=facts.step,
        written=time.time(),
        layout=facts.layout,
        model=facts.model,
        state=facts.state,
        files=files,
        tensors=tensors,
    )
    replace_text(facts.folder / MANIFEST, manifest_text(manifest))
    sync_folder(facts.run.checkpoints)
    return manifest.bytes


def told(path: Path, error: OSError) -> str:
    """An error of the disk for a person: which rank, where, what, and what to do."""
    text = f"rank {rank_of_job()} on {socket.gethostname()}: {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent if path.parent.exists() else "/").free
        text += f" ({show_bytes(free)} free): delete old checkpoints, or lower checkpoint.keep"
    return text


def coverage_problem(name: str, tensor: Tensor) -> str | None:
    """What is wrong with the pieces of a tensor: an overlap or a hole; None when they tile it."""
    boxes = [tuple(piece.box) for piece in tensor.pieces]
    for i, box in enumerate(boxes):
        if any(box and overlap(box, other) for other in boxes[:i]):
            return f"{name}: two ranks hold overlapping parts {box}"
    whole = volume(tuple((0, length) for length in tensor.shape))
    held = sum(volume(box) for box in boxes)
    return None if held == whole else f"{name}: the ranks hold {held} of {whole} elements"


def _not_ours(facts: Facts) -> str | None:
    newest = facts.run.last_attempt()
    if newest > facts.attempt or read_claim(facts.run, facts.attempt).get("claim") != facts.claim:
        return f"{SUPERSEDED}attempt {newest} holds {facts.run.name} now, not this attempt {facts.attempt}"
    return None
