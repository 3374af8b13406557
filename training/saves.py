"""When the trainer saves, what it says about it, and what a failed save means for the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hpcrun.layout import Layout
from hpcrun.recipe import Recipe
from training.checkpoint.interval import Interval
from training.checkpoint.local import LocalTensor
from training.checkpoint.save import Facts
from training.checkpoint.saver import Retention, SaveError, Saver, Superseded
from training.launch import Launch


class Saves:
    """The saves of a run's ranks, by the recipe's ``checkpoint`` section. Methods are collective.

    Args:
        event: writes one event of the run, on rank 0.
    """

    def __init__(self, recipe: Recipe, launch: Launch, layout: Layout, event: Callable[..., None]) -> None:
        self._recipe, self._launch, self._layout, self._event = recipe, launch, layout, event
        wanted = recipe.checkpoint
        self._interval = Interval(wanted, recipe.resources.nodes, recipe.recovery.node_failures_per_year)
        self._saver = Saver(wanted.timeout, Retention(wanted.keep, wanted.keep_every, wanted.keep_best))

    def due(self, step: int) -> bool:
        """Rank 0's opinion, which has to reach all ranks: whether to save after ``step``."""
        return self._launch.rank == 0 and self._interval.due(step)

    @property
    def decided(self) -> bool:
        """Rank 0's knowledge, which has to reach all ranks: the save in flight has ended."""
        return self._launch.rank == 0 and self._saver.done

    def save(self, step: int, state: dict[str, Any], tensors: list[LocalTensor], must: bool) -> None:
        """Save the values of now. ``must``: return when they are on disk, or raise.

        Raises:
            Superseded: another attempt holds the run.
            SaveError: a save failed that had to be made, or the recipe says to stop then.
        """
        if self._saver.in_flight:
            if not must and self._recipe.checkpoint.busy == "skip":
                self._event("checkpoint_skipped", step=step, reason="the one before has not ended")
                return
            began = time.monotonic()
            self.conclude()
            self._event("checkpoint_waited", step=step, seconds=round(time.monotonic() - began, 3))
        launch = self._launch
        facts = Facts(
            run=launch.run,
            step=step,
            attempt=launch.attempt,
            claim=launch.claim,
            layout=asdict(self._layout),
            model=self._recipe.model.model_dump(),
            state=state,
        )
        self._interval.started()
        background = self._recipe.checkpoint.background and not must
        self._saver.start(facts, tensors, background=background)
        if not background:
            self.conclude(must)

    def conclude(self, must: bool = False) -> None:
        """Wait for the end of the save in flight, and say what came of it."""
        step = self._saver.step
        try:
            saved = self._saver.finish()
        except Superseded:
            raise
        except SaveError as error:
            self._event("checkpoint_failed", step=step, reason=str(error))
            if must or self._recipe.checkpoint.on_failure == "stop":
                raise
            with suppress(OSError):
                print(f"hpcrun: step {step}: no checkpoint: {error}", file=sys.stderr)
            return
        self._interval.measured(saved.stall, saved.seconds)
        self._event(
            "checkpoint_saved",
            step=step,
            folder=saved.facts.folder.name,
            bytes=saved.bytes,
            seconds=round(saved.seconds, 3),
            stall_s=round(saved.stall, 3),
        )

    def drain(self) -> None:
        """Before this rank ends with an error: let it do its part of the save in flight."""
        self._saver.drain()
