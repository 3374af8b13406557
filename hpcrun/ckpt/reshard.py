"""A checkpoint written anew, its pieces cut as the ranks of another layout hold them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from hpcrun.blocks import BlockReader, Box, open_blocks
from hpcrun.ckpt.stream import chunks
from hpcrun.ckpt.write import write_checkpoint
from hpcrun.manifest import Manifest, Tensor
from hpcrun.shardfile import Part

_LAYER = re.compile(r"layers\.(\d+)\.")
_ROWS = re.compile(r"(attention\.[qkv]|(gate|up))\.(weight|bias)$|^(embedding|head)\.weight$")
_COLUMNS = re.compile(r"(attention\.o|down)\.weight$")


def reshard(source: Path, manifest: Manifest, target: Path, tp: int, pp: int) -> Manifest:
    """Write ``source`` to ``target`` as ``tp`` x ``pp`` files, bit for bit the same tensors.

    Generators are left out: they belong to the ranks of one layout. A tensor whose size ``tp`` does not
    divide stays whole.

    Raises:
        UserError: ``target`` exists, or the disk refuses.
        Damaged: a block of ``source`` has changed.
    """
    layers = 1 + max((_layer(name) for name in manifest.tensors), default=0)
    with open_blocks(source, manifest) as reader:
        files: list[list[Part]] = [[] for _ in range(tp * pp)]
        for name, tensor in manifest.tensors.items():
            if name.startswith("rng/"):
                continue
            stage = _stage(name, layers, pp)
            for index, box in enumerate(_boxes(name, tensor, tp)):
                files[stage * tp + index].append(_part(reader, name, tensor, box))
        return write_checkpoint(
            target,
            files,
            run=manifest.run,
            attempt=manifest.attempt,
            claim=manifest.claim,
            step=manifest.step,
            layout={"tp": tp, "pp": pp},
            model=manifest.model,
            state=manifest.state,
        )


def _part(reader: BlockReader, name: str, tensor: Tensor, box: Box) -> Part:
    read = partial(chunks, reader, name, tensor, box)
    return Part(name, tensor.dtype, tuple(tensor.shape), box, read)


def _layer(name: str) -> int:
    match = _LAYER.search(name)
    return int(match[1]) if match else 0


def _stage(name: str, layers: int, pp: int) -> int:
    """The pipeline rank of a tensor: layers in equal runs, the last norm and the head at the end."""
    if _LAYER.search(name):
        return _layer(name) * pp // layers
    return pp - 1 if name.split("/", 1)[1].startswith(("norm.", "head.")) else 0


def _boxes(name: str, tensor: Tensor, tp: int) -> list[Box]:
    """One box per tensor rank that holds part of it; experts are cut like the matrices that they are."""
    whole: Box = tuple((0, length) for length in tensor.shape)
    own = name.split("/", 1)[1]
    if _ROWS.search(own):
        axis = len(whole) - 2 if own.endswith(".weight") else 0
    elif _COLUMNS.search(own):
        axis = len(whole) - 1
    else:
        return [whole]
    length = tensor.shape[axis]
    if length % tp:
        return [whole]
    step = length // tp
    return [(*whole[:axis], (at, at + step), *whole[axis + 1 :]) for at in range(0, length, step)]
