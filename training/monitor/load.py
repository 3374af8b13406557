"""How evenly experts are used."""

from __future__ import annotations

import torch


class ExpertLoad:
    """How unevenly experts were used since the last look."""

    def __init__(self) -> None:
        self._terms: list[torch.Tensor] = []

    def add(self, counts: torch.Tensor) -> None:
        """Tokens per expert of one micro-batch in one block."""
        self._terms.append(counts.max() / counts.float().mean())

    def take(self) -> tuple[float, int]:
        """The busiest expert's tokens over the fair share: sum, and number of terms."""
        terms, self._terms = self._terms, []
        return float(torch.stack(terms).sum()) if terms else 0.0, len(terms)
