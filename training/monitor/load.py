"""How evenly experts are used."""

from __future__ import annotations

import torch


class ExpertLoad:
    """How unevenly experts were used since the last look."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, counts: torch.Tensor) -> None:
        """Tokens per expert of one micro-batch in one block."""
        self._sum += float(counts.max() / counts.float().mean())
        self._count += 1

    def take(self) -> tuple[float, int]:
        """The busiest expert's tokens over the fair share: sum, and number of terms."""
        taken = self._sum, self._count
        self._sum, self._count = 0.0, 0
        return taken
