"""A save behind the training: what it holds, how it fails, and how it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcrun.manifest import MANIFEST, read_manifest
from hpcrun.recipe import Checkpoint, Recipe
from hpcrun.records import RunDir
from tests.ranks import RankFailed, run_ranks
from tests.training.runs import checkpoints, recipe, train_here, train_on
from tests.training.test_checkpoint import claimed, empty, facts, tensors
from tests.training.test_resume import events
from training.checkpoint import saver as saving
from training.checkpoint import staging
from training.checkpoint.interval import Interval, best_interval
from training.checkpoint.load import restore
from training.checkpoint.local import LocalTensor
from training.checkpoint.saver import SaveError, Saver
from training.monitor.memory import free_host_memory
from training.train import Totals, Trainer

MODEL = {"hidden": 4}


def gate(until: Callable[[], bool], rank: int = 0) -> None:
    """Keep ``rank`` from writing its share until a condition holds."""
    write = saving.write_share

    def gated(folder: Path, tensors: list[LocalTensor]) -> dict[str, Any]:
        while int(os.environ.get("RANK", "0")) == rank and not until():
            time.sleep(0.002)
        return write(folder, tensors)

    saving.write_share = gated


def save_and_train_on(folder: str, claim: str) -> list[float]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = RunDir(Path(folder))
    held = tensors(10, rank, world)
    trained = threading.Event()
    gate(trained.is_set, rank)
    saver = Saver(30)
    for step in (1, 2):
        trained.clear()
        saver.start(facts(run, 1, claim, step), held, background=True)
        assert not saver.done
        for tensor in held:
            tensor.data.add_(step)
        total = torch.ones(1)
        dist.all_reduce(total)
        trained.set()
        saver.finish()
    found = []
    for name in ("step_00000001.a0001", "step_00000002.a0001"):
        target = empty(rank, world)
        only = RunDir(Path(folder) / f"only-{name}-{rank}")
        only.checkpoints.mkdir(parents=True)
        (only.checkpoints / name).symlink_to(run.checkpoints / name)
        assert restore(only, MODEL, target)
        assert torch.equal(target[0].data - float(target[2].data), held[0].data - float(held[2].data))
        found.append(float(target[2].data))
    return found


def test_a_background_save_holds_the_values_of_its_start(tmp_path: Path) -> None:
    """Training goes on, and talks, while the save waits: no collective of it is in the way."""
    _, _, claim = claimed(tmp_path)
    assert run_ranks(2, save_and_train_on, str(tmp_path), claim) == [[12.0, 13.0]] * 2


def test_without_room_for_a_copy_the_save_ends_before_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report: async-memory."""
    monkeypatch.setattr(staging, "free_host_memory", lambda: 10)
    run, attempt, claim = claimed(tmp_path)
    held, saver = tensors(10), Saver(30)
    saver.start(facts(run, attempt, claim, 1), held, background=True)
    assert saver.done
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000001.a0001"]
    saver.finish()


def save_with_a_late_rank(folder: str, claim: str) -> list[str]:
    rank = int(os.environ["RANK"])
    run, held = RunDir(Path(folder)), tensors(10, rank, 2)
    woken = threading.Event()
    gate(woken.is_set, rank=1)
    told, saver = [], Saver(1.0)
    for step in (1, 2, 3):
        saver.start(facts(run, 1, claim, step), held, background=True)
        try:
            saver.finish()
            told.append("saved")
        except SaveError as error:
            told.append(str(error))
        if step == 2:
            woken.set()
            if saver._stuck:
                saver._stuck.join()
        dist.barrier()
    return told


def test_a_rank_that_is_late_is_named_and_costs_only_that_save(tmp_path: Path) -> None:
    run, _, claim = claimed(tmp_path)
    first, second = run_ranks(2, save_with_a_late_rank, str(tmp_path), claim)
    assert first == second
    assert first[0].startswith("rank 1 did not finish writing within 1 s (checkpoint.timeout)")
    assert "rank 1 on " in first[1] and "still busy with an older save" in first[1]
    assert first[2] == "saved"
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000003.a0001"]


def train_slowly_saving(wanted: Recipe, out: str, fails: bool = False) -> int:
    """The save of step 2 lasts until step 4 has been taken; then, perhaps, training fails."""
    reached = threading.Event()
    trainer_step = Trainer.train_step

    def stepping(self: Trainer) -> Totals:
        totals = trainer_step(self)
        if self.step >= 3:
            reached.set()
            if fails:
                raise ArithmeticError("training broke")
        return totals

    Trainer.train_step = stepping  # type: ignore[method-assign]
    gate(reached.is_set)
    return train_here(wanted, Path(out))


def test_a_save_in_flight_ends_when_training_fails(tokens: Path, tmp_path: Path) -> None:
    """Field report: last-async-lost-at-exit."""
    with pytest.raises(RankFailed, match="training broke"):
        run_ranks(1, train_slowly_saving, recipe(tokens), str(tmp_path), True)
    assert (RunDir(tmp_path).checkpoints / "step_00000002.a0001" / MANIFEST).exists()


def train_saving_until_waited_for(wanted: Recipe, out: str) -> int:
    """No save ends before the trainer waits for one."""
    waited = threading.Event()
    finish = Saver.finish

    def finishing(self: Saver) -> saving.Saved:
        waited.set()
        return finish(self)

    Saver.finish = finishing  # type: ignore[method-assign]
    gate(waited.is_set)
    return train_here(wanted, Path(out))


def test_a_second_save_waits_for_the_first(tokens: Path, tmp_path: Path) -> None:
    wanted = recipe(tokens, train={"steps": 3}, checkpoint={"every": 1})
    run_ranks(1, train_saving_until_waited_for, wanted, str(tmp_path))
    assert events(tmp_path, "checkpoint_waited")[0]["step"] == 2
    assert [event["step"] for event in events(tmp_path, "checkpoint_saved")] == [1, 2, 3]


def test_a_second_save_is_skipped_where_the_recipe_says_so(tokens: Path, tmp_path: Path) -> None:
    wanted = recipe(tokens, train={"steps": 6}, checkpoint={"every": 1, "busy": "skip"})
    run_ranks(1, train_slowly_saving, wanted, str(tmp_path))
    skipped = {event["step"] for event in events(tmp_path, "checkpoint_skipped")}
    saved = {event["step"] for event in events(tmp_path, "checkpoint_saved")}
    assert 2 in skipped and {1, 6} <= saved and not skipped & saved
    assert checkpoints(tmp_path) == [f"step_{step:08d}.a0001" for step in sorted(saved)]


def test_a_save_behind_the_training_holds_the_same_as_one_that_stops_it(tokens: Path, tmp_path: Path) -> None:
    """Field report: async-unsupported-backend-silent: there is one format, and both ways write it."""
    for background in (True, False):
        wanted = recipe(
            tokens, parallel={"dp": 2, "zero": 1}, checkpoint={"every": 2, "background": background}
        )
        run_ranks(2, train_on, wanted, str(tmp_path / str(background)))
    found = []
    for background in (True, False):
        manifest = read_manifest(RunDir(tmp_path / str(background)).checkpoints / "step_00000002.a0001")
        found.append({name: manifest.tensors[name] for name in manifest.tensors if "/python" not in name})
    assert found[0] == found[1]


def test_the_best_interval_is_dalys() -> None:
    """Daly (2006): for a cost that is small beside the time to failure about sqrt(2 C M) - C."""
    assert best_interval(300, 86400) == pytest.approx(7000, rel=0.01)
    assert best_interval(1, 1e6) == pytest.approx(1414, rel=0.01)
    assert best_interval(300, 100) == 100


def test_intervals_in_time_follow_the_clock() -> None:
    now = [100.0]
    interval = Interval(Checkpoint(every="1m"), 1, None, lambda: now[0])
    now[0] += 59
    assert not interval.due(1)
    now[0] += 2
    assert interval.due(2)
    interval.started()
    assert not interval.due(3)


def test_the_automatic_interval_follows_cost_and_failures() -> None:
    wanted = Checkpoint(every="auto")
    few, many = Interval(wanted, 1, 2.4), Interval(wanted, 1000, 2.4)
    for interval in (few, many):
        interval.measured(stall=2.0, seconds=60.0)
    assert few.seconds == pytest.approx(31.6 * many.seconds, rel=0.02)
    assert many.seconds == pytest.approx(best_interval(2.0, 365.25 * 86400 / 2400))
    many.measured(stall=2.0, seconds=5000.0)
    assert many.seconds == 5000.0


@pytest.mark.parametrize("every", ["0", "50", "fast", "", "-1m", 0, -5, 1.5, True])
def test_what_is_no_interval_is_refused(every: object) -> None:
    with pytest.raises(ValueError, match="is no interval; write a number of steps"):
        Checkpoint.model_validate({"every": every})


def test_memory_that_a_limit_leaves_is_shared_by_the_ranks_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "groups" / "job" / "step"
    job.mkdir(parents=True)
    (tmp_path / "mine").write_text("0::/job/step\n")
    (job / "memory.max").write_text("max\n")
    (job / "memory.current").write_text("4096\n")
    (job.parent / "memory.max").write_text("1048576\n")
    (job.parent / "memory.current").write_text("648576\n")
    (job.parent / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_host_memory(tmp_path / "groups", tmp_path / "mine") == 125000
