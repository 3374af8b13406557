"""``hpcrun recipe``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrun.cli import main

RECIPE = """\
name: small
model: {layers: 8, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 100, sequence: 32}
parallel: {tp: 2, pp: 2}
train: {global_batch: 16, micro_batch: 2}
resources: {nodes: 2, time: 60}
"""
PARAMETERS = 8 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 100 * 64 + 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def hpcrun(*args: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(str(ended.value.code))


def facts(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert hpcrun("recipe", "check", *args, "--json") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_check_tells_what_follows(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hpcrun("recipe", "check", file, "--gpus-per-node", 4) == 0
    shown = capsys.readouterr().out
    assert "TP=2 x CP=1 x DP=2 x PP=2" in shown
    assert "8 ranks (nodes 2 x ranks per node 4)" in shown
    assert f"{PARAMETERS:,}" in shown
    assert "16 samples, 2 at a time: 4 micro-batches per step" in shown
    assert "1 hour" in shown


@pytest.mark.parametrize(
    ("options", "world"),
    [
        (["--world", "4"], 4),
        (["--gpus-per-node", "4"], 8),
        (["--nodes", "1", "--gpus-per-node", "4"], 4),
        (["--set", "resources.ranks_per_node=4"], 8),
        (["--set", "resources.gpus_per_node=2"], 4),
        (["--set", "resources.gpus_per_node=2", "--set", "resources.ranks_per_node=4"], 8),
        (["--set", "parallel.dp=2"], 8),
        ([], None),
        (["--set", "resources.gpus_per_node=0"], None),
    ],
)
def test_where_the_number_of_ranks_comes_from(
    file: Path, options: list[str], world: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    told = facts(capsys, file, *options)
    assert told["world"] == world
    assert (told["layout"] is None) == (told["micro_batches"] is None) == (world is None)
    if world:
        assert told["layout"] == {"tp": 2, "cp": 1, "dp": world // 4, "pp": 2, "ep": 1}
    assert told["parameters"] == PARAMETERS
    assert told["time_minutes"] == 60


def test_an_unknown_world_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hpcrun("recipe", "check", file) == 0
    assert "unknown: the site knows the ranks per node" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "model.layers=1"], "model.layers 1 is fewer than the 2 stages"),
        (["--set", "train.global_batch=15"], "train.global_batch 15 does not divide"),
        (["--world", "6"], "6 ranks do not divide by parallel.tp 2 x cp 1 x pp 2 = 4"),
        (["--nodes", "2", "--gpus-per-node", "1"], "2 = nodes 2 x ranks per node 1"),
        (["--world", "8", "--nodes", "2"], "give one or the other"),
        (["--set", "trainer.lrr=1"], "unknown key 'trainer'"),
        (["--set", "train.lr=010"], "octal"),
    ],
)
def test_what_cannot_run_is_one_line(
    file: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field reports: layers-not-divisible, world-product, unknown-key."""
    assert hpcrun("recipe", "check", file, *options) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.count("\n") == 1


def test_schema_is_json_with_its_dialect(capsys: pytest.CaptureFixture[str]) -> None:
    assert hpcrun("recipe", "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["model"]
