"""The modulefile under Debian's real Lmod."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun import __version__
from hpcrun.datafiles import data_folder

LMOD = Path("/usr/share/lmod/lmod/init/bash")
pytestmark = pytest.mark.skipif(not LMOD.exists(), reason="needs Debian's package lmod")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A virtual environment in miniature, with a blank in its path."""
    prefix = tmp_path / "app v1"
    script = prefix / "bin" / "hpcrun"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m hpcrun "$@"\n')
    script.chmod(0o755)
    return prefix


def shell(script: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """``script`` in a bash that has Lmod and looks for modules in ``folder`` only."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "MODULEPATH": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        ["bash", "--norc", "-c", f'source "{LMOD}"\n{script}'],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def installed_in(prefix: Path) -> Path:
    folder = prefix / "lib" / "python3.11" / "site-packages" / "hpcrun" / "_data" / "modules"
    shutil.copytree(data_folder("modules"), folder)
    return folder


def copied(folder: Path, prefix: Path | str, site: str = "") -> Path:
    """What an admin does: copy the file into the site's tree and fill in its first lines."""
    text = (data_folder("modules") / "hpcrun.lua").read_text()
    text = text.replace('local prefix = ""', f'local prefix = "{prefix}"')
    text = text.replace('local site = ""', f'local site = "{site}"')
    (folder / "hpcrun").mkdir(parents=True)
    (folder / "hpcrun" / f"{__version__}.lua").write_text(text)
    return folder


def test_load_runs_hpcrun_and_unload_restores_path(prefix: Path, tmp_path: Path) -> None:
    script = """
        before="$PATH"
        module load hpcrun && hpcrun --version && command -v hpcrun
        [ "$PATH" != "$before" ] || echo "PATH is unchanged by load"
        module unload hpcrun
        [ "$PATH" = "$before" ] || echo "PATH not restored: $PATH"
        command -v hpcrun || echo gone
    """
    done = shell(script, installed_in(prefix), tmp_path)
    assert done.stdout.splitlines() == [
        f"hpcrun, version {__version__}",
        str(prefix / "bin" / "hpcrun"),
        "gone",
    ], done.stderr


def test_a_copy_takes_prefix_and_site_from_its_first_lines(prefix: Path, tmp_path: Path) -> None:
    script = """
        module load hpcrun && command -v hpcrun && echo "site $HPCRUN_SITE"
        module unload hpcrun
        echo "site ${HPCRUN_SITE-unset}"
    """
    done = shell(script, copied(tmp_path / "tree", prefix, site="alps"), tmp_path)
    assert done.stdout.splitlines() == [str(prefix / "bin" / "hpcrun"), "site alps", "site unset"], (
        done.stderr
    )


@pytest.mark.parametrize("prefix", ["/nowhere", ""])
def test_a_copy_without_the_right_prefix_does_not_load(prefix: str, tmp_path: Path) -> None:
    done = shell("module load hpcrun", copied(tmp_path / "tree", prefix), tmp_path)
    assert done.returncode != 0
    assert "set prefix at the top of" in " ".join(done.stderr.split())


def test_help_and_whatis_say_what_it_is(prefix: Path, tmp_path: Path) -> None:
    done = shell("module help hpcrun; module whatis hpcrun", installed_in(prefix), tmp_path)
    assert "hpcrun submit recipe.yaml" in done.stdout + done.stderr
    assert "multi-node PyTorch training on Slurm" in done.stdout + done.stderr
