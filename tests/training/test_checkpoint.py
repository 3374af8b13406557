"""Checkpoints never lie: whatever happens to the bytes is noticed, and an older one takes over."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from hpcrun.errors import UserError
from hpcrun.manifest import ITEM_BYTES, MANIFEST, read_manifest
from hpcrun.records import RESUMED, RunDir, claim_attempt, replace_text
from tests.ranks import RankFailed, run_ranks
from training.checkpoint import save as saving
from training.checkpoint import saver
from training.checkpoint.load import restore
from training.checkpoint.local import DTYPES, LocalTensor
from training.checkpoint.save import Facts
from training.checkpoint.saver import Retention, SaveError, Superseded, prune, save_checkpoint

MODEL = {"hidden": 4}
ROWS, COLUMNS = 6, 1000


def whole(fill: float = 0.0) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + fill


def tensors(fill: float = 0.0, rank: int = 0, world: int = 1) -> list[LocalTensor]:
    """A matrix in rows over the ranks, a bf16 vector that all hold, and a scalar."""
    rows = ROWS // world
    part = whole(fill)[rank * rows : (rank + 1) * rows].clone()
    vector = torch.full((7,), fill + 1, dtype=torch.bfloat16)
    return [
        LocalTensor("model/matrix", (ROWS, COLUMNS), ((rank * rows, (rank + 1) * rows), (0, COLUMNS)), part),
        LocalTensor("model/vector", (7,), ((0, 7),), vector),
        LocalTensor("exp_avg/scalar", (), (), torch.tensor(fill + 2)),
    ]


def empty(rank: int = 0, world: int = 1) -> list[LocalTensor]:
    found = tensors(rank=rank, world=world)
    for tensor in found:
        tensor.data.fill_(-1)
    return found


def claimed(folder: Path) -> tuple[RunDir, int, str]:
    run = RunDir(folder)
    folder.mkdir(exist_ok=True)
    attempt, claim = claim_attempt(run) or pytest.fail("not claimed")
    return run, attempt, claim


def facts(run: RunDir, attempt: int, claim: str, step: int) -> Facts:
    return Facts(run, step, attempt, claim, layout={"tp": 1}, model=MODEL, state={"step": step})


def save(run: RunDir, attempt: int, claim: str, step: int, held: list[LocalTensor]) -> Path:
    return save_checkpoint(facts(run, attempt, claim, step), held).facts.folder


@pytest.fixture
def two(tmp_path: Path) -> tuple[RunDir, Path, Path]:
    """A run with checkpoints of steps 1 (fill 10) and 2 (fill 20)."""
    run, attempt, claim = claimed(tmp_path / "run")
    return run, save(run, attempt, claim, 1, tensors(10)), save(run, attempt, claim, 2, tensors(20))


def loaded_fill(run: RunDir) -> tuple[float, list[tuple[str, str]]]:
    """Which fill the newest good checkpoint has, checked in every value, and what was passed over."""
    target = empty()
    restored = restore(run, MODEL, target)
    assert restored is not None
    fill = float(target[2].data) - 2
    for found, expected in zip(target, tensors(fill), strict=True):
        assert torch.equal(found.data, expected.data)
    return fill, restored.rejected


def test_what_was_saved_comes_back(two: tuple[RunDir, Path, Path]) -> None:
    assert loaded_fill(two[0]) == (20.0, [])


def test_people_see_the_same_bytes_with_h5py(two: tuple[RunDir, Path, Path]) -> None:
    with h5py.File(two[2] / "rank00000.h5", locking=False) as file:
        matrix = file[f"model/matrix/0-{ROWS},0-{COLUMNS}"]
        assert matrix[:].tolist() == whole(20).tolist()
        assert matrix.chunks is None
        vector = file["model/vector/0-7"]
        assert vector.attrs["torch_dtype"] == "bfloat16"
        assert torch.from_numpy(vector[:]).view(torch.bfloat16).tolist() == [21.0] * 7
    (piece,) = read_manifest(two[2]).tensors["model/matrix"].pieces
    assert piece.offset % 4096 == 0


@pytest.mark.parametrize("kind", ["data", "frame", "manifest"])
def test_no_flipped_bit_is_loaded(two: tuple[RunDir, Path, Path], kind: str) -> None:
    run, _, newest = two
    target = newest / (MANIFEST if kind == "manifest" else "rank00000.h5")
    good = target.read_bytes()
    pieces = [piece for tensor in read_manifest(newest).tensors.values() for piece in tensor.pieces]
    inside = {at for piece, size in zip(pieces, (ROWS * COLUMNS * 4, 14, 4), strict=True)
              for at in range(piece.offset, piece.offset + size)}  # fmt: skip
    places = {"data": sorted(inside), "frame": sorted(set(range(len(good))) - inside)}
    generator = random.Random(kind)
    for _ in range(70):
        at = generator.choice(places.get(kind, range(len(good))))
        bad = bytearray(good)
        bad[at] ^= 1 << generator.randrange(8)
        target.write_bytes(bad)
        fill, rejected = loaded_fill(run)
        assert fill == 10.0 and rejected[0][0] == newest.name


@pytest.mark.parametrize("size", [0, 100, 5000, -1])
def test_a_truncated_file_is_passed_over(two: tuple[RunDir, Path, Path], size: int) -> None:
    run, _, newest = two
    path = newest / "rank00000.h5"
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    fill, rejected = loaded_fill(run)
    assert fill == 10.0
    assert "were written" in rejected[0][1]


def test_a_missing_file_is_passed_over(two: tuple[RunDir, Path, Path]) -> None:
    (two[2] / "rank00000.h5").unlink()
    fill, rejected = loaded_fill(two[0])
    assert fill == 10.0
    assert "No such file" in rejected[0][1]


def test_a_folder_without_manifest_is_no_checkpoint(two: tuple[RunDir, Path, Path]) -> None:
    (two[2] / MANIFEST).rename(two[2] / ".manifest.json.0123.tmp")
    assert loaded_fill(two[0]) == (10.0, [])


def test_when_none_can_be_loaded_the_run_does_not_start_anew_silently(two: tuple[RunDir, Path, Path]) -> None:
    for folder in two[1:]:
        os.truncate(folder / "rank00000.h5", 10)
    with pytest.raises(UserError, match=r"no checkpoint can be loaded.*step_00000002.*step_00000001"):
        restore(two[0], MODEL, empty())


def test_a_moved_or_copied_run_loads(two: tuple[RunDir, Path, Path], tmp_path: Path) -> None:
    """Field reports: moved-or-copied-run, latest-link-relative: the newest is derived, there is no link."""
    shutil.copytree(two[0].path, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(two[0].path)
    assert loaded_fill(RunDir(tmp_path / "elsewhere" / "copy"))[0] == 20.0


def test_missing_and_extra_tensors_are_named(two: tuple[RunDir, Path, Path]) -> None:
    """Field report: missing-or-extra-keys."""
    wanted = [*empty()[:2], LocalTensor("model/new", (2,), ((0, 2),), torch.zeros(2))]
    with pytest.raises(UserError, match="lacks model/new and has also exp_avg/scalar"):
        restore(two[0], MODEL, wanted)


def test_generators_of_other_ranks_are_neither_missing_nor_extra(tmp_path: Path) -> None:
    run, attempt, claim = claimed(tmp_path)
    noise = LocalTensor("rng/rank00009/torch", (3,), ((0, 3),), torch.zeros(3, dtype=torch.uint8))
    save(run, attempt, claim, 1, [*tensors(), noise])
    here = LocalTensor("rng/rank00000/torch", (3,), ((0, 3),), torch.ones(3, dtype=torch.uint8))
    assert restore(run, MODEL, [*empty(), here])
    assert here.data.tolist() == [1, 1, 1]


def test_modes_keep_a_run_from_strangers(two: tuple[RunDir, Path, Path]) -> None:
    """Field report: umask-and-owner."""
    assert stat.S_IMODE(two[2].stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in two[2].iterdir()} == {0o640}


def test_a_superseded_attempt_cannot_commit(tmp_path: Path) -> None:
    run, attempt, claim = claimed(tmp_path)
    claim_attempt(run)
    with pytest.raises(Superseded, match="attempt 2 holds"):
        save(run, attempt, claim, 1, tensors())
    assert not run.checkpoints.exists()


def test_an_attempt_superseded_during_the_save_cannot_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, attempt, claim = claimed(tmp_path)
    write = saving.write_shard

    def write_and_lose(*arguments: Any) -> Any:
        claim_attempt(run)
        return write(*arguments)

    monkeypatch.setattr(saving, "write_shard", write_and_lose)
    with pytest.raises(Superseded):
        save(run, attempt, claim, 1, tensors())
    assert list(run.checkpoints.iterdir()) == []


def test_another_jobs_claim_of_the_same_number_cannot_commit(tmp_path: Path) -> None:
    run, attempt, _ = claimed(tmp_path)
    with pytest.raises(Superseded):
        save(run, attempt, "another's mark", 1, tensors())


def test_a_late_commit_of_an_old_attempt_is_ignored(two: tuple[RunDir, Path, Path]) -> None:
    run, _, newest = two
    attempt, _ = claim_attempt(run) or pytest.fail("not claimed")
    replace_text(run.attempt(attempt) / RESUMED, json.dumps({"step": 1}))
    fill, rejected = loaded_fill(run)
    assert fill == 10.0
    assert rejected == [(newest.name, "superseded: attempt 2 went on from step 1")]


def test_a_half_written_folder_of_the_same_name_is_used_again(tmp_path: Path) -> None:
    """Field report: partial-dir-then-resave-hang."""
    run, attempt, claim = claimed(tmp_path)
    partial = run.checkpoints / "step_00000001.a0001"
    partial.mkdir(parents=True)
    (partial / "rank00003.h5").write_text("half")
    folder = save(run, attempt, claim, 1, tensors(10))
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "rank00000.h5"]
    with pytest.raises(SaveError, match="committed already"):
        save(run, attempt, claim, 1, tensors(10))


def test_pruning_keeps_the_newest_and_clears_what_failed_saves_left(two: tuple[RunDir, Path, Path]) -> None:
    run = two[0]
    (run.checkpoints / "step_00000009.a0001").mkdir()
    (run.checkpoints / "notes").mkdir()
    prune(facts(run, 1, "claim", 2), Retention(keep=1))
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["notes", "step_00000002.a0001"]


def save_as_rank(folder: str, claim: str, fill: float, victim: int, place: str) -> str:
    """Save on every rank; the victim dies at ``place``."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = saving if place == "write_shard" else saver
    if rank == victim and place:

        def die(*arguments: Any) -> Any:
            if place == "write_shard":
                arguments[0].write_bytes(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, place, die)
    held = tensors(fill, rank, world)
    return str(save(RunDir(Path(folder)), 1, claim, int(fill), held))


def load_as_rank(folder: str) -> list[float]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    target = empty(rank, world)
    restored = restore(RunDir(Path(folder)), MODEL, target)
    assert restored is not None
    assert torch.equal(target[0].data, tensors(restored.step, rank, world)[0].data)
    return [restored.step, float(target[2].data)]


def test_ranks_write_their_own_rows_and_shared_tensors_once(tmp_path: Path) -> None:
    run, _, claim = claimed(tmp_path)
    run_ranks(3, save_as_rank, str(tmp_path), claim, 5.0, -1, "")
    manifest = read_manifest(run.checkpoints / "step_00000005.a0001")
    assert [len(manifest.tensors[name].pieces) for name in ("model/matrix", "model/vector")] == [3, 1]
    assert run_ranks(2, load_as_rank, str(tmp_path)) == [[5, 7.0]] * 2
    assert run_ranks(1, load_as_rank, str(tmp_path)) == [[5, 7.0]]


@pytest.mark.parametrize("place", ["write_shard", "write_share", "commit"])
def test_a_rank_killed_during_a_save_costs_only_that_save(tmp_path: Path, place: str) -> None:
    """Field report: killed-mid-save."""
    _, _, claim = claimed(tmp_path)
    run_ranks(2, save_as_rank, str(tmp_path), claim, 5.0, -1, "")
    victim = 0 if place == "commit" else 1
    with pytest.raises(RankFailed):
        run_ranks(2, save_as_rank, str(tmp_path), claim, 6.0, victim, place)
    assert run_ranks(2, load_as_rank, str(tmp_path)) == [[5, 7.0]] * 2
    run_ranks(2, save_as_rank, str(tmp_path), claim, 6.0, -1, "")
    assert run_ranks(2, load_as_rank, str(tmp_path)) == [[6, 8.0]] * 2


def overlapping(folder: str, claim: str, missing: bool) -> None:
    rank = int(os.environ["RANK"])
    start, stop = (0, 3) if rank == 0 else ((4, 6) if missing else (2, 6))
    part = LocalTensor("model/m", (6,), ((start, stop),), torch.zeros(stop - start))
    save(RunDir(Path(folder)), 1, claim, 1, [part])


@pytest.mark.parametrize(("missing", "words"), [(True, "hold 5 of 6 elements"), (False, "overlapping parts")])
def test_holes_and_overlaps_are_never_committed(tmp_path: Path, missing: bool, words: str) -> None:
    run, _, claim = claimed(tmp_path)
    with pytest.raises(RankFailed, match=words):
        run_ranks(2, overlapping, str(tmp_path), claim, missing)
    assert list(run.checkpoints.iterdir()) == []


def fill_disk(folder: str, claim: str) -> str:
    rank = int(os.environ["RANK"])
    big = torch.zeros(512, 1024)
    part = LocalTensor("model/big", (1024, 1024), ((rank * 512, rank * 512 + 512), (0, 1024)), big)
    try:
        save(RunDir(Path(folder)), 1, claim, 7, [part])
    except SaveError as error:
        return str(error)
    return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs takes root")
def test_a_full_disk_is_named_on_every_rank_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True, timeout=10)
    try:
        run, _, claim = claimed(disk / "run")
        run_ranks(2, save_as_rank, str(run.path), claim, 5.0, -1, "")
        told = run_ranks(2, fill_disk, str(run.path), claim)
        assert told[0] == told[1]
        assert "No space left on device" in told[0] and "free): delete old checkpoints" in told[0]
        assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000005.a0001"]
        assert run_ranks(2, load_as_rank, str(run.path)) == [[5, 7.0]] * 2
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=10)


def test_sizes_are_known_without_torch() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES
