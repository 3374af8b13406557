"""A copy of the user's code as it is at submission: what runs is what was submitted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.records import RunDir, replace_text
from hpcrun.units import show_bytes

LARGEST = 200 << 20
_TIMEOUT = 60


@dataclass(frozen=True)
class Tree:
    """A git work tree and the files in it that git does not ignore, relative to its root."""

    root: Path
    files: list[str]
    revision: str | None
    dirty: bool

    @property
    def bytes(self) -> int:
        return sum(self.size(name) for name in self.files)

    def size(self, name: str) -> int:
        return (self.root / name).lstat().st_size


def find_tree(folder: Path) -> Tree | None:
    """The git tree that ``folder`` is in, or None.

    Raises:
        UserError: more than 200 MiB; names the largest files.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        return None
    root = Path(top.rstrip("\n"))
    revision = _git(root, "rev-parse", "HEAD")
    dirty = bool(_git(root, "status", "--porcelain"))
    tree = Tree(root, _listed(root), revision.strip() if revision else None, dirty)
    if tree.bytes > LARGEST:
        largest = sorted(tree.files, key=tree.size, reverse=True)[:3]
        named = ", ".join(f"{name} ({show_bytes(tree.size(name))})" for name in largest)
        raise UserError(
            f"{root}: the code snapshot would be {show_bytes(tree.bytes)}, above {show_bytes(LARGEST)}; "
            f"the largest files are {named}: add them to .gitignore or submit with --no-snapshot"
        )
    return tree


def copy_tree(tree: Tree, run: RunDir) -> None:
    """Copy the tree's files, uncommitted changes included, into ``code/``; links stay links."""
    for name in tree.files:
        target = run.code / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree.root / name, target, follow_symlinks=False)
    facts = {"root": str(tree.root), "revision": tree.revision, "dirty": tree.dirty, "files": len(tree.files)}
    replace_text(run.path / "code.json", json.dumps(facts, indent=1) + "\n")


def _listed(root: Path) -> list[str]:
    """Files as they are on disk now: tracked or new, not ignored, submodules' included."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate") or ""
    found: list[str] = []
    for name in filter(None, listed.split("\0")):
        path = root / name
        if path.is_dir() and not path.is_symlink():
            # A submodule, or a repository inside the tree, is listed as one folder.
            found += [f"{name.rstrip('/')}/{inner}" for inner in _listed(path)]
        elif os.path.lexists(path):
            found.append(name)
    return found


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git in ``folder``; None when it is not a work tree, or there is no git."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, capture_output=True, timeout=_TIMEOUT
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{folder}: git {arguments[0]} took longer than {_TIMEOUT} s") from error
    return os.fsdecode(done.stdout) if done.returncode == 0 else None
