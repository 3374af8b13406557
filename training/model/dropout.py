"""Dropout from counters, so that a resumed or restarted step sees the same noise.

The mask depends on the seed, the step, the number of the micro-batch in the global
batch and the place in the model; no generator's state travels from step to step.
"""

from __future__ import annotations

import torch
from torch import nn

from training.model.parameters import name_seed


class Noise:
    """Counts steps and micro-batches on behalf of all dropouts of a rank."""

    def __init__(self, seed: int, first_micro_batch: int) -> None:
        self._seed = seed
        self._first = first_micro_batch
        self._step = self._micro_batch = 0

    def start_step(self, step: int) -> None:
        self._step, self._micro_batch = step, self._first - 1

    def next_micro_batch(self) -> None:
        """Each stage runs the micro-batches of a step forward in their order."""
        self._micro_batch += 1

    def seed(self, site: str) -> int:
        return name_seed(self._seed, f"{self._step}/{self._micro_batch}/{site}")


class Dropout(nn.Module):
    """Zeroes each value with probability ``rate`` and scales the others (Srivastava et al., 2014).

    Its input is the same on all tensor parallel ranks, and so is its mask.
    """

    def __init__(self, site: str, rate: float, noise: Noise) -> None:
        super().__init__()
        self.site, self.rate, self.noise = site, rate, noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rate or not self.training:
            return x
        generator = torch.Generator(x.device).manual_seed(self.noise.seed(self.site))
        kept = torch.rand(x.shape, device=x.device, generator=generator) >= self.rate
        return x * kept / (1.0 - self.rate)
