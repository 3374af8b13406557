"""AdamW (Loshchilov and Hutter, 2019) with state that exists from the start, and its schedule."""

from __future__ import annotations

import math

import torch

from hpcrun.recipe import Train
from training.parallel.units import Shard

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(shards: list[Shard], train: Train) -> torch.optim.AdamW:
    """AdamW without decay on vectors. Moments are made here, so that a checkpoint can fill them."""
    groups = [
        {
            "params": [shard.values for shard in shards if shard.parameter.decays == decays],
            "weight_decay": train.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )
    for shard in shards:
        values = shard.values
        optimizer.state[values] = {
            "step": torch.zeros((), dtype=torch.float32, device=values.device),
            **{moment: torch.zeros_like(values) for moment in MOMENTS},
        }
    return optimizer


def update(optimizer: torch.optim.AdamW, shards: list[Shard], lr: float, factor: float) -> None:
    """One step with all gradients times ``factor``. :meth:`Sharding.publish` has to follow."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    for shard in shards:
        assert shard.grad is not None
        grad = shard.grad if factor == 1.0 else shard.grad.mul_(factor)
        shard.values.grad = grad.to(shard.values.device)
    optimizer.step()
    for shard in shards:
        shard.values.grad = None


def set_step(optimizer: torch.optim.AdamW, step: int) -> None:
    """Tell the bias correction how many steps were taken before."""
    for state in optimizer.state.values():
        state["step"].fill_(float(step))


def learning_rate(step: int, train: Train) -> float:
    """Linear warm-up, then a cosine to ``min_lr`` at the last step; ``step`` counts from 1."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    span = max(1, train.steps - train.warmup_steps)
    progress = min(1.0, (step - train.warmup_steps) / span)
    return train.min_lr + 0.5 * (train.lr - train.min_lr) * (1.0 + math.cos(math.pi * progress))
