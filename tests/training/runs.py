"""Short training runs inside ranks of a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hpcrun.recipe import Recipe
from hpcrun.records import RunDir, read_json_lines
from training.launch import under_torchrun
from training.train import StopRequest, Trainer

MODEL = {"layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocab": 61}


def recipe(tokens: Path, **sections: dict[str, Any]) -> Recipe:
    """A small recipe; ``sections`` add to or replace keys of its own."""
    base: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "data": {"path": str(tokens)},
        "train": {"steps": 4, "global_batch": 16, "micro_batch": 2, "lr": 1e-2, "warmup_steps": 2},
        "checkpoint": {"every": 2, "keep": None},
    }
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    return Recipe.model_validate(merged)


def train_here(wanted: Recipe, out: Path) -> int:
    """Train on this rank to the end; metrics and checkpoints go to ``out``."""
    launch = under_torchrun(os.environ, out)
    return Trainer(wanted, launch, torch.device("cpu"), StopRequest()).train()


def train_on(wanted: Recipe, out: str) -> int:
    """:func:`train_here` for ``run_ranks``."""
    return train_here(wanted, Path(out))


def curve(out: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every logged step; a later attempt's wins."""
    lines = {line["step"]: line for line in read_json_lines(out / "metrics.jsonl")}
    return [(step, lines[step]["loss"], lines[step]["grad_norm"]) for step in sorted(lines)]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in RunDir(out).checkpoints.iterdir())
