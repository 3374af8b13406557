"""Stopping and going on: nothing is lost, and nothing differs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrun.manifest import read_manifest
from hpcrun.recipe import Recipe
from hpcrun.records import EXIT_DONE, EXIT_REQUEUE, EXIT_STOP, RunDir, read_json_lines
from tests.ranks import RankFailed, run_ranks
from tests.training.oracle import world_of
from tests.training.runs import checkpoints, curve, recipe, train_here, train_on
from training import train
from training.checkpoint import saver
from training.checkpoint.local import LocalTensor
from training.checkpoint.save import Facts
from training.data.tokens import Samples
from training.monitor.stopwatch import PHASES
from training.train import Totals, Trainer

LAYOUT = {"tp": 2, "pp": 2}
EIGHT = {"steps": 8}


def events(out: Path, name: str) -> list[dict[str, Any]]:
    found = [event for path in sorted((out / "events").iterdir()) for event in read_json_lines(path)]
    return [event for event in found if event["event"] == name]


@pytest.fixture(scope="module")
def straight(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """The curve of a run that nobody disturbed, with dropout, so that noise must come back too."""
    out = tmp_path_factory.mktemp("straight")
    run_ranks(4, train_on, eight(tokens), str(out))
    return curve(out)


def eight(tokens: Path) -> Recipe:
    return recipe(
        tokens,
        parallel=LAYOUT,
        train=EIGHT,
        model={"dropout": 0.1},
        checkpoint={"every": 3, "background": False},
    )


def stop_after(step: int, rank: int, signum: int) -> None:
    """Send this rank ``signum`` in the middle of its step ``step``."""
    train_step = Trainer.train_step

    def stepping(self: Trainer) -> Totals:
        if self.step == step - 1 and self.launch.rank == rank:
            os.kill(os.getpid(), signum)
        return train_step(self)

    Trainer.train_step = stepping  # type: ignore[method-assign]


def train_and_signal(wanted: Recipe, out: str, step: int, rank: int, signum: int) -> int:
    stop_after(step, rank, signum)
    return train_here(wanted, Path(out))


@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_that_one_rank_hears_makes_all_save_at_the_same_step(
    tokens: Path, tmp_path: Path, straight: list[tuple[int, float, float]], signum: int
) -> None:
    """Field reports: ranks-see-signal-at-different-steps, data-state-not-saved, lr-not-restored."""
    codes = run_ranks(4, train_and_signal, eight(tokens), str(tmp_path), 5, 3, signum)
    assert codes == [EXIT_REQUEUE] * 4
    assert "step_00000005.a0001" in checkpoints(tmp_path)
    assert run_ranks(4, train_on, eight(tokens), str(tmp_path)) == [EXIT_DONE] * 4
    assert curve(tmp_path) == straight
    assert events(tmp_path, "training_started")[-1]["start_step"] == 5


def test_a_killed_run_goes_on_from_its_last_checkpoint_bit_for_bit(
    tokens: Path, tmp_path: Path, straight: list[tuple[int, float, float]]
) -> None:
    """Field report: killed-mid-save is in test_checkpoint; here a rank dies between saves."""
    with pytest.raises(RankFailed):
        run_ranks(4, train_and_signal, eight(tokens), str(tmp_path), 4, 2, signal.SIGKILL)
    assert run_ranks(4, train_on, eight(tokens), str(tmp_path)) == [EXIT_DONE] * 4
    assert curve(tmp_path) == straight
    assert events(tmp_path, "training_started")[-1]["start_step"] == 3


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ({"tp": 2, "pp": 2}, {"dp": 2}),
        ({"dp": 2, "zero": 3}, {"tp": 2, "pp": 2, "schedule": "zbv"}),
        ({"pp": 2, "dp": 2, "zero": 1, "schedule": "zero_bubble"}, {"dp": 3, "zero": 2, "offload": True}),
        ({"cp": 2, "tp": 2, "sequence_parallel": True}, {"dp": 4, "zero": 3, "zero_group": 2}),
    ],
    ids=str,
)
def test_another_layout_reads_the_same_checkpoint(
    tokens: Path, tmp_path: Path, layout: dict[str, Any], other: dict[str, Any]
) -> None:
    """Field reports: reshard-refused-or-wrong; stage-local layer names that load another stage's weights."""
    common: dict[str, dict[str, Any]] = {
        "model": {"kv_heads": 1, "tie_embeddings": True, "vocab": 63},
        "train": {"steps": 8, "global_batch": 24, "lr": 1e-3},
        "checkpoint": {"every": 4},
    }
    wanted = recipe(tokens, parallel=layout, **common)
    run_ranks(world_of(layout), train_and_signal, wanted, str(tmp_path), 4, 0, signal.SIGUSR2)
    expected = tmp_path / "straight"
    run_ranks(world_of(layout), train_on, wanted, str(expected))
    run_ranks(world_of(other), train_on, recipe(tokens, parallel=other, **common), str(tmp_path))
    assert events(tmp_path, "training_started")[-1]["start_step"] == 4
    for (_, loss, _), (_, wanted_loss, _) in zip(curve(tmp_path), curve(expected), strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)


def train_and_list_samples(wanted: Recipe, out: str) -> list[int]:
    """The numbers of the samples that this rank has asked for."""
    asked: list[int] = []
    batch = Samples.batch

    def listening(self: Samples, first: int, count: int) -> torch.Tensor:
        asked.extend(range(first, first + count))
        return batch(self, first, count)

    Samples.batch = listening  # type: ignore[method-assign]
    train_here(wanted, Path(out))
    return asked


def test_another_global_batch_goes_on_with_the_next_sample(tokens: Path, tmp_path: Path) -> None:
    """Field reports: grad-accum-in-skip, nodes-change-lr-asserts (the global batch halved)."""
    (before,) = run_ranks(1, train_and_list_samples, recipe(tokens, train={"steps": 2}), str(tmp_path))
    halved = recipe(tokens, parallel={"dp": 2}, train={"steps": 4, "global_batch": 8})
    after = run_ranks(2, train_and_list_samples, halved, str(tmp_path))
    assert before == list(range(32))
    assert sorted(after[0] + after[1]) == list(range(32, 48))
    last = list(read_json_lines(tmp_path / "metrics.jsonl"))[-1]
    assert (last["step"], last["tokens"]) == (4, 48 * 16)


def test_the_last_step_is_saved_and_old_ones_are_pruned(tokens: Path, tmp_path: Path) -> None:
    """Field reports: retention-*."""
    wanted = recipe(tokens, train={"steps": 7}, checkpoint={"every": 2, "keep": 2})
    run_ranks(1, train_on, wanted, str(tmp_path))
    assert checkpoints(tmp_path) == ["step_00000006.a0001", "step_00000007.a0001"]
    assert read_manifest(RunDir(tmp_path).checkpoints / "step_00000007.a0001").step == 7


def test_a_finished_run_started_again_does_nothing(tokens: Path, tmp_path: Path) -> None:
    wanted = recipe(tokens)
    run_ranks(1, train_on, wanted, str(tmp_path))
    before = curve(tmp_path)
    assert run_ranks(1, train_on, wanted, str(tmp_path)) == [EXIT_DONE]
    assert curve(tmp_path) == before


def test_a_checkpoint_of_another_model_is_refused_by_key(tokens: Path, tmp_path: Path) -> None:
    """Field report: stale-dir-with-other-config."""
    run_ranks(1, train_on, recipe(tokens), str(tmp_path))
    with pytest.raises(RankFailed, match="is of another model: hidden 32 there, 48 here"):
        run_ranks(1, train_on, recipe(tokens, model={"hidden": 48}), str(tmp_path))


def train_with_small_files(wanted: Recipe, out: str, limit: int) -> int:
    """A limit on file sizes stands in for a full disk: write(2) fails with EFBIG instead of ENOSPC."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write = saver.write_share

    def limited(folder: Path, tensors: list[LocalTensor]) -> dict[str, Any]:
        full = "step_00000002" in folder.name and os.environ["RANK"] == "1"
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit if full else resource.RLIM_INFINITY, -1))
        try:
            return write(folder, tensors)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, -1))

    saver.write_share = limited
    return train_here(wanted, Path(out))


def test_a_save_that_fails_on_one_rank_ends_neither_run_nor_older_checkpoints(
    tokens: Path, tmp_path: Path
) -> None:
    wanted = recipe(tokens, parallel={"tp": 2}, train={"steps": 4}, checkpoint={"every": 1})
    assert run_ranks(2, train_with_small_files, wanted, str(tmp_path), 8192) == [EXIT_DONE] * 2
    assert checkpoints(tmp_path) == [f"step_{step:08d}.a0001" for step in (1, 3, 4)]
    (failed,) = events(tmp_path, "checkpoint_failed")
    assert failed["step"] == 2
    assert "rank 1 on " in failed["reason"] and "rank00001.h5" in failed["reason"]


def train_without_room(wanted: Recipe, out: str) -> int:
    """Every save fails."""

    def fail(facts: Facts) -> str | None:
        return "rank 0 on here: no room"

    saver.prepare = fail
    return train.guarded(lambda: train_here(wanted, Path(out)))


@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_last_save_that_fails_stops_the_run_instead_of_repeating_it(
    tokens: Path, tmp_path: Path, on_failure: str
) -> None:
    """Field report: async-failure-unseen: the failure of a save in the background shows at a next step."""
    wanted = recipe(tokens, parallel={"tp": 2}, checkpoint={"on_failure": on_failure})
    assert run_ranks(2, train_without_room, wanted, str(tmp_path)) == [EXIT_STOP] * 2
    failed = [event["step"] for event in events(tmp_path, "checkpoint_failed")]
    assert failed == ([2, 4] if on_failure == "continue" else [2])


def test_metrics_hold_what_readers_rely_on(tokens: Path, tmp_path: Path) -> None:
    """Field report: nan-in-json is guarded where lines are written; here are the keys."""
    run_ranks(2, train_on, recipe(tokens, parallel={"pp": 2}), str(tmp_path))
    lines = list(read_json_lines(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1].keys() >= {
        "time",
        "attempt",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "step_s",
        "model_flops_per_s",
        "peak_memory_bytes",
    } | {f"{phase}_s" for phase in PHASES}
    for line in lines:
        assert 0 < sum(line[f"{phase}_s"] for phase in PHASES) <= line["step_s"] + 1e-3
    assert lines[-1]["tokens"] == 4 * 16 * 16


def test_a_gradient_that_is_not_finite_stops_with_the_step(tokens: Path, tmp_path: Path) -> None:
    wanted = recipe(tokens, train={"lr": 1e30, "warmup_steps": 0, "clip_grad": 0.0, "steps": 6})
    with pytest.raises(RankFailed, match=r"step [2-6]: the gradient norm is (nan|inf)"):
        run_ranks(1, train_on, wanted, str(tmp_path))


def test_other_data_are_refused_unless_allowed_and_other_changes_are_told(
    tokens: Path, tmp_path: Path
) -> None:
    """Field report: stale-dir-with-other-config."""
    out = tmp_path / "run"
    run_ranks(1, train_on, recipe(tokens), str(out))
    six = {"steps": 6, "lr": 2e-2}
    with pytest.raises(RankFailed, match=r"on other data: data.seed 1234 -> 9; put the old"):
        run_ranks(1, train_on, recipe(tokens, train=six, data={"seed": 9}), str(out))
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(reversed(tokens.read_bytes())))
    with pytest.raises(RankFailed, match=r"on other data: data.ends"):
        run_ranks(1, train_on, recipe(other, train=six), str(out))
    run_ranks(1, train_on, recipe(other, train=six, data={"allow_change": True}), str(out))
    told = events(out, "recipe_changed")[-1]["changes"]
    assert [change.split()[0] for change in told] == ["data.ends", "train.lr", "train.steps"]
    assert curve(out)[-1][0] == 6


def test_a_run_begins_with_the_weights_of_another_only_when_it_has_none(tokens: Path, tmp_path: Path) -> None:
    """Field report: warm-start-vs-resume: no step, moments or samples come along, and a requeue resumes."""
    run_ranks(1, train_on, recipe(tokens), str(tmp_path / "first"))
    init = str(tmp_path / "first" / "checkpoints" / "step_00000004.a0001")
    wanted = recipe(tokens, parallel={"tp": 2}, checkpoint={"init": init, "background": False})
    with pytest.raises(RankFailed):
        run_ranks(2, train_and_signal, wanted, str(tmp_path / "next"), 4, 0, signal.SIGKILL)
    assert run_ranks(2, train_on, wanted, str(tmp_path / "next")) == [EXIT_DONE] * 2
    began = [(one["start_step"], one["checkpoint"]) for one in events(tmp_path / "next", "training_started")]
    assert began == [(0, init), (2, "step_00000002.a0001")]
    lines = list(read_json_lines(tmp_path / "next" / "metrics.jsonl"))
    assert (lines[0]["step"], lines[0]["tokens"]) == (1, 16 * 16)
    untrained, trained = curve(tmp_path / "first"), curve(tmp_path / "next")
    assert trained[0][1] < untrained[0][1] - 0.2


def test_weights_to_begin_with_must_fit(tokens: Path, tmp_path: Path) -> None:
    run_ranks(1, train_on, recipe(tokens), str(tmp_path / "first"))
    folder = tmp_path / "first" / "checkpoints" / "step_00000004.a0001"
    init = {"init": str(folder)}
    with pytest.raises(
        RankFailed, match=r"checkpoint.init: .* is of another model: hidden 32 there, 48 here"
    ):
        run_ranks(1, train_on, recipe(tokens, model={"hidden": 48}, checkpoint=init), str(tmp_path / "next"))
    os.truncate(folder / "rank00000.h5", 9000)
    with pytest.raises(RankFailed, match=r"checkpoint.init: .*rank00000.h5: 9000 bytes"):
        run_ranks(1, train_on, recipe(tokens, checkpoint=init), str(tmp_path / "other"))
