"""Which package may import what. The contracts stand in pyproject.toml; docs/design.md says why."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACT = {
    "hpcrun.bench.interleave",
    "hpcrun.blocks",
    "hpcrun.config",
    "hpcrun.counts",
    "hpcrun.errors",
    "hpcrun.hardware",
    "hpcrun.layout",
    "hpcrun.manifest",
    "hpcrun.recipe",
    "hpcrun.records",
    "hpcrun.retention",
    "hpcrun.schedule",
    "hpcrun.shardfile",
    "hpcrun.timeline",
    "hpcrun.units",
}
SUBMITIT_USERS = {Path("hpcrun/launch/executor.py"), Path("hpcrun/launch/local.py")}


def modules(package: str, root: Path = ROOT) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((root / package).rglob("*.py")):
        yield path.relative_to(root), ast.parse(path.read_text(encoding="utf-8"))


def imported(nodes: list[ast.stmt] | Iterator[ast.AST]) -> set[str]:
    """Names of the modules that import statements among ``nodes`` name."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= (
                {node.module} if node.module != "hpcrun" else {f"hpcrun.{alias.name}" for alias in node.names}
            )
    return names


def at_import_time(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Statements that run when a module is imported: all but the bodies of functions."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from at_import_time(
                [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            )


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_import_linter_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_contract_is_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("hpcrun", "training"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "hpcrun" / "units.py").open("a") as file:
        file.write("\n\ndef f() -> None:\n    import torch\n\n    from hpcrun import cli\n")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "hpcrun never imports torch or the trainer BROKEN" in done.stdout
    assert "arrows run downward BROKEN" in done.stdout


def test_hpcrun_never_imports_torch() -> None:
    found = {str(path) for path, tree in modules("hpcrun") if "torch" in tops(imported(ast.walk(tree)))}
    assert found == set()


def test_submitit_is_loaded_only_where_jobs_are_submitted() -> None:
    found = {
        path for path, tree in modules("hpcrun") if "submitit" in tops(imported(at_import_time(tree.body)))
    }
    assert found <= SUBMITIT_USERS


def test_the_trainer_imports_only_the_contract() -> None:
    found = {
        f"{path}: {name}"
        for path, tree in modules("training")
        for name in imported(ast.walk(tree))
        if name.split(".")[0] == "hpcrun" and name not in CONTRACT | {"hpcrun.__version__"}
    }
    assert found == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("from submitit import x", {"submitit"}),
        ("from hpcrun import sites, cli", {"hpcrun.sites", "hpcrun.cli"}),
        ("try:\n    import torch\nexcept ImportError:\n    pass", {"torch"}),
        ("class A:\n    import torch", {"torch"}),
        ("def f():\n    import torch", set()),
    ],
)
def test_imports_are_seen(source: str, found: set[str]) -> None:
    assert imported(at_import_time(ast.parse(source).body)) == found
