"""Collectives on plain tensors; a group of None is this rank alone.

Gloo's own reduce-scatter takes longer than its all-reduce, so there it is an exchange of parts that
each rank then sums in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from training.monitor.stopwatch import watch
from training.parallel.mesh import size_of


class Pending:
    """A tensor that a collective is still writing."""

    def __init__(
        self,
        tensor: torch.Tensor,
        work: dist.Work | None = None,
        *,
        source: torch.Tensor | None = None,
        after: Pending | None = None,
        then: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Of one collective, or ``after`` another tensor is finished; ``then`` makes the result.

        ``source`` is read meanwhile, and kept until then.
        """
        self._tensor, self._work, self._after, self._then = tensor, work, after, then
        self._source = source

    def wait(self) -> torch.Tensor:
        """The finished tensor."""
        if self._work is not None:
            with watch("communication"):
                self._work.wait()
            self._work = self._source = None
        if self._after is not None:
            self._after.wait()
            self._after = None
        if self._then is not None:
            self._tensor, self._then = self._then(), None
        return self._tensor


def all_reduce_start(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Pending:
    """Reduce ``tensor`` in place."""
    if group is None:
        return Pending(tensor)
    return Pending(tensor, dist.all_reduce(tensor, op=op, group=group, async_op=True))


def all_reduce_(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> torch.Tensor:
    """Reduce in place over ``group`` and wait."""
    return all_reduce_start(tensor, group, op).wait()


def gather_start(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, out: torch.Tensor | None = None
) -> Pending:
    """The tensors of all ranks one after the other along dimension 0, into ``out`` where it is given."""
    if group is None:
        return Pending(tensor if out is None else out.copy_(tensor))
    if out is None:
        out = tensor.new_empty(tensor.shape[0] * group.size(), *tensor.shape[1:])
    work = dist.all_gather_single(out, tensor.contiguous(), group=group, async_op=True)
    return Pending(out, work)


def reduce_scatter_start(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
    """This rank's of equal parts along dimension 0 of the sum over all ranks; they divide it."""
    if group is None:
        return Pending(tensor)
    tensor, size = tensor.contiguous(), group.size()
    if dist.get_backend(group) == "gloo":
        parts = torch.empty_like(tensor)
        work = dist.all_to_all_single(parts, tensor, group=group, async_op=True)
        return Pending(parts, work, source=tensor, then=lambda: parts.unflatten(0, (size, -1)).sum(0))
    out = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
    work = dist.reduce_scatter_single(out, tensor, group=group, async_op=True)
    return Pending(out, work, source=tensor)


class _Enter(torch.autograd.Function):
    """Megatron's f: identity or all-gather forward, all-reduce or reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, scattered: bool) -> torch.Tensor:
        ctx.group, ctx.scattered = group, scattered
        return gather_start(x, group).wait() if scattered else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.scattered:
            return reduce_scatter_start(grads[0], ctx.group).wait(), None, None
        return all_reduce_(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None, None


class _Leave(torch.autograd.Function):
    """Megatron's g: all-reduce or reduce-scatter forward, identity or all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, scattered: bool) -> torch.Tensor:
        ctx.group, ctx.scattered = group, scattered
        if scattered:
            return reduce_scatter_start(x, group).wait()
        return all_reduce_(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_start(grads[0], ctx.group).wait() if ctx.scattered else grads[0], None, None


class Region:
    """The tensor parallel region of a layer: inside it each rank holds its part of the features.

    Outside, activations (sequence, batch, hidden) are the same on all ranks or, with sequence
    parallelism (Korthikanti et al., 2205.05198), each rank has its part of the sequence.
    """

    def __init__(self, group: dist.ProcessGroup | None, scattered: bool) -> None:
        self.group = group
        self.scattered = scattered and size_of(group) > 1

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """(sequence [/ tp], batch, hidden) -> (sequence, batch, hidden); gradients are summed."""
        return x if self.group is None else _Enter.apply(x, self.group, self.scattered)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums (sequence, batch, hidden) -> (sequence [/ tp], batch, hidden)."""
        return x if self.group is None else _Leave.apply(x, self.group, self.scattered)
