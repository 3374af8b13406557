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
from torch import nn

from training.parallel.collectives import Pending, all_reduce_start, gather_start, reduce_scatter_start
from training.parallel.mesh import Mesh, index_in, size_of
from training.parallel.parameters import ModelParameter
from training.parallel.pieces import Piece, copies


class Shard:
    """The rows of one parameter that this rank's optimizer updates.

    Attributes:
        pieces: what the rows are, counted from the shard's first.
        values: the weights, where the optimizer keeps them: in host memory under offload.
        grad: their gradient on the device, None before the first micro-batch of a step.
        replicas: data ranks that hold the same rows.
    """

    def __init__(
        self, parameter: ModelParameter, part: torch.Tensor, start: int, stop: int, mesh: Mesh, host: bool
    ) -> None:
        self.parameter = parameter
        self.pieces = [
            piece for whole in parameter.pieces if (piece := whole.narrow(start, stop)) is not None
        ]
        self.device_values = part[: stop - start]
        values = self.device_values.detach()
        self.values = nn.Parameter(values.to("cpu", copy=True) if host else values, requires_grad=True)
        self.host = host
        self.grad: torch.Tensor | None = None
        self.replicas = 1
        self._mesh = mesh

    def holders(self, piece: Piece) -> int:
        """Ranks of the world that hold the same values."""
        tied = 2 if self.parameter.tied else 1
        return self.replicas * tied * copies(piece, self._mesh)

    def publish(self) -> None:
        """Bring the device's weights up to date after an optimizer step."""
        if self.host:
            self.device_values.copy_(self.values.detach())


class _Matrix:
    """One matrix of a unit, in equal parts over the shard group; the last parts may be padding."""

    def __init__(self, parameter: ModelParameter, zero: int, group: dist.ProcessGroup | None) -> None:
        self.parameter, self.group, self.gathers = parameter, group, zero == 3
        rows, columns = parameter.shape
        each = -(-rows // size_of(group))
        index = index_in(group)
        self.rows = rows
        self.padded = (each * size_of(group), columns)
        self.start, self.stop = (min(row, rows) for row in (index * each, (index + 1) * each))
        full = parameter.detach().new_zeros(self.padded)
        full[:rows].copy_(parameter.detach())
        part = full[index * each : (index + 1) * each]
        self.part = part.clone() if self.gathers else part
        self._users = 0
        self._gathering: Pending | None = None
        parameter.data = full[: 0 if self.gathers else rows]
        self._full = None if self.gathers else full

    def gather_start(self) -> None:
        """Begin to make the whole matrix available; ends with :meth:`release`."""
        self._users += 1
        if self.gathers and self._users == 1:
            full = self.part.new_empty(self.padded)
            self._gathering = gather_start(self.part, self.group, out=full)

    def gather_wait(self) -> None:
        if self._gathering is not None:
            self.parameter.data = self._gathering.wait()[: self.rows]
            self._gathering = None

    def release(self) -> None:
        self.gather_wait()
        self._users -= 1
        if self.gathers and not self._users:
            self.parameter.data = self.part.new_empty(0, self.padded[1])

    def publish_start(self) -> Pending:
        """Gather the updated rows of all ranks where each keeps the whole matrix."""
        if self._full is None or self.group is None:
            return Pending(self.part)
        return gather_start(self.part.clone(), self.group, out=self._full)


class _Bucket:
    """The matrices of a unit that are sharded alike; their gradients lie one after the other."""

    def __init__(
        self,
        matrices: list[_Matrix],
        shards: list[Shard],
        transient: bool,
        group: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        self.matrices, self.shards, self._transient = matrices, shards, transient
        self._group, self._replicas = group, replicas
        self._sizes = [matrix.padded[0] * matrix.padded[1] for matrix in matrices]
        self._flat: torch.Tensor | None = None
        self._reducing: list[Pending] = []

    @property
    def late_replicas(self) -> dist.ProcessGroup | None:
        """Where shards are still to be summed when the step ends."""
        return None if self._whole else self._replicas

    @property
    def _whole(self) -> bool:
        """Whether each rank has all rows, so that buckets are summed over the replicas at once."""
        return self._group is None and not self._transient

    def start_step(self) -> None:
        for shard in self.shards:
            shard.grad = None
        if self._flat is not None:
            self._flat.zero_()
        elif not self._transient:
            self.prepare()

    def prepare(self) -> None:
        """Provide gradients of zero to sum into, where there are none."""
        if self._flat is None:
            self._flat = self.matrices[0].part.new_zeros(sum(self._sizes))
            for matrix, flat in zip(self.matrices, self._flat.split(self._sizes), strict=True):
                matrix.parameter.gradient = flat.view(matrix.padded)[: matrix.rows]

    def reduce_start(self, last: bool) -> None:
        """Begin to sum what has come together, if it is time to."""
        if self._flat is None or not (last or self._transient):
            return
        self.collect()
        whole = [
            flat.view(matrix.padded)
            for matrix, flat in zip(self.matrices, self._flat.split(self._sizes), strict=True)
        ]
        if self._whole:
            reduced = all_reduce_start(self._flat, self._replicas)
            self._reducing = [Pending(one, after=reduced) for one in whole]
        else:
            self._reducing = [reduce_scatter_start(one, self._group) for one in whole]
        if self._transient:
            self._flat = None
            for matrix in self.matrices:
                matrix.parameter.gradient = None

    def collect(self) -> None:
        """Wait for what is being summed, and add it to the shards."""
        for matrix, shard, pending in zip(self.matrices, self.shards, self._reducing, strict=False):
            part = pending.wait()[: matrix.stop - matrix.start]
            shard.grad = part if shard.grad is None else shard.grad.add_(part)
        self._reducing = []


class Unit:
    """Parameters that are gathered and reduced together: a block, the embedding, the head.

    Attributes:
        stage: the pipeline stage that it belongs to.
        late: its gradients are summed when the step ends, because another unit adds to them too or
            nobody waits for them.
    """

    def __init__(self, stage: int, buckets: list[_Bucket], borrowed: list[Unit], late: bool) -> None:
        self.stage, self.buckets, self._borrowed, self.late = stage, buckets, borrowed, late
        self.open = self._gathering = False

    @property
    def _matrices(self) -> list[_Matrix]:
        units = [self, *self._borrowed]
        return [matrix for unit in units for bucket in unit.buckets for matrix in bucket.matrices]

    def gather_start(self) -> None:
        if not self._gathering:
            self._gathering = True
            for matrix in self._matrices:
                matrix.gather_start()

    def gather(self) -> None:
        self.gather_start()
        for matrix in self._matrices:
            matrix.gather_wait()

    def release(self) -> None:
        if self._gathering:
            self._gathering = False
            for matrix in self._matrices:
                matrix.release()

    def prepare(self) -> None:
        """Before a backward."""
        self.open = True
        for unit in (self, *self._borrowed):
            for bucket in unit.buckets:
                bucket.prepare()

    def done(self, last: bool) -> None:
        """After a backward, the ``last`` of the step or not."""
        if self.open:
            self.open = False
            self.release()
            if not self.late:
                for bucket in self.buckets:
                    bucket.reduce_start(last)

    def collect(self) -> None:
        """Wait for what is being summed."""
        for bucket in self.buckets:
            bucket.collect()

    def finish(self) -> None:
        """At the end of the step: complete what is being summed."""
        if self.late:
            for bucket in self.buckets:
                bucket.reduce_start(last=True)
        self.collect()


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

    def _bucket(self, parameters: list[ModelParameter]) -> _Bucket:
        group, replicas = self._groups(parameters[0])
        matrices = [_Matrix(parameter, self._zero, group) for parameter in parameters]
        shards = [self._shard(one.parameter, one.part, one.start, one.stop) for one in matrices]
        return _Bucket(matrices, shards, self._zero >= 2, group, replicas)

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
