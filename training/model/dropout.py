"""Dropout from counters, so that a resumed or restarted step sees the same noise.

The mask depends on the seed, the step, the number of the micro-batch in the global
batch and the place in the model; no generator's state travels from step to step.
"""

from __future__ import annotations

import torch
from torch import nn

from training.parallel.parameters import name_seed


class Noise:
    """Knows step and micro-batch on behalf of all dropouts of a rank.

    ``place`` names the part of the sequence that this rank holds: parts have masks of their own.
    """

    def __init__(self, seed: int, place: str) -> None:
        self._seed, self._place = seed, place
        self.step = self.micro_batch = 0

    def seed(self, site: str) -> int:
        return name_seed(self._seed, f"{self.step}/{self.micro_batch}/{site}{self._place}")


class Dropout(nn.Module):
    """Zeroes each value with probability ``rate`` and scales the others (Srivastava et al., 2014).

    Where its input is the same on all tensor parallel ranks, so is its mask.
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
