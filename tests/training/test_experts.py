"""Routing and dispatch against their definition, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from training.model.experts import balance_loss, route, within_capacity
from training.parallel.dispatch import Dispatch, grouped_linear
from training.parallel.parameters import ModelParameter
from training.parallel.tensor import WeightGradients

EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 4, 6, 5, 12, 2


def inputs(source: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One source rank's tokens and logits, and all experts' weights (experts, inner, hidden); fp64."""
    generator = torch.Generator().manual_seed(source)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    logits[:, 3] -= 100.0 * (source == 0)
    weights = torch.randn(EXPERTS, INNER, HIDDEN, generator=generator.manual_seed(99), dtype=torch.float64)
    return x.requires_grad_(), logits.requires_grad_(), weights.requires_grad_()


def dense(source: int, capacity: int | None) -> tuple[torch.Tensor, ...]:
    """Every expert on every token, weighted by the router: output and inputs that have gradients."""
    x, logits, weights = inputs(source)
    routing = route(logits, TOP_K, normalize=True)
    kept = torch.ones_like(routing.chosen, dtype=torch.bool)
    if capacity is not None:
        kept = within_capacity(routing.chosen, EXPERTS, capacity)
    share = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    share = share.scatter_add(1, routing.chosen, routing.weights * kept)
    out = torch.einsum("te,eih,th->ti", share, weights, x)
    out.square().sum().backward()
    return out, x, logits, weights


def spread(capacity: int | None) -> dict[str, object]:
    """The same with the experts over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if world > 1 else None
    x, logits, weights = inputs(rank)
    held = EXPERTS // world
    mine = weights.detach()[rank * held : (rank + 1) * held].flatten(0, 1).clone()
    parameter = ModelParameter(mine)
    parameter.gradient = torch.zeros_like(mine)
    routing = route(logits, TOP_K, normalize=True)
    kept = None if capacity is None else within_capacity(routing.chosen, EXPERTS, capacity)
    plan = Dispatch.plan(routing.chosen, kept, EXPERTS, group)
    rows = grouped_linear(plan.send(x, TOP_K), parameter, plan.counts, WeightGradients())
    out = plan.bring_back(rows, routing.weights)
    out.square().sum().backward()
    assert x.grad is not None
    assert logits.grad is not None
    return {
        "out": out.tolist(),
        "x": x.grad.tolist(),
        "logits": logits.grad.tolist(),
        "weights": parameter.gradient.view(held, INNER, HIDDEN).tolist(),
    }


@pytest.mark.parametrize("capacity", [None, 5])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_spread_experts_are_the_dense_sum(ep: int, capacity: int | None) -> None:
    """Source 0 sends nothing to the last expert: empty messages keep their gradients."""

    def same(found: object, expected: torch.Tensor | None) -> None:
        assert expected is not None
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)

    total = torch.zeros(EXPERTS, INNER, HIDDEN, dtype=torch.float64)
    answers = run_ranks(ep, spread, capacity)
    for source, answer in enumerate(answers):
        out, x, logits, weights = dense(source, capacity)
        same(answer["out"], out.detach())
        same(answer["x"], x.grad)
        same(answer["logits"], logits.grad)
        assert weights.grad is not None
        total += weights.grad
    same([expert for answer in answers for expert in answer["weights"]], total)


def test_routing_takes_the_most_probable_and_of_equals_the_first() -> None:
    routing = route(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), 2, normalize=True)
    assert routing.chosen.tolist() == [[1, 2]]
    assert routing.weights.tolist() == [[0.5, 0.5]]
    assert float(route(torch.tensor([[0.0, 2.0]]), 1, normalize=False).weights) < 1


def test_capacity_keeps_first_choices_and_early_tokens() -> None:
    chosen = torch.tensor([[0, 1], [0, 1], [1, 0]])
    assert within_capacity(chosen, 2, 2).tolist() == [[True, True], [True, False], [True, False]]


def test_the_balance_loss_is_one_when_all_experts_are_used_alike() -> None:
    even = balance_loss(torch.full((4,), 6), torch.full((12, 4), 0.25), 12, 2)
    assert float(even) == pytest.approx(1.0)
    skewed = torch.tensor([0.97, 0.01, 0.01, 0.01]).repeat(12, 1)
    assert float(balance_loss(torch.tensor([12, 12, 0, 0]), skewed, 12, 2)) > 1.9
