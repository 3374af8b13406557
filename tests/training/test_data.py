"""Samples and noise: what a step sees depends on its number, not on the layout or on luck."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrun.errors import UserError
from tests.training.runs import recipe
from training.data.tokens import Samples
from training.model.dropout import Dropout, Noise


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Ten samples of four tokens, told apart by their first token: 0, 4, 8, ..."""
    path = tmp_path / "numbered.bin"
    path.write_bytes(np.arange(41, dtype=np.uint8).tobytes())
    return path


def samples(path: Path, **data: object) -> Samples:
    return Samples(recipe(path, model={"sequence": 4}, data={"path": str(path), **data}))


def firsts(batch: torch.Tensor) -> list[int]:
    return [int(row[0]) for row in batch]


def test_every_epoch_visits_every_sample_once_in_an_order_of_its_own(numbered: Path) -> None:
    found = samples(numbered)
    epochs = [firsts(found.batch(epoch * 10, 10)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(0, 40, 4)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_sample_is_a_window_with_one_token_more_for_the_target(numbered: Path) -> None:
    row = samples(numbered).batch(0, 1)[0].tolist()
    assert row == list(range(row[0], row[0] + 5))


def test_the_order_does_not_depend_on_how_a_batch_is_split(numbered: Path) -> None:
    """Data parallel ranks take parts of the same global batch, also across the end of an epoch."""
    whole = firsts(samples(numbered).batch(6, 8))
    parts = [firsts(samples(numbered).batch(6 + 2 * rank, 2)) for rank in range(4)]
    assert [first for part in parts for first in part] == whole


def test_the_seed_decides_the_order(numbered: Path) -> None:
    assert firsts(samples(numbered, seed=1).batch(0, 10)) == firsts(samples(numbered, seed=1).batch(0, 10))
    assert firsts(samples(numbered, seed=1).batch(0, 10)) != firsts(samples(numbered, seed=2).batch(0, 10))


def test_mistakes_in_data_name_the_file(numbered: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.bin: No such file"):
        samples(tmp_path / "none.bin")
    with pytest.raises(UserError, match="41 bytes are no whole number of uint16 tokens"):
        samples(numbered, dtype="uint16")
    numbered.write_bytes(b"abcd")
    with pytest.raises(UserError, match="4 tokens are too few for one sample"):
        samples(numbered)
    numbered.write_bytes(bytes([1, 2, 3, 200, 5]))
    with pytest.raises(UserError, match=r"token 200 at position 3 is outside model\.vocab 61"):
        samples(numbered).batch(0, 1)


def masks(step: int, micro_batch: int, site: str = "layers.0.mlp", place: str = "") -> list[float]:
    noise = Noise(seed=1, place=place)
    noise.step, noise.micro_batch = step, micro_batch
    return Dropout(site, 0.5, noise)(torch.ones(64)).tolist()


def test_noise_depends_on_step_micro_batch_and_place() -> None:
    first = masks(1, 2)
    assert masks(1, 2) == first
    others = [masks(1, 3), masks(2, 2), masks(1, 2, "layers.1.mlp"), masks(1, 2, place="/tp1")]
    assert first not in others
    assert len({tuple(one) for one in others}) == len(others)


def test_dropout_keeps_the_mean_and_is_off_in_evaluation() -> None:
    dropout = Dropout("x", 0.25, Noise(seed=1, place=""))
    kept = dropout(torch.ones(10_000))
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(dropout.eval()(torch.ones(8)), torch.ones(8))


def prepare(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "training.data.prepare", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_preparing_text_is_exact_and_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\xff")
    (tmp_path / "b").write_bytes(b"two")
    out = tmp_path / "out.bin"
    assert prepare(str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)).returncode == 0
    assert out.read_bytes() == b"one\xfftwo"
    failed = prepare(str(tmp_path / "none"), "--out", str(tmp_path / "new.bin"))
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out.bin"]
