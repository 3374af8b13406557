"""``python -m training``: the trainer without hpcrun's launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.records import read_json_lines

RECIPE = (
    "model: {layers: 2, hidden: 32, heads: 4, sequence: 16, vocab: 61}\ntrain: {steps: 3, global_batch: 4}\n"
)


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "r.yaml").write_text(RECIPE)
    clean = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return subprocess.run(
        [sys.executable, "-P", *words],
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_torchrun_trains_and_goes_on_from_its_checkpoint(tokens: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "training"]
    common = ["r.yaml", "--set", f"data.path={tokens}", "--set", "parallel.tp=2", "--out", "out"]
    first = run(tmp_path, *torchrun, *common)
    assert first.returncode == 0, first.stderr
    again = run(tmp_path, *torchrun, *common, "--set", "train.steps=5")
    assert again.returncode == 0, again.stderr
    lines = list(read_json_lines(tmp_path / "out" / "metrics.jsonl"))
    assert [(line["attempt"], line["step"]) for line in lines] == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5)]


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["--set", "train.setps=1"], {}, "unknown key 'train.setps'; did you mean 'train.steps'?"),
        (["--set", "train.device=cuda"], {}, "local rank 0 has no GPU: 0 visible"),
        ([], {"RANK": "0"}, "LOCAL_RANK is not set, but RANK is"),
        ([], {}, "data.path is not set"),
        (["--out", "r.yaml/out"], {}, "r.yaml/out: cannot be written: Not a directory"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    tmp_path: Path, words: list[str], env: dict[str, str], said: str
) -> None:
    """Field reports: unknown-key, local-rank-missing-makes-many-rank0."""
    done = run(tmp_path, "-m", "training", "r.yaml", "--out", "out", *words, **env)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
