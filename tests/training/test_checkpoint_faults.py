"""Disks that fail, processes that are killed, and views that differ: the run goes on from what is whole."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrun import shardfile
from hpcrun.ckpt.find import usable
from hpcrun.ckpt.verify import verify
from hpcrun.errors import UserError
from hpcrun.manifest import MANIFEST, read_manifest
from hpcrun.recipe import Recipe
from hpcrun.records import EXIT_DONE, RunDir
from tests.ranks import RankFailed, run_ranks
from tests.training.runs import checkpoints, recipe, train_here, train_on
from tests.training.test_checkpoint import MODEL, claimed, empty, facts, save_as_rank, tensors
from tests.training.test_resume import events
from training.checkpoint import load
from training.checkpoint import save as saving
from training.checkpoint.load import restore
from training.checkpoint.saver import SaveError, save_checkpoint


def train_until_killed(wanted: Recipe, out: str, seed: int) -> int:
    """This process kills itself while a save is under way, somewhere in it."""
    generator = random.Random(seed)
    victim = os.getpid()
    saves = generator.randrange(1, 4)
    if os.fork() == 0:
        folder = RunDir(Path(out)).checkpoints
        seen: set[str] = set()
        while len(seen) < saves:
            if os.getppid() != victim:
                os._exit(0)
            there = list(folder.iterdir()) if folder.exists() else []
            seen |= {path.name for path in there if path.name.endswith(f"a{seed:04d}")}
        time.sleep(generator.uniform(0, 0.02))
        os.kill(victim, signal.SIGKILL)
        os._exit(0)
    return train_here(wanted, Path(out))


def test_killed_again_and_again_during_saves_the_newest_is_always_whole(tokens: Path, tmp_path: Path) -> None:
    """Field reports: killed-mid-save, latest-before-durable."""
    wanted = recipe(tokens, train={"steps": 60}, checkpoint={"every": 1, "keep": 2})
    run, reached = RunDir(tmp_path), 0
    for attempt in range(1, 6):
        with pytest.raises(RankFailed, match="a rank died without a word"):
            run_ranks(1, train_until_killed, wanted, str(tmp_path), attempt)
        for folder in usable(run)[:1]:
            assert verify(folder, deep=True) == []
            assert read_manifest(folder).step >= reached
            reached = read_manifest(folder).step
    assert reached > 0
    assert run_ranks(1, train_on, wanted, str(tmp_path)) == [EXIT_DONE]
    assert events(tmp_path, "training_started")[-1]["start_step"] == reached
    assert not events(tmp_path, "checkpoint_rejected")
    assert len(checkpoints(tmp_path)) == 2


def train_on_a_bad_disk(wanted: Recipe, out: str, number: int, call: str) -> int:
    """Rank 1's disk fails while step 2 is saved."""
    real = getattr(os, call)

    def failing(fd: int, *arguments: Any) -> Any:
        bad = os.environ["RANK"] == "1" and "step_00000002" in str(Path(f"/proc/self/fd/{fd}").readlink())
        if bad:
            raise OSError(number, os.strerror(number))
        return real(fd, *arguments)

    setattr(shardfile.os, call, failing)
    return train_here(wanted, Path(out))


@pytest.mark.parametrize(
    ("number", "call", "words"),
    [
        (errno.EIO, "pwrite", "Input/output error"),
        (errno.EIO, "fsync", "Input/output error"),
        (errno.EDQUOT, "pwrite", "free): delete old checkpoints, or lower checkpoint.keep"),
    ],
)
def test_a_disk_that_fails_costs_one_checkpoint(
    tokens: Path, tmp_path: Path, number: int, call: str, words: str
) -> None:
    wanted = recipe(tokens, parallel={"tp": 2}, train={"steps": 3}, checkpoint={"every": 1})
    assert run_ranks(2, train_on_a_bad_disk, wanted, str(tmp_path), number, call) == [EXIT_DONE] * 2
    assert checkpoints(tmp_path) == ["step_00000001.a0001", "step_00000003.a0001"]
    (failed,) = events(tmp_path, "checkpoint_failed")
    assert failed["step"] == 2
    assert failed["reason"].startswith("rank 1 on ") and words in failed["reason"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs takes root")
def test_a_file_system_that_became_read_only_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], check=True, timeout=10)
    try:
        run, attempt, claim = claimed(disk / "run")
        save_checkpoint(facts(run, attempt, claim, 1), tensors(10))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=10)
        with pytest.raises(SaveError, match=r"rank 0 on .*step_00000002.a0001: Read-only file system"):
            save_checkpoint(facts(run, attempt, claim, 2), tensors(20))
        target = empty()
        restored = restore(run, MODEL, target)
        assert restored and restored.step == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=10)


def restore_with_two_views(here: str, there: str) -> list[Any]:
    """Rank 0 sees the folder ``here``; rank 1, whose file system lags behind, the folder ``there``."""
    rank = int(os.environ["RANK"])
    target = empty(rank, 2)
    restored = restore(RunDir(Path(here if rank == 0 else there)), MODEL, target)
    assert restored
    assert torch.equal(target[0].data, tensors(restored.step, rank, 2)[0].data)
    return [restored.step, restored.rejected]


@pytest.mark.parametrize("lagging", ["folder", "files"])
def test_ranks_whose_views_differ_take_the_same_checkpoint(tmp_path: Path, lagging: str) -> None:
    run, _, claim = claimed(tmp_path / "here")
    for fill in (5.0, 6.0):
        run_ranks(2, save_as_rank, str(run.path), claim, fill, -1, "")
    shutil.copytree(run.path, tmp_path / "there")
    newest = tmp_path / "there" / "checkpoints" / "step_00000006.a0001"
    if lagging == "folder":
        shutil.rmtree(newest)
    else:
        (newest / "rank00001.h5").unlink()
    first, second = run_ranks(2, restore_with_two_views, str(run.path), str(tmp_path / "there"))
    assert first == second
    assert first[0] == 5 and "No such file" in first[1][0][1]


def test_a_manifest_that_only_one_rank_sees_is_not_needed_by_the_others(tmp_path: Path) -> None:
    """Rank 0 decides; the others verify the files by its manifest."""
    run, _, claim = claimed(tmp_path / "here")
    run_ranks(2, save_as_rank, str(run.path), claim, 5.0, -1, "")
    shutil.copytree(run.path, tmp_path / "there")
    (tmp_path / "there" / "checkpoints" / "step_00000005.a0001" / MANIFEST).unlink()
    told = run_ranks(2, restore_with_two_views, str(run.path), str(tmp_path / "there"))
    assert told == [[5, []], [5, []]]


def test_files_of_another_run_are_not_taken_for_ours(tmp_path: Path) -> None:
    """Field report: overwrite-mixes-worlds."""
    folders = []
    for name, fill in (("one", 5.0), ("other", 5.5)):
        run, attempt, claim = claimed(tmp_path / name)
        folders.append(save_checkpoint(facts(run, attempt, claim, 1), tensors(fill)).facts.folder)
    shutil.copy(folders[1] / "rank00000.h5", folders[0] / "rank00000.h5")
    with pytest.raises(UserError, match="no checkpoint can be loaded"):
        restore(RunDir(tmp_path / "one"), MODEL, empty())


def test_a_folder_that_cannot_be_read_does_not_start_the_run_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report: resume-auto-first-run."""
    run, attempt, claim = claimed(tmp_path)
    save_checkpoint(facts(run, attempt, claim, 1), tensors(5))

    def unreadable(_: RunDir) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(run.checkpoints))

    monkeypatch.setattr(load, "checkpoints_newest_first", unreadable)
    with pytest.raises(UserError, match=r"checkpoints: cannot be read: Input/output error"):
        restore(run, MODEL, empty())


def save_over_slowly_cleared_leftovers(folder: str, claim: str) -> None:
    """Rank 0 takes its time to clear the folder; whoever wrote meanwhile would lose its file."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    clear = saving.shutil.rmtree

    def slowly(path: Path, ignore_errors: bool = False) -> None:
        time.sleep(0.3)
        clear(path, ignore_errors=ignore_errors)

    saving.shutil.rmtree = slowly  # type: ignore[assignment]
    save_checkpoint(facts(RunDir(Path(folder)), 1, claim, 5), tensors(5, rank, world))


def test_no_rank_writes_before_the_folder_is_clear(tmp_path: Path) -> None:
    """Field report: rank0-rmtree-races-writers."""
    run, _, claim = claimed(tmp_path)
    junk = run.checkpoints / "step_00000005.a0001"
    junk.mkdir(parents=True)
    (junk / "rank00007.h5").write_text("junk")
    run_ranks(3, save_over_slowly_cleared_leftovers, str(run.path), claim)
    assert verify(junk, deep=True) == []
    names = sorted(path.name for path in junk.iterdir())
    assert names == [MANIFEST, "rank00000.h5", "rank00001.h5", "rank00002.h5"]


def test_no_lock_is_taken_or_asked_for(tmp_path: Path) -> None:
    """Field reports: h5-lock-not-supported, h5-reader-blocks-writer. Another process holds all of them."""
    run, attempt, claim = claimed(tmp_path)
    folder = save_checkpoint(facts(run, attempt, claim, 1), tensors(5)).facts.folder
    path = folder / "rank00000.h5"
    part = shardfile.Part("model/t", "float32", (1,), ((0, 1),), lambda: [memoryview(bytes(4))])
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert restore(run, MODEL, empty())
        shardfile.write_shard(path, [part])
