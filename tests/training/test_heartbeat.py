"""A rank's sign of life."""

from __future__ import annotations

import json
import os
from pathlib import Path

from training.monitor.heartbeat import Heartbeat


def test_one_line_of_fixed_width_holds_the_last_beat(tmp_path: Path) -> None:
    heartbeat = Heartbeat(str(tmp_path), 3)
    heartbeat.beat("step", 123456789)
    heartbeat.beat("save", 7)
    text = (tmp_path / "rank00003").read_text()
    assert len(text) == 128 and text.endswith("\n") and text.count("\n") == 1
    found = json.loads(text)
    assert (found["phase"], found["step"], found["pid"]) == ("save", 7, os.getpid())


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    heartbeat = Heartbeat(None, 0)
    heartbeat.beat("step", 1)
    assert not list(tmp_path.iterdir())
