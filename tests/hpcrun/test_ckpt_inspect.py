"""Looking into checkpoints: what is told is true, and every damaged place is told."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hpcrun.blocks import BlockReader
from hpcrun.ckpt.diff import compare
from hpcrun.ckpt.stream import chunks, read_box, tiles
from hpcrun.ckpt.verify import verify
from hpcrun.cli.ckpt import command
from hpcrun.errors import UserError
from hpcrun.manifest import (
    HASH_BLOCK,
    MANIFEST,
    Manifest,
    ManifestError,
    Piece,
    Tensor,
    manifest_text,
    read_manifest,
)
from hpcrun.records import RESUMED, RunDir, claim_attempt, replace_text
from tests.hpcrun.made_checkpoints import make_checkpoint

ROWS, COLUMNS = 1200, 1000
LAYERS = {f"model/layers.{layer}.mlp.up.weight": np.full((4, 3), layer, "f4") for layer in range(12)}


def tensors(fill: float = 0.0) -> dict[str, np.ndarray]:
    matrix = np.arange(ROWS * COLUMNS, dtype="f4").reshape(ROWS, COLUMNS) + np.float32(fill)
    return {
        "model/matrix": matrix,
        "exp_avg/matrix": matrix * 0,
        "model/scalar": np.full((), fill, "f4"),
    }


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "small-00000001")
    found.path.mkdir()
    (found.path / "run.yaml").touch()
    assert claim_attempt(found)
    return found


def invoke(*words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_ls_tells_which_checkpoints_count(run: RunDir) -> None:
    """Field report: several-last-checkpoints."""
    make_checkpoint(run, 9, 1, tensors(), state={"loss": 2.5})
    make_checkpoint(run, 100, 1, tensors())
    flip(make_checkpoint(run, 20, 1, tensors()) / MANIFEST, 300)
    (run.checkpoints / "step_00000030.a0001").mkdir()
    (run.checkpoints / "best-step-100").mkdir()
    claim_attempt(run)
    replace_text(run.attempt(2) / RESUMED, json.dumps({"step": 9}))
    make_checkpoint(run, 12, 2, tensors())
    rows = json.loads(invoke("ls", run.path, "--json").output)
    assert [(row["step"], row["state"]) for row in rows] == [
        (100, "superseded"),
        (30, "unfinished"),
        (20, "damaged manifest"),
        (12, "newest"),
        (9, ""),
    ]
    assert rows[-1]["loss"] == 2.5
    text = invoke("ls", run.path).output
    assert "step_00000012.a0002" in text and "best-step" not in text


def test_show_folds_layers_that_are_alike(run: RunDir) -> None:
    folder = make_checkpoint(run, 5, 1, {**tensors(), **LAYERS}, files=2)
    for target in (run.path, folder, folder / MANIFEST):
        output = invoke("show", target).output
        assert "model/layers.{0..11}.mlp.up.weight  float32  4x3" in output
        assert "parameters  1,200,145" in output
    assert invoke("show", folder, "--all").output.count("mlp.up.weight") == 12
    told = json.loads(invoke("show", folder, "--json").output)
    assert told["bytes_by_kind"] == {"model": 4800580, "exp_avg": 4800000}
    assert len(told["tensors"]) == 15


def test_another_step_can_be_chosen(run: RunDir) -> None:
    for step in (3, 4):
        make_checkpoint(run, step, 1, tensors())
    assert "step        3," in invoke("show", run.path, "--step", 3).output
    with pytest.raises(UserError, match="no checkpoint of step 5; there are: 4, 3"):
        raise invoke("show", run.path, "--step", 5).exception or AssertionError


def test_what_is_no_checkpoint_is_one_line(run: RunDir, tmp_path: Path) -> None:
    for words in (("show", run.path), ("verify", run.path), ("verify", tmp_path / "nothing")):
        assert isinstance(invoke(*words).exception, UserError)
    (run.checkpoints / "step_00000001.a0001").mkdir(parents=True)
    with pytest.raises(UserError, match="the save never committed"):
        raise invoke("verify", run.checkpoints / "step_00000001.a0001").exception or AssertionError


def test_a_manifest_of_a_newer_version_says_so(run: RunDir) -> None:
    folder = make_checkpoint(run, 1, 1, tensors())
    newer = read_manifest(folder).model_copy(update={"version": 2})
    (folder / MANIFEST).write_text(manifest_text(newer))
    with pytest.raises(ManifestError, match=r"newer hpcrun \(format version 2; this one reads 1\)"):
        read_manifest(folder)


def test_verify_names_every_damaged_place(run: RunDir) -> None:
    folder = make_checkpoint(run, 1, 1, tensors(), files=2, axis=1)
    assert invoke("verify", "--deep", run.path).return_value == 0
    piece = read_manifest(folder).tensors["model/matrix"].pieces[1]
    flip(folder / "rank00001.h5", piece.offset + 7)
    first = read_manifest(folder).tensors["exp_avg/matrix"].pieces[0]
    flip(folder / "rank00000.h5", first.offset + 400 * COLUMNS)
    assert invoke("verify", run.path).return_value == 0
    done = invoke("verify", "--deep", run.path)
    assert done.return_value == 1
    end = piece.offset + ROWS * COLUMNS * 2
    assert f"rank00001.h5: model/matrix: block 0: bytes {piece.offset} to {end} have changed" in done.output
    assert "rank00000.h5: exp_avg/matrix: block 0: bytes" in done.output
    assert "2 damaged" in done.output


def test_the_block_that_changed_is_named(run: RunDir) -> None:
    big = {"model/big": np.zeros(3 * HASH_BLOCK // 4, "f4")}
    folder = make_checkpoint(run, 1, 1, big)
    offset = read_manifest(folder).tensors["model/big"].pieces[0].offset
    flip(folder / "rank00000.h5", offset + HASH_BLOCK + 5)
    (damage,) = verify(folder, deep=True)
    assert f"model/big: block 1: bytes {offset + HASH_BLOCK} to {offset + 2 * HASH_BLOCK} have" in damage


@pytest.mark.parametrize("deep", [False, True])
def test_frames_sizes_and_missing_files_are_seen(run: RunDir, deep: bool) -> None:
    frame, size, missing = (make_checkpoint(run, step, 1, tensors(), files=2) for step in (1, 2, 3))
    flip(frame / "rank00001.h5", 20)
    os.truncate(size / "rank00001.h5", 5000)
    (missing / "rank00000.h5").unlink()
    assert "outside the tensors have changed" in verify(frame, deep=deep)[0]
    assert "5000 bytes" in verify(size, deep=deep)[0]
    assert "No such file" in verify(missing, deep=deep)[0]
    assert invoke("verify", "--all", run.path, *["--deep"] * deep).return_value == 1


def test_holes_and_overlaps_of_pieces_are_seen(run: RunDir) -> None:
    folder = make_checkpoint(run, 1, 1, tensors(), files=2)
    whole = read_manifest(folder)

    def damaged(pieces: list[Piece]) -> list[str]:
        tensor = whole.tensors["model/matrix"].model_copy(update={"pieces": pieces})
        changed: Manifest = whole.model_copy(update={"tensors": whole.tensors | {"model/matrix": tensor}})
        (folder / MANIFEST).write_text(manifest_text(changed))
        return [line for line in verify(folder, deep=False) if MANIFEST in line]

    first, second = whole.tensors["model/matrix"].pieces
    assert damaged([first, second]) == []
    assert "its pieces hold 600000 of 1200000 elements" in damaged([first])[0]
    assert "overlaps another" in damaged([first, first.model_copy(update={"offset": 0})])[0]
    assert (
        "outside the tensor"
        in damaged([first, second.model_copy(update={"box": [(600, 1201), (0, 1000)]})])[0]
    )
    assert "ends behind" in damaged([first, second.model_copy(update={"offset": 1 << 40})])[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"file": 9}, "piece 0 lies in file 9 of 2"),
        ({"offset": -5}, "piece 0 begins before"),
        ({"box": [[0, 600]]}, "piece 0 lies outside the tensor"),
        ({"hashes": []}, "piece 0 has 0 hashes"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_damage(run: RunDir, change: dict[str, Any], told: str) -> None:
    folder = make_checkpoint(run, 1, 1, tensors(), files=2)
    whole = json.loads(read_manifest(folder).model_dump_json())
    whole["tensors"]["model/matrix"]["pieces"][0].update(change)
    (folder / MANIFEST).write_text(manifest_text(Manifest.model_validate(whole)))
    flip(folder / "rank00001.h5", read_manifest(folder).tensors["exp_avg/matrix"].pieces[1].offset)
    for words in (("verify",), ("verify", "--deep")):
        done = invoke(*words, folder)
        assert done.return_value == 1
        assert told in done.output
        assert ("rank00001.h5: exp_avg/matrix: block 0" in done.output) == ("--deep" in words)
    with pytest.raises(UserError, match=told):
        raise invoke("diff", folder, folder).exception or AssertionError


def test_an_unknown_type_is_a_damaged_manifest(run: RunDir) -> None:
    folder = make_checkpoint(run, 1, 1, tensors())
    whole = read_manifest(folder)
    odd = whole.tensors["model/matrix"].model_copy(update={"dtype": "odd"})
    changed = whole.model_copy(update={"tensors": whole.tensors | {"model/matrix": odd}})
    (folder / MANIFEST).write_text(manifest_text(changed))
    assert "'odd' is none of float32" in verify(folder, deep=True)[0]
    with pytest.raises(UserError, match="'odd' is none of float32"):
        raise invoke("show", folder).exception or AssertionError


def test_a_file_that_cannot_be_read_is_damage(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(run, 1, 1, tensors())
    at = read_manifest(folder).tensors["model/matrix"].pieces[0].offset
    pread = os.pread

    def failing(fd: int, size: int, offset: int) -> bytes:
        if offset == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", failing)
    (damage,) = verify(folder, deep=True)
    assert f"rank00000.h5: model/matrix: block 0: bytes {at} to" in damage
    assert damage.endswith("Input/output error")


def test_short_reads_are_no_damage(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(run, 1, 1, tensors())
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 1 << 20), at))
    assert verify(folder, deep=True) == []


def test_verify_all_takes_superseded_ones_too(run: RunDir) -> None:
    bad, good = make_checkpoint(run, 50, 1, tensors()), make_checkpoint(run, 10, 1, tensors())
    (bad / "rank00000.h5").unlink()
    claim_attempt(run)
    replace_text(run.attempt(2) / RESUMED, json.dumps({"step": 10}))
    assert invoke("verify", run.path).return_value == 0
    done = invoke("verify", "--all", "--json", run.path)
    assert done.return_value == 1
    told = json.loads(done.output)
    assert list(told) == [str(bad), str(good)]
    assert told[str(good)] == [] and "No such file" in told[str(bad)][0]


def test_the_disk_refuses_in_one_line() -> None:
    with pytest.raises(UserError, match="File name too long"):
        raise invoke("show", "a" * 300).exception or AssertionError


def test_ls_goes_on_past_what_it_cannot_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = make_checkpoint(run, 2, 1, tensors())
    make_checkpoint(run, 1, 1, tensors())
    stat, read = Path.stat, Path.read_bytes

    def refused(path: Path) -> None:
        if path.parent == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def refusing_stat(path: Path, **options: bool) -> os.stat_result:
        refused(path)
        return stat(path, **options)

    def refusing_read(path: Path) -> bytes:
        refused(path)
        return read(path)

    monkeypatch.setattr(Path, "stat", refusing_stat)
    monkeypatch.setattr(Path, "read_bytes", refusing_read)
    rows = json.loads(invoke("ls", run.path, "--json").output)
    assert [(row["step"], row["state"]) for row in rows] == [(2, "damaged manifest"), (1, "newest")]


def test_diff_reads_nothing_where_hashes_tell(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_checkpoint(run, 1, 1, tensors()), make_checkpoint(run, 1, 2, tensors())
    monkeypatch.setattr(BlockReader, "read", None)
    assert not compare(one, read_manifest(one), other, read_manifest(other))
    assert invoke("diff", one, other).return_value == 0


def test_diff_sees_one_value_across_layouts(run: RunDir) -> None:
    changed = tensors()
    changed["model/matrix"][700, 3] += 0.5
    one = make_checkpoint(run, 1, 1, tensors(), files=3)
    other = make_checkpoint(run, 1, 2, changed, files=2, axis=1, layout={"tp": 3})
    done = invoke("diff", one, other)
    assert done.return_value == 1
    assert done.output == "model/matrix: 1 of 1200000 elements differ, by at most 0.5\n"
    assert invoke("diff", one, other, "--tolerance", 0.5).return_value == 0


def test_diff_tells_keys_shapes_and_what_is_missing(run: RunDir) -> None:
    one = make_checkpoint(run, 1, 1, {"model/a": np.zeros(3, "f4"), "model/b": np.zeros(2, "f4")})
    other = make_checkpoint(run, 2, 1, {"model/b": np.zeros(4, "f4"), "model/c": np.zeros(1, "f4")}, model={})
    lines = invoke("diff", one, other).output.splitlines()
    assert lines == [
        "step: 1 -> 2",
        "model.hidden: 4 -> None",
        "state.step: 1 -> 2",
        "model/a: only in the first",
        "model/c: only in the second",
        "model/b: float32 [2] -> float32 [4]",
    ]


def test_diff_of_bf16_bytes_and_what_is_not_a_number(run: RunDir) -> None:
    def made(attempt: int, bf16: int, byte: int, number: float) -> Path:
        return make_checkpoint(
            run,
            1,
            attempt,
            {
                "model/bf16": np.array([0x3F80, bf16], "u2"),
                "rng/byte": np.array([1, byte], "u1"),
                "model/nan": np.array([np.nan, number], "f4"),
            },
        )

    lines = invoke("diff", made(1, 0x3F80, 1, 1.0), made(2, 0x4000, 9, np.nan)).output.splitlines()
    assert lines == [
        "model/bf16: 1 of 2 elements differ, by at most 1",
        "model/nan: 1 of 2 elements differ, by at most inf",
        "rng/byte: 1 of 2 elements differ",
    ]


def test_diff_sees_bits_and_writes_json_that_is_json(run: RunDir) -> None:
    one = make_checkpoint(run, 1, 1, {"model/a": np.array([0.0, np.nan], "f4")})
    sign = make_checkpoint(run, 1, 2, {"model/a": np.array([-0.0, np.nan], "f4")})
    number = make_checkpoint(run, 1, 3, {"model/a": np.array([0.0, 1.0], "f4")})
    assert invoke("diff", one, sign).output == "model/a: 1 of 2 elements differ, by at most 0\n"
    assert invoke("diff", one, sign, "--tolerance", 0).return_value == 0
    assert json.loads(invoke("diff", one, number, "--json").output)["values"][0]["largest"] == "inf"


@pytest.mark.parametrize("box", [((0, 1200), (0, 1000)), ((5, 17), (3, 999)), ((1199, 1200), (0, 1))])
def test_any_box_streams_whatever_the_pieces(run: RunDir, box: tuple[tuple[int, int], ...]) -> None:
    folder = make_checkpoint(run, 1, 1, tensors(), files=3, axis=1)
    manifest = read_manifest(folder)
    tensor = manifest.tensors["model/matrix"]
    reader = BlockReader(folder, manifest)
    read = list(chunks(reader, "model/matrix", tensor, box))
    index = tuple(slice(*bounds) for bounds in box)
    assert b"".join(read) == tensors()["model/matrix"][index].tobytes()
    assert all(len(chunk) == HASH_BLOCK for chunk in read[:-1])
    assert read_box(reader, "model/scalar", manifest.tensors["model/scalar"], ()) == bytes(4)
    reader.close()


def test_tiles_cover_a_box_once_and_lie_close() -> None:
    tensor = Tensor(dtype="float32", shape=[5, 7, 11], pieces=[])
    for span in (1, 4, 44, 100, 308, 700, 10000):
        seen = np.zeros((5, 7, 11), int)
        for tile in tiles(((1, 5), (0, 7), (2, 9)), tensor, span):
            index = tuple(slice(*bounds) for bounds in tile)
            seen[index] += 1
            places = np.arange(385).reshape(5, 7, 11)[index]
            assert places.size == 1 or (places.max() - places.min() + 1) * 4 <= span
        assert seen.sum() == 4 * 7 * 7 and seen.max() == 1
