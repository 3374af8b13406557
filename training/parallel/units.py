"""What is sharded together: matrices in whole rows, their buckets of gradients, units of both."""

from __future__ import annotations

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


class Matrix:
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


class Bucket:
    """The matrices of a unit that are sharded alike; their gradients lie one after the other."""

    def __init__(
        self,
        matrices: list[Matrix],
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

    def __init__(self, stage: int, buckets: list[Bucket], borrowed: list[Unit], late: bool) -> None:
        self.stage, self.buckets, self._borrowed, self.late = stage, buckets, borrowed, late
        self.open = self._gathering = False

    @property
    def _matrices(self) -> list[Matrix]:
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
