"""Letting old checkpoints go: the last good one, and what is not ours, stay."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hpcrun.cli.ckpt import command
from hpcrun.manifest import MANIFEST
from hpcrun.records import RESUMED, RunDir, claim_attempt, replace_text
from hpcrun.retention import reading, removable, remove_checkpoint
from hpcrun.units import show_bytes
from tests.hpcrun.made_checkpoints import make_checkpoint
from tests.hpcrun.made_runs import MadeRun

TENSORS = {"model/t": np.zeros(4, "f4")}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.path.mkdir()
    assert claim_attempt(found)
    return found


def doomed(run: RunDir, keep: int | None, **more: int) -> list[str]:
    return sorted(path.name for path in removable(run, unfinished_before=1, keep=keep, **more))


def test_the_newest_by_number_stay(run: RunDir) -> None:
    """Field report: retention-string-sort."""
    for step in (9, 100, 20):
        make_checkpoint(run, step, 1, TENSORS)
    assert doomed(run, 2) == ["step_00000009.a0001"]
    assert doomed(run, 1) == ["step_00000009.a0001", "step_00000020.a0001"]
    assert doomed(run, None) == []


def test_only_committed_checkpoints_count(run: RunDir) -> None:
    """Field report: retention-kills-only-good."""
    make_checkpoint(run, 10, 1, TENSORS)
    for step in (20, 30):
        (run.checkpoints / f"step_{step:08d}.a0001").mkdir()
    assert doomed(run, 1) == []
    left = removable(run, unfinished_before=2, keep=1)
    assert sorted(path.name for path in left) == ["step_00000020.a0001", "step_00000030.a0001"]


@pytest.mark.parametrize("keep", [1, 2, None])
def test_damaged_manifests_do_not_count(run: RunDir, keep: int | None) -> None:
    """Field report: retention-kills-only-good."""
    for step in (10, 20, 30):
        make_checkpoint(run, step, 1, TENSORS)
    torn = run.checkpoints / "step_00000030.a0001" / MANIFEST
    torn.write_bytes(torn.read_bytes()[:-9])
    assert doomed(run, keep) == (["step_00000010.a0001"] if keep == 1 else [])


def test_where_no_manifest_is_whole_nothing_that_was_committed_goes(run: RunDir) -> None:
    for step in (10, 20, 30):
        (make_checkpoint(run, step, 1, TENSORS) / MANIFEST).write_text("{}")
    claim_attempt(run)
    replace_text(run.attempt(2) / RESUMED, json.dumps({"step": 20}))
    assert doomed(run, 1) == doomed(run, None) == []


def test_a_file_with_the_name_of_a_checkpoint_is_not_ours(run: RunDir) -> None:
    make_checkpoint(run, 10, 1, TENSORS)
    (run.checkpoints / "step_00000005.a0001").touch()
    assert removable(run, unfinished_before=2, keep=1) == []


def test_what_a_roll_back_has_made_void_does_not_count_and_goes(run: RunDir) -> None:
    make_checkpoint(run, 10, 1, TENSORS)
    make_checkpoint(run, 50, 1, TENSORS)
    claim_attempt(run)
    replace_text(run.attempt(2) / RESUMED, json.dumps({"step": 10}))
    assert doomed(run, 1) == ["step_00000050.a0001"]
    make_checkpoint(run, 20, 2, TENSORS)
    assert doomed(run, 1) == ["step_00000010.a0001", "step_00000050.a0001"]


def test_folders_of_other_names_and_links_are_not_ours(run: RunDir, tmp_path: Path) -> None:
    elsewhere = make_checkpoint(RunDir(tmp_path / "other"), 5, 1, TENSORS)
    make_checkpoint(run, 90, 1, TENSORS)
    for name in ("best-step-100", "step_10.bak", "step_00000010.a0001.bak", "step_10"):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / MANIFEST).touch()
    (run.checkpoints / "step_00000005.a0001").symlink_to(elsewhere)
    assert doomed(run, 1) == []


def test_multiples_and_the_best_stay(run: RunDir) -> None:
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5)):
        make_checkpoint(run, step, 1, TENSORS, state={"loss": loss})
    assert doomed(run, 1, keep_every=20) == ["step_00000010.a0001", "step_00000030.a0001"]
    assert doomed(run, 1, keep_best=2) == ["step_00000010.a0001"]
    make_checkpoint(run, 50, 1, TENSORS)
    assert "step_00000030.a0001" in doomed(run, 1, keep_best=1)


def test_one_that_is_being_read_stays(run: RunDir) -> None:
    old = make_checkpoint(run, 10, 1, TENSORS)
    make_checkpoint(run, 20, 1, TENSORS)
    with reading(old):
        assert doomed(run, 1) == []
        (mark,) = old.glob("reading.*")
        os.utime(mark, (0, time.time() - 3600))
        assert doomed(run, 1) == [old.name]
    assert not list(old.glob("reading.*"))
    assert doomed(run, 1) == [old.name]


def test_the_manifest_goes_first(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report: retention-removes-dirs-not-files."""
    folder = make_checkpoint(run, 10, 1, TENSORS)
    import shutil

    there: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: there.extend(one.name for one in path.iterdir()))
    remove_checkpoint(folder)
    assert there == ["rank00000.h5"]


def test_prune_by_hand_asks_and_follows_the_recipe(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    run = made.run
    claim_attempt(run)
    for step in (10, 20, 30, 40, 50):
        make_checkpoint(run, step, 1, TENSORS)
    (run.checkpoints / "step_00000060.a0001").mkdir()

    def prune(*words: str, said: str = "") -> str:
        done = CliRunner().invoke(command, ["prune", str(run.path), *words], input=said)
        assert done.exit_code == 0, done.output
        return done.output

    assert "would be freed" in prune("--dry-run")
    assert "would be freed" in prune(said="n\n")
    assert len(list(run.checkpoints.iterdir())) == 6
    assert prune("--yes").count("step_") == 2
    left = sorted(path.name[5:13] for path in run.checkpoints.iterdir())
    assert left == ["00000030", "00000040", "00000050", "00000060"]
    assert prune("--yes") == "nothing to remove\n"
    assert prune("--keep", "1", "--yes").count("step_") == 2


def test_one_that_is_read_since_the_question_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeRun(tmp_path).run
    for step in (10, 20, 30, 40, 50):
        make_checkpoint(run, step, 1, TENSORS)
    read = run.checkpoints / "step_00000010.a0001"

    def answered(*_: object, **__: object) -> bool:
        (read / "reading.c1.1.ab").touch()
        return True

    monkeypatch.setattr("click.confirm", answered)
    done = CliRunner().invoke(command, ["prune", str(run.path)])
    assert done.exit_code == 0, done.output
    assert read.exists() and not (run.checkpoints / "step_00000020.a0001").exists()


def test_what_was_freed_is_told_when_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MadeRun(tmp_path).run
    folders = [make_checkpoint(run, step, 1, TENSORS) for step in (10, 20, 30)]
    size = sum(path.stat().st_size for path in folders[0].iterdir())

    def refused(folder: Path) -> None:
        if folder == folders[1]:
            raise PermissionError(13, "Permission denied", str(folder))
        remove_checkpoint(folder)

    monkeypatch.setattr("hpcrun.retention.remove_checkpoint", refused)
    done = CliRunner().invoke(command, ["prune", str(run.path), "--keep", "1", "--yes"])
    assert str(done.exception) == (
        f"{folders[1]}: cannot be removed: Permission denied; {show_bytes(size)} freed"
    )
