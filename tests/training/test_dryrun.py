"""The dry run: what it counts is what a real step allocates and sends."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcrun.counts import block_parameters, parameter_count
from hpcrun.layout import make_layout
from hpcrun.recipe import Recipe
from tests.ranks import run_ranks
from tests.training.oracle import world_of
from training import dryrun
from training.assemble import assemble
from training.dryrun import dry_run, main
from training.model.micro_batch import MicroBatch
from training.monitor.accounting import Accounting
from training.parallel.mesh import Mesh

MODEL = {"layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocab": 64}
SP = {"sequence_parallel": True}


def wanted(layout: dict[str, Any], batch: int = 16, **model: Any) -> Recipe:
    sections = {"model": MODEL | model, "parallel": layout, "train": {"global_batch": batch}}
    return Recipe.model_validate(sections)


def report_on(recipe: Recipe, world: int, rank: int) -> dict[str, Any]:
    """In a process of its own, which has a fake process group only."""
    dist.destroy_process_group()
    return asdict(dry_run(recipe, world, rank))


def report(recipe: Recipe, world: int, rank: int = 0) -> Any:
    (answer,) = run_ranks(1, report_on, recipe, world, rank)
    return answer


def traffic(report: Any, *names: str) -> tuple[int, int]:
    """Count and bytes of the named collectives together."""
    found = [one for name, one in report["traffic"].items() if name in names]
    return sum(one["count"] for one in found), sum(one["bytes"] for one in found)


def real_on(recipe: Recipe) -> dict[str, int]:
    """The same figures of a real step on this rank."""
    layout = make_layout(recipe, dist.get_world_size())
    mesh = Mesh(layout, dist.get_rank(), torch.device("cpu"), timedelta(seconds=30), recipe)
    with Accounting(lambda group: "any") as accounting:
        parts = assemble(recipe, mesh, draw=False)
        made = accounting.bytes
        count = recipe.train.global_batch // layout.dp
        shape = (1, recipe.model.sequence // layout.cp)
        numbers = torch.arange(count * shape[1]).view(count, *shape) % recipe.model.vocab
        batch = [MicroBatch(i, one.clone(), one.clone()) for i, one in enumerate(numbers)]
        del numbers
        tokens = accounting.bytes - made
        accounting.peak = accounting.bytes
        parts.pipeline.run(batch, 1.0)
        gradients = dryrun._gradient_bytes(parts)
        parameters = dryrun._bytes(shard.device_values for shard in parts.sharding.shards)
        state = [value for one in parts.optimizer.state.values() for value in one.values()]
    sent = sum(one.bytes for (_, name), one in accounting.traffic.items() if name == "send")
    kept = tokens + parameters + gradients + dryrun._bytes(state)
    return {"activations": accounting.peak - kept, "gradients": gradients, "sent": sent}


@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 2} | SP, {"pp": 2}, {"pp": 2, "schedule": "zbv"}, {"dp": 2, "zero": 3}, {"cp": 2}],
    ids=str,
)
def test_memory_is_that_of_a_real_step(layout: dict[str, Any]) -> None:
    """But for messages that are still on their way, which on paper arrive at once."""
    recipe, world = wanted(layout), world_of(layout)
    messages = 2 * 16 * recipe.model.sequence * recipe.model.hidden * 4 if world > 1 else 0
    for rank, real in enumerate(run_ranks(world, real_on, recipe)):
        paper = report(recipe, world, rank)
        assert paper["gradients"] == real["gradients"]
        assert 0.95 * paper["activations"] <= real["activations"] <= 1.05 * paper["activations"] + messages
        assert traffic(paper, "pp send", "cp send")[1] == real["sent"]


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        {"pp": 4, "schedule": "zero_bubble"},
        {"pp": 2, "schedule": "interleaved", "dp": 2, "zero": 2},
        {"tp": 2, "dp": 2, "zero": 3} | SP,
    ],
    ids=str,
)
def test_a_cut_step_is_scaled_to_the_whole(layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, world = wanted(layout, batch=24), world_of(layout)
    cut = report(recipe, world, world - 1)
    monkeypatch.setattr(dryrun, "_enough", lambda recipe, layout, count, pp: count)
    full = report(recipe, world, world - 1)
    assert cut["micro_batches_run"] < full["micro_batches_run"] == cut["micro_batches"]
    assert cut["traffic"] == full["traffic"]
    for name in ("parameters", "gradients", "optimizer"):
        assert cut[name] == full[name]
    assert cut["activations"] == pytest.approx(full["activations"], rel=0.02)


def test_state_and_traffic_follow_the_formulas() -> None:
    model = wanted({}).model
    plain = report(wanted({"dp": 4}), 4)
    whole = 4 * parameter_count(model)
    assert (plain["parameters"], plain["gradients"]) == (whole, whole)
    assert plain["optimizer"] == pytest.approx(2 * whole, rel=1e-3)
    assert traffic(plain, "data all_reduce")[1] == whole
    sharded = report(wanted({"dp": 4, "zero": 3}), 4)
    assert sharded["parameters"] == pytest.approx(whole / 4, rel=0.05)
    assert sharded["optimizer"] == pytest.approx(2 * whole / 4, rel=0.05)
    block = 4 * block_parameters(model, 0)
    assert sharded["activations"] - plain["activations"] < 4.5 * block, "two gathered, two being summed"
    split = report(wanted({"tp": 2}), 2)
    # Four all-reduces per block and micro-batch (Shoeybi et al., 1909.08053, section 3), and those of
    # the embedding, the output layer's input and the loss; 16 micro-batches.
    activation = model.sequence * model.hidden * 4
    loss = model.sequence * 4
    per_pass = 4 * model.layers * activation + 2 * activation + 3 * loss
    assert traffic(split, "tp all_reduce") == (16 * (4 * model.layers + 4), 16 * per_pass)


def test_experts_take_their_even_share() -> None:
    """Four all-to-alls per block and micro-batch: there and back, forward and backward."""
    found = report(wanted({"dp": 4, "ep": 2}, moe={"experts": 4, "top_k": 2}), 4)
    micro_batches, layers, rows, hidden = 4, 4, 16 * 2, 32
    calls = 4 * layers * micro_batches
    assert traffic(found, "ep all_to_all") == (calls, calls * rows * hidden * 4)


def test_the_command_prints_json_and_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {layers: 4}\nparallel: {pp: 2}\nresources: {ranks_per_node: 4, nodes: 4}\n")
    assert main([str(path), "--rank", "16"]) == 2
    assert capsys.readouterr().err == "hpcrun: --rank 16 is not below the 16 ranks of the job\n"
    assert main([str(path), "--set", "parallel.tp=3"]) == 2
    assert capsys.readouterr().err.startswith("hpcrun: 16 ranks do not divide by parallel.tp 3")
    assert main([str(path), "--rank", "15", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["place"] == "rank 15 = pp1 dp7 cp0 tp0"
    assert told["total"] == told["parameters"] + told["gradients"] + told["optimizer"] + told["activations"]
    assert main([str(path)]) == 0
    assert "collectives per step" in capsys.readouterr().out
