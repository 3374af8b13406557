"""Mixture of experts (Shazeer et al., 2017): a router, routed experts, shared experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.model.layers import MLP, Build, activate
from training.model.micro_batch import MicroBatch
from training.parallel.collectives import all_reduce_
from training.parallel.dispatch import grouped_linear
from training.parallel.mesh import index_in, size_of
from training.parallel.pieces import of_experts, split_columns, split_rows, stack, whole
from training.parallel.tensor import linear


@dataclass(frozen=True)
class Routing:
    """A token's experts, best first.

    Attributes:
        chosen: (tokens, k) int64.
        weights: (tokens, k), in fp32 or wider.
        probabilities: (tokens, experts) softmax of the logits.
    """

    chosen: torch.Tensor
    weights: torch.Tensor
    probabilities: torch.Tensor


def route(logits: torch.Tensor, top_k: int, normalize: bool) -> Routing:
    """The ``top_k`` most probable experts of each token, (tokens, experts) -> :class:`Routing`.

    Of equally probable experts the first is taken. With ``normalize`` a token's weights sum to 1
    (Jiang et al., 2401.04088).
    """
    probabilities = logits.softmax(-1)
    ranked = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, chosen = ranked.values[:, :top_k], ranked.indices[:, :top_k]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(chosen, weights, probabilities)


def within_capacity(chosen: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    """(tokens, k) bool: each expert's first ``capacity`` tokens, all first choices before second ones."""
    order = chosen.t().flatten()
    places = torch.nn.functional.one_hot(order, experts).cumsum(0).gather(1, order.unsqueeze(1)).squeeze(1)
    return (places <= capacity).view(chosen.shape[1], chosen.shape[0]).t()


def balance_loss(counts: torch.Tensor, probabilities: torch.Tensor, tokens: int, top_k: int) -> torch.Tensor:
    """experts x sum of (share of tokens x mean probability) (Fedus et al., 2101.03961, equation 4).

    ``counts`` (experts,) are of all ``tokens`` of the micro-batch; ``probabilities`` those of some of
    them, whose parts then add up. 1 where all experts are used alike.
    """
    share = counts.to(probabilities.dtype) / (tokens * top_k)
    return len(counts) * (share * probabilities.sum(0) / tokens).sum()


class _AddLoss(torch.autograd.Function):
    """Identity on x that sends a gradient of 1 into a loss beside the main one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.ones_like(ctx.like)


class Experts(nn.Module):
    """(sequence [/ tp], batch, hidden) -> the same. Experts are spread over ep, each split over tp.

    The router computes in fp32. Every tensor parallel rank routes all tokens alike, and each gets
    its part of the router's gradient: that of its part of the experts.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        model, mesh, make = build.model, build.mesh, build.make
        assert model.moe is not None
        self.moe, self._build = model.moe, build
        tp, index = mesh.layout.tp, mesh.at.tp
        count, width = self.moe.experts, model.expert_ffn
        held = count // size_of(mesh.ep)
        mine = range(index_in(mesh.ep) * held, (index_in(mesh.ep) + 1) * held)
        self.gated = model.activation == "swiglu"
        parts = ("gate", "up") if self.gated else ("up",)
        inner = width // tp
        self.router = make.normal(
            whole(f"{name}.router.weight", (count, model.hidden), partial=True),
            count,
            model.hidden,
            model.init_std,
        )
        up = stack(
            *(
                split_rows(f"{name}.experts.{part}.weight", (width, model.hidden), inner, index)
                for part in parts
            )
        )
        down = split_columns(f"{name}.experts.down.weight", (model.hidden, width), tp, index)
        self.up = make.normal(
            of_experts(up, count, mine),
            held * inner * len(parts),
            model.hidden,
            model.init_std,
            expert=True,
        )
        self.down = make.normal(
            of_experts(down, count, mine), held * model.hidden, inner, build.out_std, expert=True
        )
        shared = self.moe.shared_experts * width
        self.shared = MLP(f"{name}.shared", build, shared) if shared else None

    def forward(self, x: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        build, moe = self._build, self.moe
        tokens = build.region.enter(x)
        flat = tokens.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
            logits = linear(wide, self.router, build.products)
        routing = route(logits, moe.top_k, moe.normalize)
        kept = None
        if moe.capacity is not None:
            capacity = math.ceil(len(flat) * moe.top_k / moe.experts * moe.capacity)
            kept = within_capacity(routing.chosen, moe.experts, capacity)
        flat = _AddLoss.apply(flat, self._losses(logits, routing))
        plan = build.plan(routing.chosen, kept, moe.experts, build.mesh.ep)
        rows = plan.send(flat, moe.top_k)
        rows = activate(grouped_linear(rows, self.up, plan.counts, build.products), self.gated)
        rows = grouped_linear(rows, self.down, plan.counts, build.products)
        mixed = plan.bring_back(rows, routing.weights).view_as(tokens)
        out = build.region.leave(mixed)
        return out if self.shared is None else out + self.shared(x, micro_batch)

    def _losses(self, logits: torch.Tensor, routing: Routing) -> torch.Tensor:
        """This rank's part of the losses that keep the router useful.

        They are means over the micro-batches of the global batch; every rank that holds a part of a
        micro-batch adds its tokens', and each tensor parallel rank, which has all of them, its share.
        """
        moe, layout = self.moe, self._build.mesh.layout
        chosen = routing.chosen.flatten()
        counts = chosen.new_zeros(moe.experts).index_add_(0, chosen, torch.ones_like(chosen))
        all_reduce_(counts, self._build.mesh.cp)
        self._build.load.add(counts)
        tokens = len(logits) * layout.cp
        loss = moe.balance_loss * balance_loss(counts, routing.probabilities, tokens, moe.top_k)
        if moe.z_loss:
            loss = loss + moe.z_loss * logits.logsumexp(-1).square().sum() / tokens
        return loss / (layout.tp * self._build.micro_batches)
