"""One training step forward and backward: over pipeline stages, or alone.

Schedules come from ``torch.distributed.pipelining``: GPipe (Huang et al., 2019) and
1F1B (Narayanan et al., 2019).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hpcrun.recipe import Recipe
from training.model.transformer import Stage
from training.parallel.mesh import Mesh

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Runner(Protocol):
    """Runs the micro-batches of one step and leaves the gradients of their mean loss."""

    def run(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """``tokens`` (micro-batches x batch, sequence + 1); the mean loss on the last stage, else None."""


class SingleStage:
    """Gradient accumulation without a pipeline."""

    def __init__(self, stage: Stage, micro_batches: int) -> None:
        self._stage, self._micro_batches = stage, micro_batches

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in tokens.chunk(self._micro_batches):
            loss = self._stage.loss(self._stage(part[:, :-1]), part[:, 1:]) / self._micro_batches
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


class Pipeline:
    """One stage of a pipeline schedule."""

    def __init__(self, stage: Stage, recipe: Recipe, mesh: Mesh, micro_batches: int) -> None:
        self._mesh = mesh
        model, batch = recipe.model, recipe.train.micro_batch
        tokens = torch.zeros(batch, model.sequence, dtype=torch.long, device="meta")
        hidden = torch.zeros(batch, model.sequence, model.hidden, device="meta", requires_grad=True)
        logits = torch.zeros(batch, model.sequence, _local_vocab(stage), device="meta", requires_grad=True)
        pipeline_stage = PipelineStage(
            stage,
            mesh.at.pp,
            mesh.layout.pp,
            mesh.device,
            input_args=(tokens if mesh.first_stage else hidden,),
            output_args=(logits if mesh.last_stage else hidden,),
            group=mesh.pp,
        )

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return stage.loss(output, target) / micro_batches

        self._schedule = _SCHEDULES[recipe.parallel.schedule](
            pipeline_stage, micro_batches, loss_fn=loss, scale_grads=False
        )

    def run(self, tokens: torch.Tensor) -> torch.Tensor | None:
        inputs, target = tokens[:, :-1], tokens[:, 1:]
        if self._mesh.first_stage:
            self._schedule.step(inputs)
            return None
        if not self._mesh.last_stage:
            self._schedule.step()
            return None
        losses: list[torch.Tensor] = []
        self._schedule.step(target=target, losses=losses)
        return torch.stack([loss.detach() for loss in losses]).sum()


def make_runner(stage: Stage, recipe: Recipe, mesh: Mesh, micro_batches: int) -> Runner:
    """What runs the micro-batches of one step on this rank."""
    if mesh.layout.pp == 1:
        return SingleStage(stage, micro_batches)
    return Pipeline(stage, recipe, mesh, micro_batches)


def _local_vocab(stage: Stage) -> int:
    return stage.head.weight.shape[0] if stage.head is not None else 0
