"""One training step forward and backward: this rank's list of actions, run in its order.

The lists are :mod:`hpcrun.schedule`'s; a model without a pipeline is a pipeline of one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from hpcrun.recipe import Recipe
from hpcrun.schedule import Action, Kind, actions, rank_of
from hpcrun.timeline import Span
from training.model.micro_batch import MicroBatch
from training.model.transformer import Stage
from training.monitor.stopwatch import watch
from training.parallel.links import Links, Message
from training.parallel.mesh import Mesh
from training.parallel.sharding import Sharding
from training.parallel.tensor import WeightGradients


class Pipeline:
    """This rank's stages.

    Attributes:
        spans: when each action of the last step ran, in seconds of the host's monotonic clock.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        recipe: Recipe,
        mesh: Mesh,
        sharding: Sharding,
        products: WeightGradients,
        micro_batches: int,
    ) -> None:
        parallel, pp = recipe.parallel, mesh.layout.pp
        self._stages, self._mesh, self._sharding, self._products = stages, mesh, sharding, products
        self._count, self._last = micro_batches, parallel.stages - 1
        self._lists = actions(parallel.schedule, pp, parallel.stages_per_rank, micro_batches)
        self._rank_of = [
            rank_of(parallel.schedule, pp, parallel.stages_per_rank, stage)
            for stage in range(parallel.stages)
        ]
        self.spans: list[Span] = []

    def run(self, batch: Sequence[MicroBatch], scale: float) -> torch.Tensor:
        """Leave the gradients of ``scale`` times the sum of all losses with the sharding.

        Returns:
            That sum over this rank's tokens, fp64; zero where the last stage is elsewhere.
        """
        step = _Step(self, batch, scale)
        self._sharding.start_step()
        self.spans = []
        run: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: step.forward,
            Kind.BACKWARD: step.backward,
            Kind.INPUT: step.backward_input,
            Kind.WEIGHT: step.backward_weight,
        }
        for action in self._lists[self._mesh.at.pp]:
            start = time.perf_counter()
            with watch("forward" if action.kind is Kind.FORWARD else "backward"):
                run[action.kind](action)
            self.spans.append(Span(action, start, time.perf_counter()))
        step.links.finish()
        self._sharding.finish()
        return step.loss


class _Step:
    """What lives from a micro-batch's forward to the end of its backward."""

    def __init__(self, pipeline: Pipeline, batch: Sequence[MicroBatch], scale: float) -> None:
        self._stages, self._last = pipeline._stages, pipeline._last
        self._sharding, self._products = pipeline._sharding, pipeline._products
        self._batch, self._scale = batch, scale
        like = next(iter(self._stages.values())).boundary(batch[0])
        self.links = Links(pipeline._mesh, pipeline._lists, pipeline._rank_of, like)
        self.loss = torch.zeros((), dtype=torch.float64, device=like.device)
        self._alive: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._kept: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def forward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        x = None
        if stage:
            x = self.links.take(Message(True, stage, number)).detach().requires_grad_()
        out = self._stages[stage](x, self._batch[number])
        self._alive[stage, number] = (x, out)
        if stage < self._last:
            self.links.send(Message(True, stage + 1, number), out.detach())
        else:
            self.loss += out.detach()

    def backward(self, action: Action, split: bool = False) -> None:
        stage, number = action.stage, action.micro_batch
        x, out = self._alive.pop((stage, number))
        if stage < self._last:
            grad = self.links.take(Message(False, stage, number))
        else:
            grad = torch.full_like(out, self._scale)
        self._sharding.begin_backward(last=number == len(self._batch) - 1, split=split)
        torch.autograd.backward(out, grad)
        if x is not None:
            assert x.grad is not None
            self.links.send(Message(False, stage - 1, number), x.grad)
        if not split:
            self._sharding.end_backward(self._stages[stage].units)

    def backward_input(self, action: Action) -> None:
        with self._products.keep() as kept:
            self.backward(action, split=True)
        self._kept[action.stage, action.micro_batch] = kept

    def backward_weight(self, action: Action) -> None:
        units = self._stages[action.stage].units
        self._sharding.prepare(units)
        with torch.no_grad():
            for product in self._kept.pop((action.stage, action.micro_batch)):
                product()
        self._sharding.begin_backward(last=action.micro_batch == len(self._batch) - 1, split=False)
        self._sharding.end_backward(units)
