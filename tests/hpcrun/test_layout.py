"""Arithmetic of layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.config import parse_yaml
from hpcrun.layout import (
    Coordinates,
    Layout,
    make_layout,
    micro_batches,
    padded_vocab,
    parameter_count,
    stage_layers,
)
from hpcrun.recipe import Model, Recipe, recipe_from

LAYOUTS = [Layout(1, 1, 1, 1), Layout(2, 1, 3, 2), Layout(2, 2, 2, 2), Layout(4, 1, 1, 4), Layout(1, 3, 2, 5)]


def recipe(text: str) -> Recipe:
    return recipe_from(parse_yaml(text, "r.yaml"), (), Path("/"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_coordinates_and_rank_are_inverse(layout: Layout) -> None:
    seen = [layout.coordinates(rank) for rank in range(layout.world)]
    assert len(set(seen)) == layout.world
    assert [layout.rank(at) for at in seen] == list(range(layout.world))
    for at in seen:
        assert at.tp < layout.tp
        assert at.cp < layout.cp
        assert at.dp < layout.dp
        assert at.pp < layout.pp


def test_tensor_parallel_peers_are_neighbours_and_stages_are_farthest_apart() -> None:
    layout = Layout(tp=2, cp=1, dp=2, pp=2)
    assert [layout.coordinates(rank) for rank in range(4)] == [
        Coordinates(0, 0, 0, 0),
        Coordinates(1, 0, 0, 0),
        Coordinates(0, 0, 1, 0),
        Coordinates(1, 0, 1, 0),
    ]
    assert layout.coordinates(4) == Coordinates(0, 0, 0, 1)
    assert layout.logging_rank() == 4
    assert Layout(4, 1, 1, 1).logging_rank() == 0


@pytest.mark.parametrize(("layers", "pp"), [(1, 1), (8, 2), (12, 4), (96, 8)])
def test_every_layer_is_in_exactly_one_stage(layers: int, pp: int) -> None:
    """Field report: layers-not-divisible."""
    stages = [stage_layers(layers, pp, stage) for stage in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "pp", "fits"), [(30, 4, "28 and 32"), (7, 2, "6 and 8"), (3, 4, "do are 4")]
)
def test_layers_that_do_not_divide_are_refused(layers: int, pp: int, fits: str) -> None:
    """Field report: layers-not-divisible."""
    with pytest.raises(
        ValueError, match=f"model.layers {layers} does not divide by parallel.pp {pp}.*{fits}"
    ):
        make_layout(recipe(f"model: {{layers: {layers}}}\nparallel: {{pp: {pp}}}"), pp)


@pytest.mark.parametrize(("tp", "pp", "world"), [(2, 2, 2), (2, 1, 1), (4, 1, 6), (1, 2, 3)])
def test_ranks_that_do_not_make_the_layout_are_refused(tp: int, pp: int, world: int) -> None:
    """Field report: world-product. Both numbers are named."""
    with pytest.raises(ValueError, match=rf"{world} ranks .*tp {tp} x cp 1 x pp {pp} = {tp * pp}"):
        make_layout(recipe(f"parallel: {{tp: {tp}, pp: {pp}}}"), world)


def test_a_fixed_dp_must_multiply_to_the_world() -> None:
    """Field report: world-product."""
    with pytest.raises(ValueError, match=r"tp 2 x cp 1 x dp 2 x pp 1 = 4, but the job has 8 ranks"):
        make_layout(recipe("parallel: {tp: 2, dp: 2}"), 8)


def test_dp_is_what_the_ranks_leave() -> None:
    made = recipe("parallel: {tp: 2, pp: 2}\ntrain: {global_batch: 16, micro_batch: 2}")
    layout = make_layout(made, 8)
    assert layout == Layout(2, 1, 2, 2)
    assert micro_batches(made, layout) == 4
    assert str(layout) == "TP=2 x CP=1 x DP=2 x PP=2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {hidden: 130}", "model.hidden 130 does not divide by model.heads 4"),
        ("model: {hidden: 12}", "is odd; rotary positions need it even"),
        ("model: {kv_heads: 3}", "model.heads 4 does not divide by model.kv_heads 3"),
        ("parallel: {tp: 8}", "model.heads 4 does not divide by parallel.tp 8"),
        ("model: {kv_heads: 1}\nparallel: {tp: 2}", "model.kv_heads 1 does not divide by parallel.tp 2"),
        ("model: {ffn_hidden: 3}\nparallel: {tp: 2}", "model.ffn_hidden 3 does not divide by parallel.tp 2"),
        ("train: {global_batch: 7, micro_batch: 2}", "nearest that do are 6 and 8"),
        ("parallel: {dp: 16}", "micro_batch 1 x dp 16 = 16; the nearest that do are 16"),
    ],
)
def test_what_does_not_divide_is_named(text: str, message: str) -> None:
    made = recipe(text)
    parallel = made.parallel
    world = parallel.tp * parallel.pp * (parallel.dp or 1)
    with pytest.raises(ValueError) as caught:
        make_layout(made, world)
    assert message in str(caught.value)


def test_padded_vocabulary_is_the_next_multiple() -> None:
    assert [padded_vocab(256, 1), padded_vocab(257, 2), padded_vocab(50257, 8)] == [256, 258, 50264]


def test_parameter_count_of_a_known_model() -> None:
    """Llama 2 7B has 6,738,415,616 parameters (Touvron et al., 2023)."""
    llama = Model(layers=32, hidden=4096, heads=32, ffn_hidden=11008, vocab=32000, sequence=4096)
    assert parameter_count(llama) == 6_738_415_616


def test_parameter_count_of_grouped_queries_and_tied_embeddings() -> None:
    """Llama 3.2 1B has 1,235,814,400 parameters."""
    llama = Model(
        layers=16, hidden=2048, heads=32, kv_heads=8, ffn_hidden=8192, vocab=128256, tie_embeddings=True
    )
    assert parameter_count(llama) == 1_235_814_400
