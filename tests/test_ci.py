"""What CI and make promise: no Slurm test is skipped unseen, and a missing Python is said in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLURM_PASSES = "@pytest.mark.slurm\ndef test_slurm(): pass\n"
TESTS = {
    "ran": SLURM_PASSES,
    "skipped": "@pytest.mark.slurm\ndef test_slurm(): pytest.skip('no slurmd')\n",
    "skipped by fixture": (
        "@pytest.fixture\ndef bed(): pytest.skip('no slurmd')\n\n"
        "@pytest.mark.slurm\ndef test_slurm(bed): pass\n"
    ),
    "module skipped": "pytest.skip('no slurmd', allow_module_level=True)\n",
    "none": "def test_other(): pass\n",
    "other skipped": f"{SLURM_PASSES}\ndef test_other(): pytest.skip('no lmod')\n",
}


def session(folder: Path, text: str, required: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(f"import pytest\n\n{text}")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slurm\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest", str(folder)],
        env=os.environ | {"HPCRUN_REQUIRE_SLURM": required},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("skipped", "test_it.py::test_slurm: Skipped: no slurmd"),
        ("skipped by fixture", "test_it.py::test_slurm: Skipped: no slurmd"),
        ("module skipped", "test_it.py: Skipped: no slurmd"),
        ("none", "no test marked slurm ran"),
    ],
)
def test_a_session_without_its_slurm_tests_fails_and_says_why(case: str, reason: str, tmp_path: Path) -> None:
    done = session(tmp_path, TESTS[case], required="1")
    assert done.returncode == 1, done.stdout
    assert "HPCRUN_REQUIRE_SLURM=1, but" in done.stdout
    assert reason in done.stdout


@pytest.mark.parametrize("case", ["ran", "other skipped"])
def test_a_session_with_its_slurm_tests_passes(case: str, tmp_path: Path) -> None:
    done = session(tmp_path, TESTS[case], required="1")
    assert done.returncode == 0, done.stdout


def test_elsewhere_slurm_tests_may_be_skipped(tmp_path: Path) -> None:
    done = session(tmp_path, TESTS["skipped"], required="0")
    assert done.returncode == 0, done.stdout


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with our Makefile and a PATH of only what make's recipes need."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sh", "make", "echo", "grep", "id", "touch"):
        (tools / tool).symlink_to(Path(str(shutil.which(tool))).resolve())
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    return tmp_path


def make(folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(folder / "bin"), "SHELL": "/bin/sh"}
    return subprocess.run(
        ["make", target], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_make_setup_without_a_fitting_python_says_so_in_one_line(bare: Path) -> None:
    python = bare / "bin" / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = make(bare, "setup")
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if not line.startswith("make: ***")] == [
        "make setup: no Python 3.11 with venv among: python3.11 python3; "
        "install it (Debian: apt-get install python3-venv)"
    ]


def test_make_says_in_one_line_what_is_left_out_without_slurm(bare: Path) -> None:
    done = make(bare, "slurm-packages")
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert line.startswith("make: tests on a real Slurm are left out: packages slurmctld slurmd ")
    assert line.endswith("this is not Debian")
