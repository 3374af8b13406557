"""AdamW (Loshchilov and Hutter, 2019) with state that exists from the start, and its schedule."""

from __future__ import annotations

import math

import torch

from hpcrun.recipe import Train
from training.model.parameters import ModelParameter


def make_optimizer(parameters: list[ModelParameter], train: Train) -> torch.optim.AdamW:
    """AdamW without decay on norms. Moments are made here, so that a checkpoint can fill them."""
    groups = [
        {"params": [p for p in parameters if p.decays], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if not p.decays], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


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
