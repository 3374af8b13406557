"""The script of `make gpu-check`, on a CPU: it must be ready before a GPU is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_runs_through_on_a_cpu() -> None:
    command = [sys.executable, "-m", "tests.gpu.check", "--device", "cpu"]
    home = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=280)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 7 and all(line["ok"] for line in lines)
