"""The command line of ``hpcrun submit``: words, options and one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def hpcrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    command = [sys.executable, "-P", "-m", "hpcrun", "submit", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def dry(folder: Path, *words: str) -> dict[str, Any]:
    done = hpcrun(folder, "--site", "testcluster", "--dry-run", "--json", *words)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_options_win_over_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "name: a\ndata: {path: x}\nresources: {nodes: 1, time: 1h, partition: low}\n"
    )
    words = [
        "r.yaml",
        "--name",
        "b",
        "--nodes",
        "2",
        "--time",
        "30",
        "--partition",
        "main",
        "--qos",
        "q",
        "--account",
        "x",
    ]
    script = dry(tmp_path, *words)["script"]
    for line in ("job-name=b", "nodes=2", "time=0-00:30:00", "partition=main", "qos=q", "account=x"):
        assert f"#SBATCH --{line}\n" in script


def test_the_command_after_the_dashes_is_left_alone(tmp_path: Path) -> None:
    answer = dry(tmp_path, "--", "prog", "--json", "--", "--nodes", "7")
    assert "--nodes=1" in answer["script"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a recipe file, or a command after --"),
        (["none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["a.yaml", "b.yaml"], "unexpected extra argument (b.yaml)"),
        (["--nodes", "0", "--", "x"], "0 is not in the range x>=1"),
        (["--nodse", "1", "--", "x"], "No such option"),
        (["--set", "train.steps=many", "--", "x"], "train.steps: must be a whole number (found 'many')"),
        (["--site", "nope", "--", "x"], "no site 'nope'"),
        (["--time=-5", "--", "x"], "resources.time: '-5' is not a time"),
        (["--name", "../x", "--", "x"], "is not a run name"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(tmp_path: Path, words: list[str], said: str) -> None:
    """Field reports: time-format-table, unknown-key."""
    done = (
        hpcrun(tmp_path, "--site", "testcluster", "--dry-run", *words)
        if "--site" not in words
        else hpcrun(tmp_path, *words)
    )
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_the_local_site_is_submitted_and_ends(tmp_path: Path) -> None:
    done = hpcrun(tmp_path, "--site", "local", "--wait", "--", "sh", "-c", "echo $RANK")
    assert done.returncode == 0, done.stderr
    assert "completed" in done.stdout
    (log,) = tmp_path.glob("runs/*/logs/0001/rank00000.log")
    assert log.read_text() == "0\n"
