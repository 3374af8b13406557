"""The wheel: complete, without torch, and deaf to what lies in the user's folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpcrun import __version__
from tests.cluster import Cluster
from tests.installed import ROOT, Installed

DATA = {
    "site_configs": "site_configs",
    "sbatch_templates": "sbatch_templates",
    "modules": "modules",
    "recipes": "training/recipes",
}


@pytest.fixture(scope="module")
def login_node(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A real ``pip install`` of the wheel and what it asks for: no torch."""
    made = Installed(tmp_path_factory.mktemp("login") / "venv")
    for command in (
        [sys.executable, "-m", "venv", str(made.prefix)],
        [str(made.python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    return made


def run(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def shipped(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_both_packages_and_the_data_folders(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name, checkout in DATA.items():
        prefix = f"hpcrun/_data/{name}/"
        packed = {entry.removeprefix(prefix) for entry in names if entry.startswith(prefix)}
        assert packed == shipped(ROOT / checkout) != set()
    for package in ("hpcrun", "training"):
        sources = {f"{package}/{name}" for name in shipped(ROOT / package) if name.endswith(".py")}
        assert sources
        assert sources <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"hpcrun", "training", f"hpcrun-{__version__}.dist-info"}
    assert not any(name.startswith("training/recipes/") for name in names)
    assert f"hpcrun-{__version__}.dist-info/licenses/LICENSE" in names


def test_it_finds_its_data_from_an_empty_folder(login_node: Installed, tmp_path: Path) -> None:
    script = f"from hpcrun.datafiles import data_folder\nfor name in {list(DATA)!r}: print(data_folder(name))"
    done = run([str(login_node.python), "-P", "-c", script], tmp_path)
    data = login_node.site_packages / "hpcrun" / "_data"
    assert done.stdout.splitlines() == [str(data / name) for name in DATA], done.stderr


def test_it_checks_shipped_recipes_without_torch(login_node: Installed, tmp_path: Path) -> None:
    assert not (login_node.site_packages / "torch").exists()
    recipes = sorted((login_node.site_packages / "hpcrun" / "_data" / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        done = run([*login_node.hpcrun, "recipe", "check", str(recipe)], tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", ["script", "-m"])
def test_files_of_the_user_do_not_shadow_ours(login_node: Installed, tmp_path: Path, way: str) -> None:
    """Field report: user-site-shadows (numpy.py or secrets.py in the working folder)."""
    for name in ("training/__init__.py", "numpy.py", "secrets.py", "click.py", "yaml.py", "json.py", "re.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise RuntimeError('the {name} of the user was imported')\n")
    (tmp_path / "r.yaml").write_text("name: mine\n")
    start = login_node.hpcrun if way == "script" else [str(login_node.python), "-m", "hpcrun"]
    done = run([*start, "recipe", "check", "r.yaml", "--world", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout


@pytest.mark.slurm
def test_the_ordinary_user_has_wheel_and_trainer_on_login_and_compute_nodes(
    installed: Installed, cluster: Cluster
) -> None:
    script = (
        "import hpcrun, importlib.util as find\n"
        "print(hpcrun.__file__, find.find_spec('training').origin, find.find_spec('torch').origin, sep='\\n')"
    )
    python = [str(installed.python), "-P", "-c", script]
    expected = [
        str(installed.site_packages / "hpcrun" / "__init__.py"),
        str(installed.site_packages / "training" / "__init__.py"),
        str(cluster.folder / "deps" / "torch" / "__init__.py"),
    ]
    for place in ([], ["srun", "-N1", "-t1"]):
        assert cluster.run([*place, *python], timeout=60).stdout.splitlines() == expected
    assert cluster.run([*installed.hpcrun, "--version"]).stdout.split()[-1] == __version__
