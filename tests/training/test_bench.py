"""The benchmark of the trainer: that it compares like with like."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from hpcrun.bench.interleave import interleave
from hpcrun.errors import UserError
from hpcrun.recipe import Recipe, load_recipe
from tests.ranks import run_ranks
from tests.training.runs import curve, recipe, train_on
from training.bench import checkpoints
from training.bench.__main__ import run, text
from training.bench.bare import Decoder, Loop, problem
from training.bench.ranks import Ranks, Step
from training.data.tokens import Samples
from training.optim.adamw import learning_rate
from training.parallel.parameters import draw_normal
from training.parallel.pieces import whole

SMALL = "model: {layers: 2, hidden: 32, heads: 4, sequence: 16, vocab: 61}\ntrain: {global_batch: 4}\n"


def arguments(folder: Path, *layouts: str, text: str = SMALL) -> argparse.Namespace:
    path = folder / "recipe.yaml"
    path.write_text("name: small\n" + text)
    return argparse.Namespace(recipe=path, layouts=list(layouts), overrides=[], rounds=2)


def fill(decoder: Decoder, wanted: Recipe) -> None:
    """The weights that the trainer starts from."""
    out_std = wanted.model.init_std / (2 * wanted.model.layers) ** 0.5
    for name, weight in decoder.named_parameters():
        if weight.dim() == 1:
            continue
        *path, matrix, kind = name.split(".")
        part = "attention." if matrix in "qkvo" else "mlp." if path else ""
        canonical = ".".join([*path, f"{part}{matrix}", kind])
        std = out_std if matrix in ("o", "down") else wanted.model.init_std
        drawn = draw_normal(wanted.train.seed, whole(canonical, tuple(weight.shape))[0], std)
        weight.data.copy_(drawn)


@pytest.mark.parametrize("tied", [False, True])
def test_the_plain_loop_trains_the_same_model(tokens: Path, tmp_path: Path, tied: bool) -> None:
    model = {"kv_heads": 2, "tie_embeddings": tied}
    wanted = recipe(tokens, model=model, train={"clip_grad": 0.5})
    run_ranks(1, train_on, wanted, str(tmp_path))
    loop, samples = Loop(wanted, torch.device("cpu")), Samples(wanted)
    fill(loop.model, wanted)
    losses = []
    for step in range(wanted.train.steps):
        batch = samples.batch(step * wanted.train.global_batch, wanted.train.global_batch)
        losses.append(loop.step(batch, learning_rate(step + 1, wanted.train)))
    assert losses == pytest.approx([loss for _, loss, _ in curve(tmp_path)], abs=1e-5)


def test_layouts_are_held_against_as_many_plain_loops(tmp_path: Path) -> None:
    told = run(arguments(tmp_path, "dp=2,zero=1", "pp=2"), tmp_path)
    assert list(told["candidates"]) == [
        *("sgemm", "bare loop", "sgemm x 2", "bare loop x 2", "single", "dp=2,zero=1", "pp=2"),
    ]
    assert told["candidates"]["dp=2,zero=1"]["baseline"] == "bare loop x 2"
    assert told["candidates"]["pp=2"]["limit"] == pytest.approx(4 / 5)
    assert all(len(samples) == 2 for samples in told["samples"].values())
    assert json.loads(json.dumps(told)) == told
    shown = text(told)
    assert "of the 0.80 that a pipeline allows" in shown and "single" in shown


def test_a_model_that_the_plain_loop_lacks_is_held_against_the_roof(tmp_path: Path) -> None:
    told = run(arguments(tmp_path, text=SMALL.replace("{layers", "{biases: true, layers")), tmp_path)
    assert list(told["candidates"]) == ["sgemm", "single"]
    assert told["candidates"]["single"]["baseline"] == "sgemm"
    assert "no bare loop to compare with: model.biases is not False" in text(told)


@pytest.mark.parametrize(
    ("layout", "said"),
    [("tp=3", "layout tp=3: "), ("tpp=2", "parallel.tpp"), ("dp=2,zero=9", "parallel.zero")],
)
def test_an_impossible_layout_is_refused_by_its_name(tmp_path: Path, layout: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(arguments(tmp_path, layout), tmp_path)


def test_a_rank_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    file = arguments(tmp_path).recipe

    def make(device: torch.device) -> Step:
        raise UserError("no such thing")

    with pytest.raises(UserError, match="rank 0 of 1: no such thing"):
        Ranks(1, load_recipe(file), tmp_path / "stores", make)


def test_shipped_recipes_have_a_plain_loop() -> None:
    recipes = Path(__file__).parents[2] / "training" / "recipes"
    for name in ("bench", "bench-small"):
        assert problem(load_recipe(recipes / f"{name}.yaml")) is None


def test_the_checkpoint_benchmark_measures_every_promise(tmp_path: Path) -> None:
    state = checkpoints.State(1 << 20, tmp_path)
    result = interleave("checkpoints", state.candidates(), "s", rounds=1)
    told = checkpoints.report(state, result)
    assert {(one["of"], one["to"]) for one in told["ratios"]} == {
        ("save", "raw write + xxh3"),
        ("save", "FileSystemWriter"),
        ("load", "raw read + xxh3"),
        ("stall", "memcpy"),
    }
    save, raw = result.samples["save"][0], result.samples["raw write + xxh3"][0]
    assert told["ratios"][0]["ratio"] == raw / save
    assert "times as fast as raw write + xxh3" in checkpoints.text(told)
    assert [path.name for path in state.run.checkpoints.iterdir()] == ["step_00000001.a0001"]
