"""Other layouts and other formats hold the same weights, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from hpcrun.ckpt.diff import compare
from hpcrun.ckpt.families import family_of
from hpcrun.ckpt.foreign import canonical_names, canonical_shape
from hpcrun.ckpt.huggingface import export_weights, import_weights
from hpcrun.ckpt.numbers import from_float32, to_float32
from hpcrun.ckpt.reshard import reshard
from hpcrun.ckpt.safetensors import Entry, read_header, write_file
from hpcrun.cli.ckpt import command
from hpcrun.config import parse_yaml
from hpcrun.errors import UserError
from hpcrun.manifest import MANIFEST, read_manifest
from hpcrun.recipe import Model, recipe_from
from hpcrun.records import RunDir
from tests.hpcrun.made_checkpoints import make_checkpoint

SMALL = {"layers": 3, "hidden": 16, "heads": 4, "sequence": 8, "vocab": 20}
LLAMA = Model.model_validate(SMALL | {"kv_heads": 2, "ffn_hidden": 24})
MODELS = {
    "llama": LLAMA,
    "tied": LLAMA.model_copy(update={"tie_embeddings": True, "biases": True}),
    "qwen3": LLAMA.model_copy(update={"qk_norm": True, "head_dim": 8}),
    "scaled": Model.model_validate(SMALL | {"rope_scaling": {"kind": "llama3", "factor": 8.0}}),
    "gpt2": Model.model_validate(
        SMALL | {"norm": "layernorm", "activation": "gelu", "positions": "learned", "biases": True}
        | {"tie_embeddings": True}
    ),
}  # fmt: skip


def weights(model: Model) -> dict[str, np.ndarray]:
    """Random ones of every tensor of a model."""
    generator = np.random.default_rng(5)
    return {
        f"model/{name}": generator.standard_normal(canonical_shape(model, name), "f4")
        for name in canonical_names(model)
    }


def made(folder: Path, model: Model, files: int = 1, axis: int = 0, **more: np.ndarray) -> Path:
    tensors = weights(model) | more
    return make_checkpoint(RunDir(folder), 7, 1, tensors, files, axis, model=model.model_dump())


def invoke(*words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 3), (4, 2), (3, 1)])
def test_a_resharded_checkpoint_holds_the_same(tmp_path: Path, tp: int, pp: int) -> None:
    noise = {"rng/rank00000/torch": np.arange(9, dtype="u1"), "exp_avg/norm.weight": np.ones(16, "f4")}
    source = made(tmp_path / "run", LLAMA, files=3, axis=1, **noise)
    target = tmp_path / "target"
    assert invoke("reshard", source, target, "--tp", tp, "--pp", pp).return_value is None
    before, after = read_manifest(source), read_manifest(target)
    found = compare(source, before, target, after)
    assert found.only_first == ["rng/rank00000/torch"]
    assert not (found.only_second or found.shapes or found.values)
    assert (after.step, after.state, after.model) == (before.step, before.state, before.model)
    assert invoke("verify", "--deep", target).return_value == 0
    boxes = [piece.box for piece in after.tensors["model/layers.1.attention.q.weight"].pieces]
    assert len(boxes) == (tp if tp != 3 else 1)
    down = after.tensors["model/layers.2.mlp.down.weight"].pieces
    assert {piece.file // (len(after.files) // pp) for piece in down} == {pp - 1}
    assert all(piece.box[0] == (0, 16) for piece in down)


def test_a_target_that_exists_is_not_touched(tmp_path: Path) -> None:
    source = made(tmp_path / "run", LLAMA)
    for words in (("reshard",), ("export", "--to", "hf")):
        with pytest.raises(UserError, match="exists already"):
            raise invoke(*words, source, source).exception or AssertionError
    assert invoke("verify", "--deep", source).return_value == 0


def test_a_damaged_source_leaves_nothing_behind(tmp_path: Path) -> None:
    source = made(tmp_path / "run", LLAMA)
    piece = read_manifest(source).tensors["model/layers.1.mlp.up.weight"].pieces[0]
    data = bytearray((source / "rank00000.h5").read_bytes())
    data[piece.offset + 3] ^= 1
    (source / "rank00000.h5").write_bytes(data)
    for words in (("reshard",), ("export", "--to", "hf")):
        with pytest.raises(
            UserError, match=r"layers.1.mlp.up.weight: block 0: bytes \d+ to \d+ have changed"
        ):
            raise invoke(*words, source, tmp_path / "target").exception or AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_memory_stays_small_whatever_the_size(tmp_path: Path) -> None:
    """A tensor of 320 MB, cut by columns, is resharded within 96 MiB more than an idle process has."""
    big = {"model/layers.0.mlp.down.weight": np.zeros((20_000, 4_000), "f4")}
    source = make_checkpoint(RunDir(tmp_path / "run"), 1, 1, big, files=2, axis=1)
    script = (
        "import re, sys, h5py\n"
        "from pathlib import Path\n"
        "from hpcrun.ckpt.reshard import reshard\n"
        "from hpcrun.manifest import read_manifest\n"
        "used = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "before, source = used(), Path(sys.argv[1])\n"
        "reshard(source, read_manifest(source), Path(sys.argv[2]), 4, 1)\n"
        "print(used() - before)\n"
    )
    words = [sys.executable, "-c", script, str(source), str(tmp_path / "target")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 96 * 1024


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_from_hugging_face_bit_for_bit(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    source = made(tmp_path / "run", model)
    invoke("export", "--to", "hf", source, tmp_path / "hf", "--max-shard-size", "2KB")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        path.name for path in (tmp_path / "hf").glob("*.safetensors")
    }
    done = invoke("import", "--from", "hf", tmp_path / "hf", tmp_path / "back")
    assert done.exception is None
    before, after = read_manifest(source), read_manifest(tmp_path / "back")
    found = compare(source, before, tmp_path / "back", after)
    assert not (found.only_first or found.only_second or found.shapes or found.values)
    recipe = recipe_from(parse_yaml(done.output, "printed"), (), tmp_path)
    assert recipe.checkpoint.init == str(tmp_path / "back")
    assert recipe.model.model_dump() == after.model
    assert {key for key in after.model if after.model[key] != model.model_dump()[key]} <= {
        "head_dim", "ffn_hidden", "kv_heads", "dropout"
    }  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1])
def test_the_same_bytes_are_exported_whatever_the_layout(tmp_path: Path, axis: int) -> None:
    """Field report: export-from-tp-shards."""
    for name in ("llama", "gpt2"):
        exported = []
        for files in (1, 4):
            source = made(tmp_path / f"{name}{files}", MODELS[name], files, axis)
            target = tmp_path / f"{name}{files}-hf"
            export_weights(source, read_manifest(source), target, "bfloat16", 1 << 30)
            exported.append((target / "model.safetensors").read_bytes())
        assert exported[0] == exported[1]


def test_what_transformers_has_no_model_for_is_refused_by_key(tmp_path: Path) -> None:
    odd: dict[str, dict[str, Any]] = {
        r"model\.moe": {"moe": {"experts": 4}},
        r"model\.kv_heads": MODELS["gpt2"].model_dump() | {"kv_heads": 2, "rope_scaling": None},
        r"norm rmsnorm, activation gelu": {"activation": "gelu"},
    }
    for words, changed in odd.items():
        with pytest.raises(UserError, match=words):
            family_of(Model.model_validate(SMALL | changed))


def test_rounding_to_bfloat16_is_to_the_nearest_even() -> None:
    import torch

    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    values = bits.view("f4")
    ours, theirs = from_float32(values, "bfloat16"), torch.from_numpy(values.copy()).bfloat16()
    finite = ~np.isnan(values)
    assert np.array_equal(ours[finite], theirs.view(torch.int16).numpy().view("u2")[finite])
    assert np.isnan(to_float32(ours[~finite], "bfloat16")).all()


def write_safetensors(path: Path, **tensors: np.ndarray) -> None:
    write_file(
        path, [Entry(name, "float32", one.shape, partial(_bytes, one)) for name, one in tensors.items()]
    )


def _bytes(values: np.ndarray) -> list[bytes]:
    return [values.tobytes()]


def test_safetensors_are_what_the_library_writes(tmp_path: Path) -> None:
    values = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(1, "f4")}
    write_safetensors(tmp_path / "ours", **values)
    loaded = load_file(tmp_path / "ours")
    assert {name: one.tolist() for name, one in loaded.items()} == {n: v.tolist() for n, v in values.items()}
    save_file(values, tmp_path / "theirs")
    for stored in read_header(tmp_path / "theirs"):
        assert stored.rows(0, stored.shape[0]).tolist() == values[stored.name].tolist()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", "not a safetensors file"),
        (b"{", "no JSON"),
        (b"[]", "no object"),
        (b'{"a": 1}', "a: no description"),
        (b'{"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}', "type I8"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "is not valid"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "do not hold"),
        (b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}', "outside the file"),
        (b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', "is not valid"),
    ],
)
def test_a_damaged_safetensors_file_is_one_line(tmp_path: Path, header: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    if not header:
        path.write_bytes(b"\xff" * 40)
    with pytest.raises(UserError, match=words):
        read_header(path)


def test_folders_that_cannot_be_imported_say_why(tmp_path: Path) -> None:
    source = made(tmp_path / "run", LLAMA)
    export_weights(source, read_manifest(source), tmp_path / "hf", "float32", 1 << 30)
    config = tmp_path / "hf" / "config.json"
    good = json.loads(config.read_text())

    def refused(words: str, **changed: object) -> None:
        config.write_text(json.dumps(good | changed))
        with pytest.raises(UserError, match=words):
            import_weights(tmp_path / "hf", tmp_path / "back")
        assert not (tmp_path / "back").exists()

    refused("model_type 'mamba'", model_type="mamba")
    refused("hidden_act 'gelu'", hidden_act="gelu")
    refused("type 'yarn' is neither", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    refused(r"q_proj.weight: shape \[16, 16\], not \[32, 16\]", head_dim=8)
    refused("layers.3.input_layernorm.weight is missing", num_hidden_layers=4)
    refused("layers.2.input_layernorm.weight has no place", num_hidden_layers=2)
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "pytorch_model.bin").touch()
    refused("pickles")
    with pytest.raises(UserError, match="not a folder of transformers"):
        import_weights(tmp_path, tmp_path / "back")


def test_a_reshard_that_is_killed_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcrun.ckpt import write

    source = made(tmp_path / "run", LLAMA)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "target" / MANIFEST))

    monkeypatch.setattr(write, "replace_text", full)
    with pytest.raises(UserError, match=r"manifest\.json: No space left"):
        reshard(source, read_manifest(source), tmp_path / "target", 1, 1)
    assert not (tmp_path / "target").exists()


def test_a_login_node_without_h5py_exports_and_says_what_import_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made(tmp_path / "run", LLAMA)
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert invoke("export", "--to", "hf", source, tmp_path / "hf").exception is None
    with pytest.raises(UserError, match="takes h5py: pip install h5py"):
        raise invoke("import", "--from", "hf", tmp_path / "hf", tmp_path / "back").exception or AssertionError
