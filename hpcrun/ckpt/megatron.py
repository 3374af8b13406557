"""Weights from a checkpoint of Megatron-LM: one pickled file per tensor and pipeline rank.

Names of Megatron Core (``decoder.layers.0.self_attention.linear_qkv.weight``) and of the models before it
(``language_model.encoder.layers.0.self_attention.query_key_value.weight``, checkpoint version 3). The
rows of query, key and value lie together per group of query heads; each tensor rank has whole groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcrun.ckpt.foreign import Found, parts_of, write_weights
from hpcrun.ckpt.pickles import View
from hpcrun.ckpt.torchfile import TorchFile, TorchTensor, read_torch_file
from hpcrun.errors import UserError
from hpcrun.recipe import Model

_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?", re.ASCII)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)", re.ASCII)
_TRACKER = "latest_checkpointed_iteration.txt"
_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_states.pt")

_LEGACY = {
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "input_norm": "input_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms that Transformer Engine keeps in the matrix behind them."""
_PLAIN = {
    "input_layernorm": "attention_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
}
_COLUMNS = {"self_attention.linear_proj": "attention.o", "mlp.linear_fc2": "mlp.down"}

Shards = list[TorchTensor]


def import_megatron(source: Path, target: Path, model: Model) -> None:
    """Make a checkpoint of weights from one of Megatron-LM, with any tensor and pipeline parallel size.

    Raises:
        UserError: not such a folder, another model, or a pickle that asks for anything else.
    """
    shards = _shards(_iteration(source), model)
    found = dict(_canonical(shards, model))
    write_weights(target, parts_of(found, model, source), model, "megatron", source)


def _iteration(source: Path) -> Path:
    """The folder with the ranks' folders: ``source``, or that of the iteration its tracker names."""
    tracker = source / _TRACKER
    if not tracker.exists():
        return source
    word = tracker.read_text().strip()
    return source / (f"iter_{int(word):07d}" if word.isdigit() else word)


def _shards(folder: Path, model: Model) -> dict[str, Shards]:
    """Every tensor by its name, layers counted over all stages, with one part per tensor rank."""
    ranks: dict[int, dict[int, Path]] = {}
    for entry in sorted(folder.glob("mp_rank_*")) if folder.is_dir() else []:
        match = _RANK.fullmatch(entry.name)
        if match:
            file = next((entry / name for name in _FILES if (entry / name).exists()), None)
            if file is None:
                raise UserError(f"{entry}: holds none of {', '.join(_FILES)}")
            ranks.setdefault(int(match[2] or 0), {})[int(match[1])] = file
    if not ranks:
        raise UserError(f"{folder}: no mp_rank_* folders: not a checkpoint of Megatron-LM (torch)")
    found: dict[str, Shards] = {}
    first = 0
    for stage in sorted(ranks):
        files = [read_torch_file(ranks[stage][tp]) for tp in sorted(ranks[stage])]
        tensors = [dict(_tensors(file)) for file in files]
        layers = 0
        for name in tensors[0]:
            if any(name not in other for other in tensors):
                raise UserError(f"{files[0].path}: {name} is not in all of the stage's tensor ranks")
            match = _LAYER.fullmatch(name)
            if match:
                layers = max(layers, int(match[1]) + 1)
            key = f"layers.{first + int(match[1])}.{match[2]}" if match else name
            found.setdefault(key, [tensor[name] for tensor in tensors])
        first += layers
    if first != model.layers:
        raise UserError(f"{folder}: {first} layers, the recipe's model has {model.layers}")
    return found


def _tensors(file: TorchFile) -> Iterator[tuple[str, TorchTensor]]:
    """A rank's weights under the names of Megatron Core without ``decoder.``."""
    content = file.content
    if isinstance(content, dict) and "model0" in content:
        raise UserError(f"{file.path}: holds virtual pipeline stages; save it again without them")
    weights = content.get("model") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise UserError(f"{file.path}: holds no model")
    for name, view in _flat(weights):
        name = re.sub(r"^(language_model\.|module\.)+", "", name)
        name = re.sub(r"^(decoder|encoder|transformer)\.", "", name)
        for old, new in _LEGACY.items():
            name = re.sub(rf"(layers\.\d+\.){re.escape(old)}\.", rf"\g<1>{new}.", name)
        for old, new in _FUSED.items():
            name = name.replace(old, new)
        yield name, file.tensor(view, name)


def _flat(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, View]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, View):
            yield f"{prefix}{key}", value


def _canonical(shards: dict[str, Shards], model: Model) -> Iterator[tuple[str, Found]]:
    for name, parts in shards.items():
        if name == "embedding.word_embeddings.weight":
            yield "embedding.weight", _vocabulary(parts, model)
        elif name == "output_layer.weight":
            yield "head.weight", _vocabulary(parts, model)
        elif name == "embedding.position_embeddings.weight":
            yield "positions.weight", Found(parts[0].shape, parts[0].read)
        elif name.startswith(("final_layernorm.", "final_norm.")):
            yield f"norm.{name.partition('.')[2]}", Found(parts[0].shape, parts[0].read)
        elif match := _LAYER.fullmatch(name):
            for own, found in _of_layer(match[2], parts, model):
                yield f"layers.{match[1]}.{own}", found


def _of_layer(name: str, parts: Shards, model: Model) -> Iterator[tuple[str, Found]]:
    module, _, kind = name.rpartition(".")
    if module in _PLAIN:
        yield f"{_PLAIN[module]}.{kind}", Found(parts[0].shape, parts[0].read)
    elif module in _COLUMNS:
        whole = kind == "bias"
        shape = parts[0].shape if whole else (parts[0].shape[0], sum(part.shape[1] for part in parts))
        read = parts[0].read if whole else partial(_joined, parts, 1)
        yield f"{_COLUMNS[module]}.{kind}", Found(shape, read)
    elif module == "self_attention.linear_qkv":
        for part in "qkv":
            rows = (model.heads if part == "q" else model.kv) * model.head_size
            read = partial(_qkv, parts, part, model)
            yield f"attention.{part}.{kind}", Found((rows, *parts[0].shape[1:]), read)
    elif module == "mlp.linear_fc1":
        names = ("gate", "up") if model.activation == "swiglu" else ("up",)
        for index, part in enumerate(names):
            rows = sum(one.shape[0] for one in parts) // len(names)
            read = partial(_half, parts, index, len(names))
            yield f"mlp.{part}.{kind}", Found((rows, *parts[0].shape[1:]), read)


def _vocabulary(parts: Shards, model: Model) -> Found:
    """Rows over all tensor ranks without the padding at the end."""
    held = sum(part.shape[0] for part in parts)
    shape = (min(held, model.vocab), *parts[0].shape[1:])
    return Found(shape, lambda: _joined(parts, 0)[: model.vocab])


def _joined(parts: Shards, axis: int) -> np.ndarray:
    return np.concatenate([part.read() for part in parts], axis)


def _half(parts: Shards, index: int, count: int) -> np.ndarray:
    """Each tensor rank has its own gate above its own up."""
    return np.concatenate([np.split(part.read(), count)[index] for part in parts])


def _qkv(parts: Shards, wanted: str, model: Model) -> np.ndarray:
    """Per group: its query heads, one key head, one value head."""
    size, queries = model.head_size, model.heads // model.kv
    whole = _joined(parts, 0)
    groups = whole.reshape(model.kv, (queries + 2) * size, *whole.shape[1:])
    bounds = {"q": (0, queries), "k": (queries, queries + 1), "v": (queries + 1, queries + 2)}
    first, last = bounds[wanted]
    return groups[:, first * size : last * size].reshape(-1, *whole.shape[1:])
