"""hpcrun from its wheel, as the ordinary user of the test cluster has it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import Cluster

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Installed:
    """A virtual environment that holds the wheel."""

    prefix: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def hpcrun(self) -> list[str]:
        """The console script, to put arguments behind."""
        return [str(self.prefix / "bin" / "hpcrun")]

    @property
    def site_packages(self) -> Path:
        return self.prefix / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    _call([sys.executable, "-m", "build", "--wheel", "--no-isolation", f"--outdir={folder}", str(ROOT)])
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(cluster: Cluster, wheel: Path) -> Installed:
    """The wheel with all its dependencies, where every user of the cluster's nodes can run it.

    It lies in the cluster's state folder, since the nodes have a /tmp of their own and the
    checkout may be root's alone. Taking the cluster down removes it.
    """
    dependencies = cluster.folder / "deps"
    _link_tree(Path(sysconfig.get_path("purelib")), dependencies)
    return install(wheel, cluster.folder / "app", _python_for_everyone(), dependencies)


def install(wheel: Path, prefix: Path, python: Path, dependencies: Path) -> Installed:
    """``wheel`` in a new virtual environment of ``python``; ``dependencies`` follow it on sys.path."""
    made = Installed(prefix)
    _call([str(python), "-m", "venv", "--without-pip", str(prefix)])
    pip = [sys.executable, "-m", "pip", f"--python={made.python}", "install", "--quiet"]
    _call([*pip, "--no-deps", "--no-index", str(wheel)])
    (made.site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return made


def _link_tree(source: Path, target: Path) -> None:
    """A copy by hard links, which takes no time and no space; of the bytes on another file system.

    Not a bind mount: the nodes' mount namespaces would not see it, and a removal of the
    cluster's folder would reach through it.
    """
    linked = subprocess.run(["cp", "--archive", "--link", str(source), str(target)], capture_output=True)
    if linked.returncode != 0:
        _call(["rm", "-rf", str(target)])
        _call(["cp", "--archive", "--reflink=auto", str(source), str(target)])


def _python_for_everyone() -> Path:
    """An interpreter of our minor version that any user can run; the one in use may lie in root's home."""
    names = [
        Path(sys.base_prefix) / "bin" / "python3",
        Path("/usr/bin/python3"),
        Path("/usr/local/bin/python3"),
    ]
    # setpriv still has root's capabilities when it starts a program; the program that env starts has not.
    nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--", "env"]
    check = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    for name in names:
        if subprocess.run([*nobody, str(name), "-c", check], capture_output=True).returncode == 0:
            return name
    wanted = sysconfig.get_python_version()
    raise AssertionError(f"no Python {wanted} that every user can run: {', '.join(map(str, names))}")


def _call(argv: list[str]) -> None:
    """Run a command of ours; what it makes is readable to all."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, umask=0o022)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
