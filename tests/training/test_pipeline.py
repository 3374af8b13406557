"""The pipeline's runtime: what it ran, and when."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hpcrun.recipe import Recipe
from hpcrun.schedule import Kind, actions
from tests.ranks import run_ranks
from tests.training.runs import recipe
from training.launch import under_torchrun
from training.train import StopRequest, Trainer


def spans_on(wanted: Recipe, out: str) -> list[list[Any]]:
    """Kind, stage, micro-batch, start and end of each action of the last step, on this rank."""
    launch = under_torchrun(os.environ, Path(out))
    trainer = Trainer(wanted, launch, torch.device("cpu"), StopRequest())
    trainer.train()
    return [
        [span.action.kind, span.action.stage, span.action.micro_batch, span.start, span.end]
        for span in trainer.parts.pipeline.spans
    ]


def test_weight_gradients_are_made_while_another_rank_is_waited_for(tokens: Path, tmp_path: Path) -> None:
    """Under zero bubble a W of the first rank runs while the second is at a later input gradient."""
    wanted = recipe(
        tokens,
        model={"hidden": 256, "heads": 4, "sequence": 64, "layers": 4, "vocab": 61},
        parallel={"pp": 2, "schedule": "zero_bubble"},
        train={"steps": 3, "global_batch": 8, "micro_batch": 1},
        checkpoint={"every": 100},
    )
    first, second = run_ranks(2, spans_on, wanted, str(tmp_path / "run"))
    expected = actions("zero_bubble", 2, 1, 8)
    for found, planned in zip((first, second), expected, strict=True):
        ran = [tuple(span[:3]) for span in found]
        assert ran == [(action.kind, action.stage, action.micro_batch) for action in planned]
    overlapping = [
        (w[2], i[2])
        for w in first
        if w[0] == Kind.WEIGHT
        for i in second
        if i[0] == Kind.INPUT and i[2] > w[2] and w[3] < i[4] and i[3] < w[4]
    ]
    assert overlapping
