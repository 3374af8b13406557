"""From samples to what each rank computes with: its micro-batches, its part of the sequence."""

from __future__ import annotations

import torch

from hpcrun.recipe import Recipe
from training.model.micro_batch import MicroBatch
from training.parallel.mesh import Mesh
from training.parallel.ring import zigzag_positions


class Batches:
    """Cuts this data parallel rank's samples into micro-batches."""

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        self._size, self._end = recipe.train.micro_batch, recipe.data.document_end
        self._mesh = mesh
        layout = mesh.layout
        self._mine = zigzag_positions(recipe.model.sequence, layout.cp, mesh.at.cp, torch.device("cpu"))

    def cut(self, samples: torch.Tensor) -> list[MicroBatch]:
        """(samples, sequence + 1) token ids on the host -> micro-batches on the device, in order."""
        parts = samples.split(self._size)
        first = self._mesh.at.dp * len(parts)
        return [self._micro_batch(first + number, part) for number, part in enumerate(parts)]

    def _micro_batch(self, number: int, samples: torch.Tensor) -> MicroBatch:
        tokens, targets = samples[:, :-1], samples[:, 1:]
        documents = valid = None
        if self._end is not None:
            ends = tokens == self._end
            documents = (ends.cumsum(1) - ends.long()).to(self._mesh.device)
            valid = self._local(~ends)
        return MicroBatch(number, self._local(tokens), self._local(targets), valid, documents)

    def _local(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[:, self._mine].to(self._mesh.device)
