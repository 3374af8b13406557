"""The pipeline's runtime: what it ran, and what waits for what."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hpcrun.recipe import Recipe
from hpcrun.schedule import Action, Kind, actions
from tests.ranks import run_ranks
from tests.training.runs import recipe
from training.launch import under_torchrun
from training.parallel.pipeline import _Step
from training.train import StopRequest, Trainer

MICRO_BATCHES = 8
LISTS = actions("zero_bubble", 2, 1, MICRO_BATCHES)
RUNNING = "the first rank makes a weight gradient"


def ran_with_the_second_rank_held(wanted: Recipe, out: str) -> list[list[Any]]:
    """Kind, stage and micro-batch of each action of the last step, on this rank.

    The second rank does not begin the input gradient that the first awaits after its first W,
    until that W is running.
    """
    order = LISTS[0]
    after = order[[action.kind for action in order].index(Kind.WEIGHT) :]
    awaited = next(action.micro_batch for action in after if action.kind is Kind.INPUT)
    store = dist.distributed_c10d._get_default_store()
    weight, gradient = _Step.backward_weight, _Step.backward_input

    def say_so(step: _Step, action: Action) -> None:
        store.set(RUNNING, "yes")
        weight(step, action)

    def wait_for_it(step: _Step, action: Action) -> None:
        if action.micro_batch == awaited:
            store.wait([RUNNING], timedelta(seconds=20))
        gradient(step, action)

    patch = ("backward_input", wait_for_it) if dist.get_rank() else ("backward_weight", say_so)
    with mock.patch.object(_Step, *patch):
        trainer = Trainer(wanted, under_torchrun(os.environ, Path(out)), torch.device("cpu"), StopRequest())
        trainer.train()
    spans = trainer.parts.pipeline.spans
    return [[span.action.kind, span.action.stage, span.action.micro_batch] for span in spans]


def test_weight_gradients_are_made_while_another_rank_is_waited_for(tokens: Path, tmp_path: Path) -> None:
    """Under zero bubble the first rank makes a W before the second has begun a later input gradient."""
    wanted = recipe(
        tokens,
        parallel={"pp": 2, "schedule": "zero_bubble"},
        train={"steps": 1, "global_batch": MICRO_BATCHES, "micro_batch": 1},
        checkpoint={"every": 100},
    )
    ran = run_ranks(2, ran_with_the_second_rank_held, wanted, str(tmp_path / "run"))
    for found, planned in zip(ran, LISTS, strict=True):
        assert found == [[action.kind, action.stage, action.micro_batch] for action in planned]
