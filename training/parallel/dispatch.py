"""Expert parallelism: tokens travel to the ranks that hold their experts, and back
(Lepikhin et al., 2006.16668; without a capacity as in Gale et al., 2211.15841)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from training.monitor.stopwatch import watch
from training.parallel.mesh import index_in, size_of
from training.parallel.parameters import ModelParameter
from training.parallel.tensor import WeightGradients


@dataclass(frozen=True)
class Dispatch:
    """Which copy of a token goes where.

    Attributes:
        pairs: numbers of the (token, choice) pairs that are sent, sorted by expert.
        sent, received: rows to and from each rank of the group.
        order: the received rows, sorted by local expert.
        counts: rows of each local expert.
    """

    pairs: torch.Tensor
    sent: list[int]
    received: list[int]
    order: torch.Tensor
    counts: list[int]
    group: dist.ProcessGroup | None

    @classmethod
    def plan(
        cls, chosen: torch.Tensor, kept: torch.Tensor | None, experts: int, group: dist.ProcessGroup | None
    ) -> Dispatch:
        """For ``chosen`` experts (tokens, k) and which of them are ``kept``, all by default.

        Rank i of the group holds the i-th of equal parts of the experts. Collective.
        """
        numbers = chosen.flatten()
        pairs = numbers.argsort(stable=True)
        if kept is not None:
            pairs = pairs[kept.flatten()[pairs]]
        counts = torch.bincount(numbers[pairs], minlength=experts)
        size = size_of(group)
        arriving = counts
        if group is not None:
            arriving = torch.empty_like(counts)
            with watch("communication"):
                dist.all_to_all_single(arriving, counts, group=group)
        by_source = arriving.view(size, -1)
        local = torch.arange(by_source.shape[1], device=counts.device).repeat(size)
        order = local.repeat_interleave(arriving).argsort(stable=True)
        return cls(
            pairs,
            counts.view(size, -1).sum(1).tolist(),
            by_source.sum(1).tolist(),
            order,
            by_source.sum(0).tolist(),
            group,
        )

    @classmethod
    def evenly(
        cls, chosen: torch.Tensor, kept: torch.Tensor | None, experts: int, group: dist.ProcessGroup | None
    ) -> Dispatch:
        """What :meth:`plan` gives when all experts are chosen alike; needs no values."""
        pairs = torch.arange(chosen.numel(), device=chosen.device)
        size, rank = size_of(group), index_in(group)
        held = experts // size
        shares = [chosen.numel() * (i + 1) // experts - chosen.numel() * i // experts for i in range(experts)]
        sent = [sum(shares[i * held : (i + 1) * held]) for i in range(size)]
        counts = [size * share for share in shares[rank * held : (rank + 1) * held]]
        order = torch.arange(sum(counts), device=chosen.device)
        return cls(pairs, sent, [sent[rank]] * size, order, counts, group)

    def send(self, x: torch.Tensor, choices: int) -> torch.Tensor:
        """(tokens, hidden) -> (rows of the local experts, hidden), one expert after the other."""
        rows = x[self.pairs // choices]
        return self._travel(rows, self.sent, self.received)[self.order]

    def bring_back(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Results (rows, hidden) and weights (tokens, k) -> their weighted sum per token (tokens, hidden)."""
        unsorted = torch.empty_like(self.order)
        unsorted[self.order] = torch.arange(len(self.order), device=self.order.device)
        back = self._travel(rows[unsorted], self.received, self.sent)
        weighted = back * weights.flatten()[self.pairs].unsqueeze(-1).to(back.dtype)
        total = weighted.new_zeros(weights.shape[0], rows.shape[1])
        return total.index_add(0, self.pairs // weights.shape[1], weighted)

    def _travel(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        if self.group is None:
            return rows
        out: torch.Tensor = _AllToAll.apply(rows, sent, received, self.group)
        return out


Planner = Callable[[torch.Tensor, torch.Tensor | None, int, dist.ProcessGroup | None], Dispatch]


class _AllToAll(torch.autograd.Function):
    """Rows to every rank; their gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    with watch("communication"):
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T for the rows of each expert e; the weight gradients are the parameter's own."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ModelParameter, counts: list[int], products: WeightGradients
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts, ctx.products = weight, counts, products
        weights = weight.view(len(counts), -1, weight.shape[1]).to(x.dtype)
        parts = [
            F.linear(rows, matrix) for rows, matrix in zip(x.split(counts), weights.unbind(0), strict=True)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        weight, counts = ctx.weight, ctx.counts
        parts = grads[0].split(counts)
        weights = weight.view(len(counts), -1, weight.shape[1]).to(grads[0].dtype)
        dx = torch.cat([part @ matrix for part, matrix in zip(parts, weights.unbind(0), strict=True)])

        def add_gradient() -> None:
            gradients = weight.gradient.view(len(counts), -1, weight.gradient.shape[1]).unbind(0)
            for gradient, part, rows in zip(gradients, parts, x.split(counts), strict=True):
                gradient.add_((part.t() @ rows).to(gradient.dtype))

        if ctx.products.kept is not None:
            ctx.products.kept.append(add_gradient)
        else:
            add_gradient()
        return dx, None, None, None


def grouped_linear(
    x: torch.Tensor, weight: ModelParameter, counts: list[int], products: WeightGradients
) -> torch.Tensor:
    """(rows, in) sorted by expert, ``counts`` rows for each -> (rows, out).

    ``weight`` is (experts x out, in), one expert below the other.
    """
    out: torch.Tensor = _GroupedLinear.apply(x, weight, counts, products)
    return out
