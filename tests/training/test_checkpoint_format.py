"""A reader written from docs/checkpoint_format.md, with h5py and numpy alone, sees what the trainer sees."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xxhash

from hpcrun.recipe import Recipe
from hpcrun.records import RunDir
from tests.ranks import run_ranks
from tests.training.runs import recipe, train_on
from training.checkpoint.load import restore
from training.checkpoint.local import LocalTensor

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint_format.md"
NUMPY = {"float32": "<f4", "uint8": "u1"}
BLOCK = 4 << 20
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": True, "kv_heads": 2},
    "gpt2": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "biases": True}
    | {"tie_embeddings": True},
    "mixtral": {"moe": {"experts": 4, "shared_experts": 1, "dense_layers": 1}},
}


def manifest_of(folder: Path) -> dict[str, Any]:
    text = (folder / "manifest.json").read_bytes()
    body = text[text.index(b'"manifest":') + len(b'"manifest":') : text.rindex(b"}")]
    assert hashlib.sha256(body).hexdigest() == json.loads(text)["sha256"]
    found: dict[str, Any] = json.loads(body)
    return found


def by_offsets(folder: Path, manifest: dict[str, Any], name: str) -> np.ndarray:
    tensor = manifest["tensors"][name]
    dtype = np.dtype(NUMPY[tensor["dtype"]])
    whole = np.empty(tensor["shape"], dtype)
    for piece in tensor["pieces"]:
        shape = [stop - start for start, stop in piece["box"]]
        size = int(np.prod(shape)) * dtype.itemsize
        data = (folder / manifest["files"][piece["file"]]["name"]).read_bytes()
        data = data[piece["offset"] : piece["offset"] + size]
        hashes = [xxhash.xxh3_64_hexdigest(data[at : at + BLOCK]) for at in range(0, size, BLOCK)]
        assert hashes == piece["hashes"]
        index = tuple(slice(start, stop) for start, stop in piece["box"])
        whole[index] = np.frombuffer(data, dtype).reshape(shape)
    return whole


def by_h5py(folder: Path, name: str) -> np.ndarray:
    parts = []
    for path in folder.glob("*.h5"):
        with h5py.File(path, locking=False) as file:
            for box, dataset in file[name].items() if name in file else ():
                bounds = [tuple(map(int, one.split("-"))) for one in box.split(",")]
                parts.append((tuple(slice(*one) for one in bounds), dataset[:], dataset.attrs["whole_shape"]))
    whole = np.empty(parts[0][2], parts[0][1].dtype)
    for index, values, _ in parts:
        whole[index] = values
    return whole


def trained(tokens: Path, out: Path, model: dict[str, Any], **parallel: int) -> tuple[Recipe, Path]:
    wanted = recipe(tokens, model=model, parallel=parallel, train={"steps": 1})
    run_ranks(2 if parallel else 1, train_on, wanted, str(out))
    (folder,) = RunDir(out).checkpoints.iterdir()
    return wanted, folder


def test_a_foreign_reader_gets_the_same_bytes(tokens: Path, tmp_path: Path) -> None:
    wanted, folder = trained(tokens, tmp_path, MODELS["llama"], tp=2)
    manifest = manifest_of(folder)
    assert (manifest["format"], manifest["version"], manifest["step"]) == ("hpcrun-checkpoint", 1, 1)
    ours = [
        LocalTensor(
            name,
            tuple(tensor["shape"]),
            tuple((0, length) for length in tensor["shape"]),
            torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"])),
        )
        for name, tensor in manifest["tensors"].items()
    ]
    assert restore(RunDir(tmp_path), wanted.model.model_dump(), ours)
    assert any(len(tensor["pieces"]) > 1 for tensor in manifest["tensors"].values())
    for tensor in ours:
        expected = tensor.data.numpy().tobytes()
        assert by_offsets(folder, manifest, tensor.name).tobytes() == expected
        assert by_h5py(folder, tensor.name).tobytes() == expected


@pytest.mark.parametrize("family", MODELS)
def test_the_page_names_every_tensor(tokens: Path, tmp_path: Path, family: str) -> None:
    _, folder = trained(tokens, tmp_path, MODELS[family])
    names = {
        re.sub(r"layers\.\d+\.", "layers.<n>.", name.removeprefix("model/")).replace(".bias", ".weight")
        for name in manifest_of(folder)["tensors"]
        if name.startswith("model/")
    }
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([a-z0-9_.<>]+\.weight)`", row)}
    assert names <= told
