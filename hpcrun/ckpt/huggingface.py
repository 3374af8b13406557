"""Weights to and from Hugging Face's safetensors files, whatever layout wrote the checkpoint."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcrun.blocks import BlockReader, Box, open_blocks
from hpcrun.ckpt.families import Match, config_of, family_of, matches, model_of
from hpcrun.ckpt.foreign import canonical_shape, write_weights
from hpcrun.ckpt.numbers import READ_AS, from_float32, to_float32
from hpcrun.ckpt.safetensors import Entry, Stored, read_header, write_file
from hpcrun.ckpt.stream import chunks, in_blocks
from hpcrun.errors import UserError
from hpcrun.manifest import HASH_BLOCK, Manifest
from hpcrun.recipe import Model
from hpcrun.records import sync_folder
from hpcrun.shardfile import Part

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


def export_weights(source: Path, manifest: Manifest, target: Path, dtype: str, largest: int) -> list[str]:
    """Write a folder that transformers' ``from_pretrained`` loads; returns its files.

    Args:
        dtype: ``float32`` or ``bfloat16``.
        largest: bytes of one file; a larger tensor has a file of its own.

    Raises:
        UserError: ``target`` exists, transformers has no such model, or the disk refuses.
        Damaged: a block of ``source`` has changed.
    """
    model = Model.model_validate(manifest.model)
    family = family_of(model)
    if target.exists():
        raise UserError(f"{target}: exists already; choose another name")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        with open_blocks(source, manifest) as reader:
            entries = [_entry(reader, manifest, match, dtype) for match in matches(family, model)]
            _write_files(temporary, entries, largest)
        config = json.dumps(config_of(family, model, dtype), indent=2) + "\n"
        (temporary / CONFIG).write_text(config)
        sync_folder(temporary)
        temporary.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise UserError(f"{error.filename or target}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(path.name for path in target.iterdir())


def import_weights(source: Path, target: Path) -> Model:
    """Make a checkpoint of weights alone from such a folder; returns the recipe's ``model`` for it.

    Raises:
        UserError: not such a folder, a model that the trainer lacks, or a damaged file.
    """
    family, model = model_of(_config(source))
    stored = {one.name: one for path in _weight_files(source) for one in read_header(path)}
    parts: list[Part] = []
    for match in matches(family, model):
        found = stored.pop(match.theirs, None) or stored.pop(match.theirs.removeprefix("transformer."), None)
        if found is None:
            raise UserError(f"{source}: {match.theirs} is missing")
        parts += _parts(match, found, [canonical_shape(model, name) for name in match.ours])
    extra = [
        name for name in stored if not name.endswith((".attn.bias", ".masked_bias", "rotary_emb.inv_freq"))
    ]
    if model.tie_embeddings:
        extra = [name for name in extra if name != "lm_head.weight"]
    if extra:
        raise UserError(f"{source}: {extra[0]} has no place in a {family} model")
    write_weights(target, parts, model, "hf", source)
    return model


def _entry(reader: BlockReader, manifest: Manifest, match: Match, dtype: str) -> Entry:
    names = [f"model/{name}" for name in match.ours]
    missing = [name for name in names if name not in manifest.tensors]
    if missing:
        raise UserError(f"{reader.folder}: {missing[0]} is missing")
    shapes = [manifest.tensors[name].shape for name in names]
    shape = (sum(one[0] for one in shapes), *shapes[0][1:])
    if match.transposed:
        shape = (shape[1], shape[0])
    return Entry(
        match.theirs, dtype, shape, partial(_converted, reader, manifest, names, match.transposed, dtype)
    )


def _converted(
    reader: BlockReader, manifest: Manifest, names: list[str], transposed: bool, dtype: str
) -> Iterator[bytes]:
    """A tensor's bytes there. One that is transposed is held whole, the others by blocks."""
    held = []
    for name in names:
        tensor = manifest.tensors[name]
        box: Box = tuple((0, length) for length in tensor.shape)
        for chunk in chunks(reader, name, tensor, box):
            values = to_float32(np.frombuffer(chunk, READ_AS[tensor.dtype]), tensor.dtype)
            if transposed:
                held.append(values)
            else:
                yield from_float32(values, dtype).tobytes()
    if transposed:
        columns = manifest.tensors[names[0]].shape[1]
        turned = np.concatenate(held).reshape(-1, columns).T
        yield from_float32(np.ascontiguousarray(turned), dtype).tobytes()


def _write_files(folder: Path, entries: list[Entry], largest: int) -> None:
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(one.bytes for one in groups[-1]) + entry.bytes > largest:
            groups.append([])
        groups[-1].append(entry)
    if len(groups) == 1:
        write_file(folder / SINGLE, groups[0])
        return
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(folder / name, group)
        places |= {entry.name: name for entry in group}
    total = sum(entry.bytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _config(source: Path) -> dict[str, Any]:
    path = source / CONFIG
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a folder of transformers?") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: is no JSON object")
    return config


def _weight_files(source: Path) -> list[Path]:
    found = sorted(source.glob("*.safetensors"))
    if found:
        return found
    if list(source.glob("*.bin")):
        raise UserError(f"{source}: holds pickles (*.bin) only; save it with safe_serialization=True")
    raise UserError(f"{source}: holds no *.safetensors file")


def _parts(match: Match, stored: Stored, shapes: list[tuple[int, ...]]) -> Iterator[Part]:
    rows = sum(shape[0] for shape in shapes)
    expected = (shapes[0][1], rows) if match.transposed else (rows, *shapes[0][1:])
    if stored.shape != expected:
        raise UserError(f"{stored.path}: {stored.name}: shape {list(stored.shape)}, not {list(expected)}")
    first = 0
    for name, shape in zip(match.ours, shapes, strict=True):
        box: Box = tuple((0, length) for length in shape)
        read = partial(_read, stored, match.transposed, first, first + shape[0])
        yield Part(f"model/{name}", "float32", shape, box, read)
        first += shape[0]


def _read(stored: Stored, transposed: bool, first: int, last: int) -> Iterator[memoryview]:
    """Rows ``first`` to ``last`` here, in fp32; what is transposed is held whole."""
    return in_blocks(_values(stored, transposed, first, last))


def _values(stored: Stored, transposed: bool, first: int, last: int) -> Iterator[bytes]:
    if transposed:
        words = stored.rows(0, stored.shape[0])[:, first:last].T
        yield to_float32(words, stored.dtype).tobytes()
        return
    step = max(1, HASH_BLOCK // (4 * math.prod(stored.shape[1:])))
    for start in range(first, last, step):
        yield to_float32(stored.rows(start, min(start + step, last)), stored.dtype).tobytes()
