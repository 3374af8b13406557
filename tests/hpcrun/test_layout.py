"""Arithmetic of layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.config import parse_yaml
from hpcrun.counts import block_flops, head_flops, parameter_count, training_flops
from hpcrun.layout import (
    Coordinates,
    Layout,
    make_layout,
    micro_batches,
    padded_vocab,
    stage_layers,
)
from hpcrun.recipe import Model, Moe, Parallel, Recipe, recipe_from

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


@pytest.mark.parametrize(("layers", "pp"), [(1, 1), (8, 2), (7, 2), (30, 4), (12, 4), (96, 8)])
def test_every_layer_is_in_exactly_one_stage(layers: int, pp: int) -> None:
    """Field report: layers-not-divisible."""
    stages = stage_layers(Model(layers=layers), Parallel(pp=pp))
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert all(stages)


def test_the_output_layer_takes_the_place_of_blocks_that_cost_as_much() -> None:
    model = Model(layers=16, hidden=64, vocab=4096, sequence=64)
    blocks = head_flops(model) / block_flops(model, 0)
    counts = [len(stage) for stage in stage_layers(model, Parallel(pp=4))]
    loads = [*counts[:-1], counts[-1] + blocks]
    assert sum(counts) == 16
    assert max(loads) - min(loads) <= 1
    assert counts[-1] < min(counts[:-1])
    assert counts[:-1] == sorted(counts[:-1])


def test_stage_layers_can_be_given() -> None:
    stages = stage_layers(Model(layers=5), Parallel(pp=2, stage_layers=[4, 1]))
    assert stages == [range(4), range(4, 5)]


def test_fewer_layers_than_stages_are_refused() -> None:
    """Field report: layers-not-divisible."""
    with pytest.raises(ValueError, match=r"model\.layers 3 is fewer than the 4 stages of parallel\.pp 4"):
        make_layout(recipe("model: {layers: 3}\nparallel: {pp: 4}"), 4)


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
        ("model: {hidden: 12}", "of width 3 is odd; rotary positions need it even"),
        ("model: {kv_heads: 3}", "model.heads 4 does not divide by model.kv_heads 3"),
        ("parallel: {tp: 8}", "model.heads 4 does not divide by parallel.tp 8"),
        ("model: {heads: 12, hidden: 120, kv_heads: 3}\nparallel: {tp: 2}", "one must divide the other"),
        ("parallel: {cp: 2}\nmodel: {sequence: 126}", "does not divide by 2 x parallel.cp 2"),
        ("parallel: {tp: 4, sequence_parallel: true}\nmodel: {sequence: 126}", "which parallel.sequence_p"),
        ("parallel: {ep: 2, dp: 2}", "parallel.ep 2 needs experts; set model.moe"),
        (
            "parallel: {ep: 2, dp: 2}\nmodel: {moe: {experts: 3}}",
            "experts 3 does not divide by parallel.e",
        ),
        ("parallel: {ep: 4, dp: 2}\nmodel: {moe: {experts: 4}}", "does not divide the 2 data ranks"),
        ("parallel: {dp: 4, zero_group: 2}", "parallel.zero_group 2 shards nothing"),
        ("parallel: {dp: 4, zero: 1, zero_group: 3}", "zero_group 3 does not divide the 4 data ranks"),
        ("parallel: {pp: 2, virtual_stages: 2}", "schedule 1f1b needs virtual_stages exactly 1, not 2"),
        ("parallel: {pp: 2, schedule: dualpipev}\ntrain: {global_batch: 3}", "needs 4 or more micro-batches"),
        ("parallel: {pp: 2, stage_layers: [1, 2, 1]}", "stage_layers has 3 entries for 2 stages"),
        ("parallel: {pp: 2, stage_layers: [1, 2]}", "stage_layers adds up to 3, model.layers is 4"),
        ("model: {ffn_hidden: 3}\nparallel: {tp: 2}", "model.ffn_hidden 3 does not divide by parallel.tp 2"),
        ("train: {global_batch: 7, micro_batch: 2}", "nearest that do are 6 and 8"),
        ("parallel: {dp: 16}", "micro_batch 1 x dp 16 = 16; the nearest that do are 16"),
    ],
)
def test_what_does_not_divide_is_named(text: str, message: str) -> None:
    made = recipe(text)
    parallel = made.parallel
    world = parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1)
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


def test_parameter_count_of_learned_positions_biases_and_layer_norms() -> None:
    """GPT-2 small has 124,439,808 parameters (Radford et al., 2019)."""
    gpt = Model(
        layers=12,
        hidden=768,
        heads=12,
        vocab=50257,
        sequence=1024,
        norm="layernorm",
        activation="gelu",
        positions="learned",
        biases=True,
        tie_embeddings=True,
    )
    assert parameter_count(gpt) == 124_439_808


def test_parameter_count_of_experts() -> None:
    """Mixtral 8x7B has 46,702,792,704 parameters (Jiang et al., 2401.04088)."""
    mixtral = Model(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, vocab=32000, moe=Moe(experts=8)
    )
    assert parameter_count(mixtral) == 46_702_792_704


def test_training_flops_are_six_per_weight_and_the_attention() -> None:
    model = Model(layers=2, hidden=64, heads=4, vocab=256, sequence=32)
    products = parameter_count(model) - 256 * 64 - 5 * 64
    attention = 2 * 3 * 4 * 64 * 32 / 2
    assert training_flops(model) == 6 * products + attention


def test_an_impossible_layout_names_possible_ones_nearby() -> None:
    with pytest.raises(ValueError, match=r"possible on these ranks: tp 2 x cp 1 x dp 3 x pp 1, "):
        make_layout(recipe("parallel: {tp: 3}\ntrain: {global_batch: 6}"), 6)
