"""Gradients and weights over the data ranks: plain data parallelism, and ZeRO 1 to 3
(Rajbhandari et al., 1910.02054), over all data ranks or in groups (hybrid, Zhao et al., 2304.11277).

Matrices are cut into whole rows, so that a shard is a rectangle; vectors are never cut. The matrices
of one unit, a transformer block, are one bucket. Gradients are sums, not means: the loss is divided
by the tokens of the whole batch.

| zero | a rank keeps                          | reduced over the group                     |
|------|---------------------------------------|--------------------------------------------|
| 0    | everything                            | in the last micro-batch, block by block    |
| 1    | a shard of the optimizer's state      | likewise                                   |
| 2    | and of the gradients                  | in every micro-batch                       |
| 3    | and of the weights, gathered per unit | in every micro-batch                       |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from training.parallel.collectives import all_reduce_start
from training.parallel.mesh import Mesh, size_of
from training.parallel.parameters import ModelParameter
from training.parallel.units import Bucket, Matrix, Shard, Unit


class _Border(torch.autograd.Function):
    """Identity that calls when the backward passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passed: Callable[[], None]) -> torch.Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.passed()
        return grads[0], None


class Sharding:
    """All units of this rank, their shards, and the collectives of the data dimension."""

    def __init__(self, mesh: Mesh, zero: int, offload: bool) -> None:
        self._mesh, self._zero, self._offload = mesh, zero, offload
        self.units: list[Unit] = []
        self.shards: list[Shard] = []
        self._vectors: list[Shard] = []
        self._owners: dict[ModelParameter, Unit] = {}
        self._last = self._split = False
        self._reducing: deque[Unit] = deque()
        self._passive = zero == 0 and mesh.layout.data == 1

    def adopt(self, stage: int, parameters: Iterable[ModelParameter]) -> Unit:
        """Make a unit of ``parameters``; those that another unit has already are shared with it."""
        borrowed: list[Unit] = []
        matrices: dict[bool, list[ModelParameter]] = {}
        for parameter in parameters:
            if parameter in self._owners:
                self._owners[parameter].late = True
                borrowed.append(self._owners[parameter])
            elif parameter.dim() == 1:
                self._vectors.append(self._shard(parameter, parameter.detach(), 0, parameter.shape[0]))
            else:
                matrices.setdefault(parameter.expert, []).append(parameter)
        buckets = [self._bucket(same) for same in matrices.values()]
        unit = Unit(stage, buckets, borrowed, late=self._passive)
        self._owners |= {parameter: unit for same in matrices.values() for parameter in same}
        self.units.append(unit)
        return unit

    def _bucket(self, parameters: list[ModelParameter]) -> Bucket:
        group, replicas = self._groups(parameters[0])
        matrices = [Matrix(parameter, self._zero, group) for parameter in parameters]
        shards = [self._shard(one.parameter, one.part, one.start, one.stop) for one in matrices]
        return Bucket(matrices, shards, self._zero >= 2, group, replicas)

    def _shard(self, parameter: ModelParameter, part: torch.Tensor, start: int, stop: int) -> Shard:
        shard = Shard(parameter, part, start, stop, self._mesh, self._offload)
        shard.replicas = size_of(self._replicas(parameter))
        self.shards.append(shard)
        return shard

    def enter(self, unit: Unit, x: torch.Tensor | None) -> torch.Tensor | None:
        """Before a unit computes forward; passed last in its backward. ``x`` is None in the first."""
        if self._passive:
            return x
        unit.gather()
        self._neighbour(unit, 1)
        if x is None:
            return None
        out: torch.Tensor = _Border.apply(x, lambda: self._backward_done(unit))
        return out

    def leave(self, unit: Unit, x: torch.Tensor) -> torch.Tensor:
        """After a unit has computed forward; passed first in its backward."""
        if self._passive:
            return x
        unit.release()
        out: torch.Tensor = _Border.apply(x, lambda: self._backward_begins(unit))
        return out

    def start_step(self) -> None:
        """Clear the gradients."""
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.start_step()
        for shard in self._vectors:
            if shard.parameter.grad is None:
                shard.parameter.grad = torch.zeros_like(shard.parameter)
            else:
                shard.parameter.grad.zero_()

    def begin_backward(self, last: bool, split: bool) -> None:
        """Of one stage: ``last`` of its micro-batches in this step; ``split`` leaves weights for later."""
        self._last, self._split = last, split

    def end_backward(self, units: list[Unit]) -> None:
        """The weight gradients of a stage with ``units`` are complete for one micro-batch."""
        for unit in units:
            self._done(unit)

    def prepare(self, units: list[Unit]) -> None:
        """Before weight gradients that were left for later are made."""
        for unit in units:
            unit.prepare()

    def finish(self) -> None:
        """Complete all gradients: after it each shard's is the sum over the whole batch."""
        self._reducing.clear()
        for unit in self.units:
            unit.finish()
        for shard in self._vectors:
            shard.grad = shard.parameter.grad
        self._sum_replicas()
        self._sum_partial()
        self._sum_tied()

    def square(self) -> torch.Tensor:
        """This rank's part of the squared norm of the gradient, fp64: summed over the world, each
        element counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for shard in self.shards:
            assert shard.grad is not None
            for piece in shard.pieces:
                norm = torch.linalg.vector_norm(piece.of(shard.grad)).double()
                total += norm.square() / shard.holders(piece)
        return total

    def publish(self) -> None:
        """After the optimizer's step, bring the weights that ranks compute with up to date."""
        for shard in self.shards:
            shard.publish()
        matrices = [matrix for unit in self.units for bucket in unit.buckets for matrix in bucket.matrices]
        for pending in [matrix.publish_start() for matrix in matrices]:
            pending.wait()

    def _backward_begins(self, unit: Unit) -> None:
        unit.gather()
        unit.prepare()
        self._neighbour(unit, -1)

    def _backward_done(self, unit: Unit) -> None:
        if self._split:
            unit.release()
        else:
            self._done(unit)

    def _done(self, unit: Unit) -> None:
        """Under zero 2 and 3 the sum of one unit travels while the next computes, and no longer."""
        unit.done(self._last)
        if self._zero >= 2:
            self._reducing.append(unit)
            if len(self._reducing) > 1:
                self._reducing.popleft().collect()

    def _neighbour(self, unit: Unit, step: int) -> None:
        """Under zero 3, begin to gather what is needed next."""
        if self._zero == 3:
            place = self.units.index(unit) + step
            if 0 <= place < len(self.units) and self.units[place].stage == unit.stage:
                self.units[place].gather_start()

    def _groups(self, parameter: ModelParameter) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Where a matrix is sharded, and where its shards have replicas."""
        mesh = self._mesh
        if self._zero == 0:
            return None, mesh.expert_data if parameter.expert else mesh.data
        if parameter.expert:
            return mesh.expert_shard, mesh.expert_replicas
        return mesh.shard, mesh.replicas

    def _replicas(self, parameter: ModelParameter) -> dist.ProcessGroup | None:
        return self._mesh.data if parameter.dim() == 1 else self._groups(parameter)[1]

    def _sum_replicas(self) -> None:
        by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        for bucket in (bucket for unit in self.units for bucket in unit.buckets):
            if bucket.late_replicas is not None:
                grads = [shard.grad for shard in bucket.shards if shard.grad is not None]
                by_group.setdefault(bucket.late_replicas, []).extend(grads)
        vectors = [shard.grad for shard in self._vectors if shard.grad is not None]
        if self._mesh.data is not None and vectors:
            by_group.setdefault(self._mesh.data, []).extend(vectors)
        for group, grads in by_group.items():
            all_reduce_together(grads, group)

    def _sum_partial(self) -> None:
        """What each holder has only a part of: norms under sequence parallelism, copied key heads."""
        for holders, group in (("tp", self._mesh.tp), ("kv", self._mesh.kv)):
            parts = [
                piece.of(shard.grad)
                for shard in self.shards
                for piece in shard.pieces
                if piece.partial and piece.holders == holders and shard.grad is not None
            ]
            if group is not None and parts:
                all_reduce_together(parts, group)

    def _sum_tied(self) -> None:
        tied = [shard.grad for shard in self.shards if shard.parameter.tied and shard.grad is not None]
        if tied and self._mesh.tied is not None:
            all_reduce_together(tied, self._mesh.tied)


def all_reduce_together(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum several tensors in place in one collective."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        all_reduce_start(tensors[0], group).wait()
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce_start(flat, group).wait()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
