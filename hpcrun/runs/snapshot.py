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
    files: list[bytes]
    revision: str | None
    dirty: bool

    @property
    def bytes(self) -> int:
        return sum(_size(self.root, name) for name in self.files)


def find_tree(folder: Path) -> Tree | None:
    """The git tree that ``folder`` is in, or None.

    Raises:
        UserError: more than 200 MiB; names the largest files.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        return None
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    files = [
        name
        for name in (listed or b"").split(b"\0")
        if name and os.path.lexists(os.fsencode(root) + b"/" + name)
    ]
    files = [name for part in files for name in _with_submodule(root, part)]
    revision = _git(root, "rev-parse", "HEAD")
    dirty = bool(_git(root, "status", "--porcelain"))
    tree = Tree(root, files, revision.decode().strip() if revision else None, dirty)
    if tree.bytes > LARGEST:
        largest = sorted(files, key=lambda name: _size(root, name), reverse=True)[:3]
        named = ", ".join(f"{os.fsdecode(name)} ({show_bytes(_size(root, name))})" for name in largest)
        raise UserError(
            f"{root}: the code snapshot would be {show_bytes(tree.bytes)}, above {show_bytes(LARGEST)}; "
            f"the largest files are {named}: add them to .gitignore or submit with --no-snapshot"
        )
    return tree


def copy_tree(tree: Tree, run: RunDir) -> None:
    """Copy the tree's files, uncommitted changes included, into ``code/``."""
    source, target = os.fsencode(tree.root), os.fsencode(run.code)
    for name in tree.files:
        destination = target + b"/" + name
        os.makedirs(os.path.dirname(destination), exist_ok=True)
        shutil.copy2(source + b"/" + name, destination, follow_symlinks=False)
    facts = {"root": str(tree.root), "revision": tree.revision, "dirty": tree.dirty, "files": len(tree.files)}
    replace_text(run.path / "code.json", json.dumps(facts, indent=1) + "\n")


def _with_submodule(root: Path, name: bytes) -> list[bytes]:
    """git lists a submodule, or a repository inside the tree, as one folder."""
    path = root / os.fsdecode(name)
    if path.is_symlink() or not path.is_dir():
        return [name]
    inner = _git(path, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate") or b""
    prefix = name.rstrip(b"/") + b"/"
    return [prefix + part for part in inner.split(b"\0") if part and (path / os.fsdecode(part)).is_file()]


def _size(root: Path, name: bytes) -> int:
    return os.lstat(os.fsencode(root) + b"/" + name).st_size


def _git(folder: Path, *arguments: str) -> bytes | None:
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
    return done.stdout if done.returncode == 0 else None
