"""Checkpoints made without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcrun.blocks import Box, within
from hpcrun.manifest import MANIFEST, File, Manifest, Piece, Tensor, manifest_text
from hpcrun.records import RunDir, checkpoint_name
from hpcrun.shardfile import Part, write_shard

NAMES = {"float32": "float32", "float16": "float16", "uint16": "bfloat16", "uint8": "uint8", "int64": "int64"}
"""numpy's name of a dtype -> the one in a manifest; 16 bits without a sign stand for bfloat16."""


def make_checkpoint(
    run: RunDir,
    step: int,
    attempt: int,
    tensors: Mapping[str, np.ndarray],
    files: int = 1,
    axis: int = 0,
    **facts: Any,
) -> Path:
    """A committed checkpoint whose tensors are cut along ``axis`` over ``files`` files."""
    folder = run.checkpoints / checkpoint_name(step, attempt)
    folder.mkdir(parents=True)
    described: dict[str, Tensor] = {}
    written_files = []
    for index in range(files):
        parts = []
        for name, values in tensors.items():
            box = _share(values.shape, index, files, axis)
            if box is not None:
                origin: Box = tuple((0, length) for length in values.shape)
                data = np.ascontiguousarray(values[within(box, origin)]).tobytes()
                dtype = NAMES[values.dtype.name]
                parts.append(Part(name, dtype, values.shape, box, partial(_one, memoryview(data))))
        path = folder / f"rank{index:05d}.h5"
        written, size, frame = write_shard(path, parts)
        written_files.append(File(name=path.name, size=size, frame_hash=frame))
        for one in written:
            tensor = Tensor(dtype=one.part.dtype, shape=list(one.part.shape), pieces=[])
            pieces = described.setdefault(one.part.name, tensor).pieces
            pieces.append(Piece(file=index, offset=one.offset, box=list(one.part.box), hashes=one.hashes))
    manifest = Manifest(
        run=run.name,
        attempt=attempt,
        claim="claim",
        step=step,
        written=1e9,
        layout=facts.get("layout", {"tp": files}),
        model=facts.get("model", {"hidden": 4}),
        state={"step": step, **facts.get("state", {})},
        files=written_files,
        tensors=described,
    )
    (folder / MANIFEST).write_text(manifest_text(manifest))
    return folder


def _one(data: memoryview) -> list[memoryview]:
    return [data]


def _share(shape: tuple[int, ...], index: int, files: int, axis: int) -> Box | None:
    """Part ``index`` of a tensor; of one that cannot be cut all lies in the first file."""
    whole = [(0, length) for length in shape]
    if axis >= len(shape) or shape[axis] < files:
        return tuple(whole) if index == 0 else None
    edges = [shape[axis] * part // files for part in (index, index + 1)]
    whole[axis] = (edges[0], edges[1])
    return tuple(whole)
