"""What one forward pass of one rank sees of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatch:
    """Samples that are computed together; under context parallelism this rank's part of each."""

    number: int
    """In the global batch."""
    tokens: torch.Tensor
    """(batch, local sequence) int64."""
    targets: torch.Tensor
    """(batch, local sequence) int64: the next tokens."""
    valid: torch.Tensor | None = None
    """(batch, local sequence) bool: which targets count; None for all."""
    documents: torch.Tensor | None = None
    """(batch, whole sequence) int64: number of each position's document; None where there is one."""

    @property
    def counted(self) -> int:
        """Targets that count."""
        return self.targets.numel() if self.valid is None else int(self.valid.sum())
