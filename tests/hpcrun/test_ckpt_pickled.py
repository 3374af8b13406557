"""Weights from pickled formats; nothing that a pickle asks for is ever run."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpcrun.ckpt.diff import compare
from hpcrun.ckpt.families import family_of, matches
from hpcrun.ckpt.pickles import read_pickle
from hpcrun.ckpt.torchfile import read_torch_file
from hpcrun.cli.ckpt import command
from hpcrun.config import dump_yaml
from hpcrun.errors import UserError
from hpcrun.manifest import read_manifest
from hpcrun.recipe import Model
from hpcrun.records import RunDir
from tests.hpcrun.made_checkpoints import make_checkpoint
from tests.hpcrun.test_ckpt_convert import MODELS, SMALL, weights
from tests.ranks import run_ranks

GPT2 = MODELS["gpt2"]
COLUMNS = {"attention.o": "self_attention.linear_proj", "mlp.down": "mlp.linear_fc2"}
GQA = Model.model_validate(SMALL | {"layers": 4, "kv_heads": 2, "ffn_hidden": 24, "qk_norm": True})


def invoke(kind: str, source: Path, target: Path, model: Model) -> Result:
    recipe = source.parent / "recipe.yaml"
    recipe.write_text(dump_yaml({"model": model.model_dump(mode="json", exclude_none=True)}))
    words = ["import", "--from", kind, "--allow-pickle", "--recipe", str(recipe), str(source), str(target)]
    return CliRunner().invoke(command, words, standalone_mode=False)


def assert_same(target: Path, model: Model, folder: Path) -> None:
    expected = make_checkpoint(RunDir(folder), 1, 1, weights(model), model=model.model_dump())
    found = compare(expected, read_manifest(expected), target, read_manifest(target))
    assert not (found.only_first or found.only_second or found.shapes or found.values)


def torch_weights(model: Model) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model/"): torch.from_numpy(one) for name, one in weights(model).items()}


def hugging_face(model: Model) -> dict[str, torch.Tensor]:
    own = torch_weights(model)
    named = {}
    for match in matches(family_of(model), model):
        whole = torch.cat([own[name] for name in match.ours])
        named[match.theirs] = whole.t().contiguous() if match.transposed else whole
    return named


@pytest.mark.parametrize("naming", ["ours", "hugging face", "wrapped"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "tied"])
@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_torch_distributed_checkpoint(tmp_path: Path, name: str, naming: str) -> None:
    model = MODELS[name]
    state: dict[str, Any] = torch_weights(model) if naming == "ours" else hugging_face(model)
    if naming == "wrapped":
        state = {"model": state, "step": 5, "optimizer": {"lr": 0.1}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done = invoke("dcp", tmp_path / "dcp", tmp_path / "target", model)
    assert done.exception is None, done.exception
    assert_same(tmp_path / "target", model, tmp_path / "run")


def save_in_shards(folder: str, model: dict[str, Any]) -> None:
    """As fully_shard leaves a state: every rank has rows of every tensor."""
    mesh = init_device_mesh("cpu", (2,))
    own = hugging_face(Model.model_validate(model))
    dcp.save(
        {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in own.items()}, checkpoint_id=folder
    )


@pytest.mark.filterwarnings("ignore")
def test_pieces_that_several_ranks_have_saved(tmp_path: Path) -> None:
    model = MODELS["llama"]
    run_ranks(2, save_in_shards, str(tmp_path / "dcp"), model.model_dump())
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    done = invoke("dcp", tmp_path / "dcp", tmp_path / "target", model)
    assert done.exception is None, done.exception
    assert_same(tmp_path / "target", model, tmp_path / "run")


def megatron(folder: Path, model: Model, tp: int, pp: int, legacy: bool = False) -> None:
    """Files as Megatron-LM's ranks write them, with a vocabulary padded to a multiple of 16."""
    own = torch_weights(model)
    groups, queries, size = model.kv, model.heads // model.kv, model.head_size
    per_stage = model.layers // pp

    def rows(name: str, rank: int) -> torch.Tensor:
        return own[name].chunk(tp)[rank]

    def vocabulary(name: str, rank: int) -> torch.Tensor:
        padded = torch.cat([own[name], torch.full((32 - model.vocab, model.hidden), 9.0)])
        return padded.chunk(tp)[rank].clone()

    def qkv(layer: str, kind: str, rank: int) -> torch.Tensor:
        parts = {part: own[f"{layer}.attention.{part}.{kind}"] for part in "qkv"}
        mixed = []
        for group in range(groups):
            mixed.append(parts["q"][group * queries * size : (group + 1) * queries * size])
            mixed += [parts[part][group * size : (group + 1) * size] for part in "kv"]
        return torch.cat(mixed).chunk(tp)[rank]

    for stage in range(pp):
        for rank in range(tp):
            weights: dict[str, torch.Tensor] = {}
            if stage == 0:
                weights["embedding.word_embeddings.weight"] = vocabulary("embedding.weight", rank)
                if model.positions == "learned":
                    weights["embedding.position_embeddings.weight"] = own["positions.weight"]
            for number in range(per_stage):
                layer, there = f"layers.{stage * per_stage + number}", f"decoder.layers.{number}"
                for kind in ("weight", "bias") if model.biases else ("weight",):
                    weights[f"{there}.self_attention.linear_qkv.{kind}"] = qkv(layer, kind, rank)
                    up = rows(f"{layer}.mlp.up.{kind}", rank)
                    if model.activation == "swiglu":
                        up = torch.cat([rows(f"{layer}.mlp.gate.{kind}", rank), up])
                    weights[f"{there}.mlp.linear_fc1.{kind}"] = up
                    weights[f"{there}.self_attention.linear_qkv.layer_norm_{kind}"] = own.get(
                        f"{layer}.attention_norm.{kind}", own[f"{layer}.attention_norm.weight"]
                    )
                    weights[f"{there}.pre_mlp_layernorm.{kind}"] = own[f"{layer}.mlp_norm.{kind}"]
                for ours, theirs in COLUMNS.items():
                    whole = own[f"{layer}.{ours}.weight"]
                    weights[f"{there}.{theirs}.weight"] = whole.chunk(tp, 1)[rank].clone()
                    if model.biases:
                        weights[f"{there}.{theirs}.bias"] = own[f"{layer}.{ours}.bias"]
                for part in "qk" if model.qk_norm else "":
                    norm = own[f"{layer}.attention.{part}_norm.weight"]
                    weights[f"{there}.self_attention.{part}_layernorm.weight"] = norm
            if stage == pp - 1:
                weights["decoder.final_layernorm.weight"] = own["norm.weight"]
                if model.biases:
                    weights["decoder.final_layernorm.bias"] = own["norm.bias"]
                if not model.tie_embeddings:
                    weights["output_layer.weight"] = vocabulary("head.weight", rank)
            content: dict[str, Any] = {"args": argparse.Namespace(tp=tp), "checkpoint_version": 3.0}
            content["rng_state"] = [{"np": np.random.get_state(), "random": random.getstate()}]
            content["model"] = old_names(weights) if legacy else weights
            path = folder / "iter_0000007" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            path.mkdir(parents=True)
            torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")


def old_names(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As nested dicts under the names before Megatron Core."""
    renamed = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "decoder.": "",
    }
    nested: dict[str, Any] = {"embedding": {}, "encoder": {}}
    for name, value in weights.items():
        for new, old in renamed.items():
            name = name.replace(new, old)
        top, _, rest = name.partition(".")
        if top == "embedding":
            table, _, kind = rest.partition(".")
            nested["embedding"].setdefault(table, {})[kind] = value
        elif top == "output_layer":
            nested["output_layer"] = {rest: value}
        else:
            nested["encoder"][name] = value
    return {"language_model": nested}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("legacy", [False, True], ids=["core", "legacy"])
def test_a_checkpoint_of_megatron_of_any_layout(tmp_path: Path, tp: int, pp: int, legacy: bool) -> None:
    megatron(tmp_path / "megatron", GQA, tp, pp, legacy)
    done = invoke("megatron", tmp_path / "megatron", tmp_path / "target", GQA)
    assert done.exception is None, done.exception
    assert_same(tmp_path / "target", GQA, tmp_path / "run")


def test_megatrons_gpt(tmp_path: Path) -> None:
    megatron(tmp_path / "megatron", GPT2, 4, 3)
    done = invoke("megatron", tmp_path / "megatron", tmp_path / "target", GPT2)
    assert done.exception is None, done.exception
    assert_same(tmp_path / "target", GPT2, tmp_path / "run")


class Evil:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def test_what_a_pickle_asks_for_is_refused_and_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "run-by-a-pickle"
    with pytest.raises(UserError, match=r"asks for posix.system, which is refused; nothing was run"):
        read_pickle(pickle.dumps({"model": Evil(trap)}), "x")
    megatron(tmp_path / "megatron", GQA, 1, 1)
    file = tmp_path / "megatron" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({"model": Evil(trap)}, file)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(trap)))
    for kind in ("megatron", "dcp"):
        done = invoke(kind, tmp_path / kind, tmp_path / "target", GQA)
        assert isinstance(done.exception, UserError) and "posix.system" in str(done.exception)
    assert not trap.exists() and not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins getattr", "torch load", "torch._utils _rebuild_tensor", "os system"]
)
def test_names_that_are_not_on_the_list_are_refused(name: str) -> None:
    module, _, word = name.partition(" ")
    with pytest.raises(UserError, match=f"asks for {module}.{word}"):
        read_pickle(f"c{module}\n{word}\n.".encode(), "x")


def test_a_damaged_file_of_torch_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(1000.0)}, path)
    whole = path.read_bytes()
    generator = random.Random(1)
    for _ in range(200):
        bad = bytearray(whole)
        for _ in range(3):
            bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
        path.write_bytes(bad[: generator.randrange(len(bad))] if generator.random() < 0.3 else bad)
        try:
            file = read_torch_file(path)
            for name, view in file.content.items():
                file.tensor(view, name).read()
        except (UserError, AttributeError, TypeError):
            continue


def test_a_view_outside_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(8.0)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as good, zipfile.ZipFile(tmp_path / "y.pt", "w") as bad:
        for entry in good.infolist():
            data = good.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert data.count(b"K\x08") == 2
                data = data.replace(b"K\x08\x85", b"K\x09\x85")
            bad.writestr(entry.filename, data)
    file = read_torch_file(tmp_path / "y.pt")
    assert file.content["a"].shape == (9,)
    with pytest.raises(UserError, match="a: does not lie in the file"):
        file.tensor(file.content["a"], "a")


def test_words_are_needed_for_pickles(tmp_path: Path) -> None:
    megatron(tmp_path / "megatron", GQA, 1, 1)
    words = ["import", "--from", "megatron", str(tmp_path / "megatron"), str(tmp_path / "target")]
    runner = CliRunner()
    for more, told in (([], "say --allow-pickle"), (["--allow-pickle"], "give --recipe")):
        done = runner.invoke(command, words + more, standalone_mode=False)
        assert isinstance(done.exception, UserError) and told in str(done.exception)


def test_another_model_or_folder_is_one_line(tmp_path: Path) -> None:
    megatron(tmp_path / "megatron", GQA, 2, 1)
    (tmp_path / "empty").mkdir()

    def refused(kind: str, source: str, **changed: Any) -> str:
        done = invoke(kind, tmp_path / source, tmp_path / "target", GQA.model_copy(update=changed))
        assert isinstance(done.exception, UserError), done.exception
        return str(done.exception)

    assert "4 layers, the recipe's model has 3" in refused("megatron", "megatron", layers=3)
    told = refused("megatron", "megatron", vocab=40)
    assert "embedding.weight has shape [32, 16], the recipe's [40, 16]" in told
    assert "no mp_rank_* folders" in refused("megatron", "empty")
    assert "not a folder of torch.distributed.checkpoint" in refused("dcp", "empty")
