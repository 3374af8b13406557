"""Striping of checkpoints: what `lfs` is told. A script stands in for it, there is no Lustre here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.runs.striping import stripe
from hpcrun.sites.model import Filesystem


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "bin" / "lfs"
    script.parent.mkdir()
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    return script


def write(script: Path, text: str) -> None:
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)


def test_the_sites_stripes_are_set_on_the_folder(tmp_path: Path, lfs: Path) -> None:
    write(lfs, f'printf "%s\\n" "$@" > {tmp_path}/told')
    folder = tmp_path / "a folder; with $(odd) name"
    assert stripe(folder, Filesystem.model_validate({"stripe_count": -1, "stripe_size": "4M"})) == []
    words = (tmp_path / "told").read_text().splitlines()
    assert words == ["setstripe", "--stripe-count=-1", "--stripe-size=4194304", str(folder)]


def test_a_site_without_stripes_calls_nothing(tmp_path: Path, lfs: Path) -> None:
    write(lfs, f"touch {tmp_path}/called")
    assert stripe(tmp_path, Filesystem()) == []
    assert not (tmp_path / "called").exists()


def test_what_fails_is_a_warning(tmp_path: Path, lfs: Path) -> None:
    wanted = Filesystem.model_validate({"stripe_count": 8})
    assert "no lfs here" in stripe(tmp_path, wanted)[0]
    write(lfs, "echo 'error: setstripe: Inappropriate ioctl' >&2; exit 25")
    assert stripe(tmp_path, wanted) == [
        f"warning: lfs setstripe on {tmp_path} failed: error: setstripe: Inappropriate ioctl"
    ]
