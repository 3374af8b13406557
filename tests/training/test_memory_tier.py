"""Copies in memory: a lost node's state comes from its neighbour, bit for bit, or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrun.node.memory import node_memory
from hpcrun.recipe import Recipe
from hpcrun.records import EXIT_DONE
from tests.ranks import RankFailed, run_ranks
from tests.training.runs import checkpoints, curve, recipe
from tests.training.test_resume import events, stop_after
from training.checkpoint import memory as tier
from training.launch import under_torchrun
from training.train import StopRequest, Trainer


def train_in_memory(wanted: Recipe, out: str, local_ranks: int, kill: tuple[int, int] | None = None) -> int:
    """Train on nodes of ``local_ranks`` ranks, each with a folder of its own for its memory."""
    rank = int(os.environ["RANK"])
    folder = Path(out) / f"memory-of-node-{rank // local_ranks}"
    folder.mkdir(parents=True, exist_ok=True)
    launch = replace(under_torchrun(os.environ, Path(out)), local_world=local_ranks, memory=folder)
    if kill:
        wait_for_copies()
        stop_after(kill[0], kill[1], signal.SIGKILL)
    return Trainer(wanted, launch, torch.device("cpu"), StopRequest()).train()


def wait_for_copies() -> None:
    """Every generation ends before the next step, so that tests know which there are."""
    start = tier.MemoryTier.start

    def started(self: tier.MemoryTier, *arguments: Any) -> None:
        start(self, *arguments)
        assert self._thread
        self._thread.join()

    tier.MemoryTier.start = started  # type: ignore[method-assign,assignment]


def wanted(tokens: Path, **checkpoint: Any) -> Recipe:
    return recipe(
        tokens,
        parallel={"pp": 2},
        train={"steps": 6},
        model={"dropout": 0.1},
        checkpoint={"every": 100, "memory_every": 2, "background": False} | checkpoint,
    )


@pytest.fixture(scope="module")
def straight(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    out = tmp_path_factory.mktemp("straight")
    run_ranks(2, train_in_memory, wanted(tokens), str(out), 1)
    return curve(out)


def break_at(tokens: Path, out: Path, step: int, **checkpoint: Any) -> None:
    with pytest.raises(RankFailed):
        run_ranks(2, train_in_memory, wanted(tokens, **checkpoint), str(out), 1, (step, 1))


def go_on(tokens: Path, out: Path, **checkpoint: Any) -> dict[str, Any]:
    """Finish the run; how it began."""
    assert run_ranks(2, train_in_memory, wanted(tokens, **checkpoint), str(out), 1) == [EXIT_DONE] * 2
    return events(out, "training_started")[-1]


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_a_lost_node_gets_its_state_from_the_next(
    tokens: Path, tmp_path: Path, straight: list[tuple[int, float, float]], lost: int | None
) -> None:
    break_at(tokens, tmp_path, 6)
    if lost is not None:
        shutil.rmtree(tmp_path / f"memory-of-node-{lost}")
    began = go_on(tokens, tmp_path)
    assert (began["start_step"], began["checkpoint"]) == (4, "memory")
    assert curve(tmp_path) == straight
    assert checkpoints(tmp_path) == ["step_00000006.a0002"]


def test_nodes_of_several_ranks(tokens: Path, tmp_path: Path) -> None:
    """Four ranks on two nodes, of which the second is lost: its two ranks' states come from the first."""
    same = wanted(tokens)
    four = same.model_copy(update={"parallel": same.parallel.model_copy(update={"tp": 2})})
    with pytest.raises(RankFailed):
        run_ranks(4, train_in_memory, four, str(tmp_path), 2, (4, 1))
    before = curve(tmp_path)
    shutil.rmtree(tmp_path / "memory-of-node-1")
    assert run_ranks(4, train_in_memory, four, str(tmp_path), 2) == [EXIT_DONE] * 4
    began = events(tmp_path, "training_started")[-1]
    assert (began["start_step"], began["checkpoint"]) == (2, "memory")
    assert curve(tmp_path)[: len(before)] == before and len(before) == 3


def spoil(folder: Path, owner: int, step: int, where: str) -> None:
    """Change what ``folder`` holds of a rank's state of a step."""
    for path in folder.glob(f"rank{owner:05d}.*.json"):
        if json.loads(path.read_text())["step"] == step:
            data = bytearray(path.with_suffix("").read_bytes())
            data[len(data) // 2] ^= 1
            if where == "header":
                path.write_text("{")
            else:
                path.with_suffix("").write_bytes(data if where == "data" else data[:-100])


def test_what_has_changed_in_memory_is_not_used(
    tokens: Path, tmp_path: Path, straight: list[tuple[int, float, float]]
) -> None:
    """Each rank's state comes from whichever of the two nodes has it whole."""
    break_at(tokens, tmp_path, 6)
    nodes = [tmp_path / f"memory-of-node-{node}" for node in (0, 1)]
    spoil(nodes[0], 0, 4, "data")
    spoil(nodes[1], 1, 4, "header")
    began = go_on(tokens, tmp_path)
    assert (began["start_step"], began["checkpoint"]) == (4, "memory")
    assert curve(tmp_path) == straight


def test_when_both_have_changed_the_generation_before_is_used(
    tokens: Path, tmp_path: Path, straight: list[tuple[int, float, float]]
) -> None:
    break_at(tokens, tmp_path, 6)
    spoil(tmp_path / "memory-of-node-0", 1, 4, "data")
    spoil(tmp_path / "memory-of-node-1", 1, 4, "short")
    began = go_on(tokens, tmp_path)
    assert (began["start_step"], began["checkpoint"]) == (2, "memory")
    assert curve(tmp_path) == straight


def test_a_newer_checkpoint_on_disk_wins(tokens: Path, tmp_path: Path) -> None:
    break_at(tokens, tmp_path, 6, every=5)
    began = go_on(tokens, tmp_path, every=5)
    assert (began["start_step"], began["checkpoint"]) == (5, "step_00000005.a0001")


def test_without_a_whole_generation_the_disk_is_read(tokens: Path, tmp_path: Path) -> None:
    break_at(tokens, tmp_path, 6, every=3)
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"memory-of-node-{node}")
    assert go_on(tokens, tmp_path, every=3)["checkpoint"] == "step_00000003.a0001"


def test_copies_that_a_roll_back_has_made_void_are_not_used(tokens: Path, tmp_path: Path) -> None:
    """Attempt 1 left step 4 in memory; attempt 2 could not see it, began anew and was killed at once."""
    break_at(tokens, tmp_path, 6)
    hidden = [(tmp_path / f"memory-of-node-{node}", tmp_path / f"hidden-{node}") for node in (0, 1)]
    for shown, away in hidden:
        shown.rename(away)
    break_at(tokens, tmp_path, 2)
    for shown, away in hidden:
        shutil.rmtree(shown)
        away.rename(shown)
    assert go_on(tokens, tmp_path)["start_step"] == 0


def test_another_layout_reads_the_disk(tokens: Path, tmp_path: Path) -> None:
    break_at(tokens, tmp_path, 6, every=3)
    same = wanted(tokens, every=3)
    other = same.model_copy(update={"parallel": same.parallel.model_copy(update={"pp": 1, "tp": 2})})
    run_ranks(2, train_in_memory, other, str(tmp_path), 1)
    assert events(tmp_path, "training_started")[-1]["checkpoint"] == "step_00000003.a0001"


def _little(*_: object) -> int:
    return 1000


def train_with_little_memory(recipe: Recipe, out: str) -> int:
    if os.environ["RANK"] == "1":
        tier.free_host_memory = _little  # type: ignore[assignment]
    return train_in_memory(recipe, out, 1)


def test_copies_that_do_not_fit_are_not_made(tokens: Path, tmp_path: Path) -> None:
    """Field report: async-memory."""
    assert run_ranks(2, train_with_little_memory, wanted(tokens), str(tmp_path)) == [EXIT_DONE] * 2
    (told,) = events(tmp_path, "memory_copy_skipped")
    assert told["reason"].startswith("rank 1 needs ") and told["reason"].endswith("1000 are free")
    assert not list(tmp_path.glob("memory-of-node-*/*"))


def test_the_agents_folder_goes_with_it_and_with_those_that_were_killed(tmp_path: Path) -> None:
    (tmp_path / "hpcrun-1-dead").mkdir()
    (tmp_path / "hpcrun-1-dead" / "lock").touch()
    (tmp_path / "hpcrun-1-dead" / "rank00000.0").write_bytes(bytes(100))
    (tmp_path / "hpcrun-2-alive").mkdir()
    (tmp_path / "hpcrun-foreign").mkdir()
    alive = os.open(tmp_path / "hpcrun-2-alive" / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(alive, fcntl.LOCK_EX)
    with node_memory("3", "mine", tmp_path) as folder:
        assert folder == tmp_path / "hpcrun-3-mine"
        assert folder.stat().st_mode & 0o777 == 0o700
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"hpcrun-2-alive", "hpcrun-foreign", "hpcrun-3-mine"}
    os.close(alive)
    assert not (tmp_path / "hpcrun-3-mine").exists()
    with node_memory("3", "mine", tmp_path / "nowhere") as folder:
        assert folder is None
