"""A decoder-only transformer, cut into pipeline stages."""

from __future__ import annotations

import torch
from torch import nn

from training.model.block import Block
from training.model.dropout import Dropout
from training.model.layers import Build, Norm, Rotary
from training.model.micro_batch import MicroBatch
from training.parallel.parameters import ModelParameter, model_parameters
from training.parallel.pieces import whole
from training.parallel.sharding import Sharding
from training.parallel.tensor import VocabParallelTable, lookup
from training.parallel.units import Unit


def token_table(name: str, build: Build) -> VocabParallelTable:
    """One row per token: the input embedding or the output layer."""
    model = build.model
    return VocabParallelTable(
        name,
        model.vocab,
        model.hidden,
        model.init_std,
        mesh=build.mesh,
        make=build.make,
        region=build.region,
        products=build.products,
    )


class Embedding(nn.Module):
    """Tokens to vectors; with learned positions, plus a vector per position."""

    def __init__(self, build: Build, table: VocabParallelTable) -> None:
        super().__init__()
        model, region = build.model, build.region
        self.table = table
        self.positions: ModelParameter | None = None
        if model.positions == "learned":
            shape = (model.sequence, model.hidden)
            pieces = whole("positions.weight", shape, partial=region.scattered)
            self.positions = build.make.normal(pieces, *shape, model.init_std)
            mine = build.positions
            self._mine = mine.chunk(build.mesh.layout.tp)[build.mesh.at.tp] if region.scattered else mine
        self.dropout = Dropout("embedding", model.dropout, build.noise)

    def forward(self, x: None, micro_batch: MicroBatch) -> torch.Tensor:
        """-> (sequence [/ tp], batch, hidden)."""
        vectors = self.table.embed(micro_batch.tokens)
        if self.positions is not None:
            vectors = vectors + lookup(self._mine, self.positions).unsqueeze(1)
        return self.dropout(vectors)


class Head(nn.Module):
    """The last norm, the output layer and the loss."""

    def __init__(self, build: Build, table: VocabParallelTable) -> None:
        super().__init__()
        self.norm = Norm("norm", build)
        self.table = table

    def forward(self, x: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """-> the sum of the losses of the targets that count."""
        losses = self.table.losses(self.norm(x), micro_batch.targets)
        if micro_batch.valid is not None:
            losses = losses * micro_batch.valid.t()
        return losses.sum()


class Stage(nn.Module):
    """Consecutive layers; the first stage embeds tokens, the last gives the loss.

    Attributes:
        units: what is sharded together, in the order of the forward.
    """

    def __init__(
        self,
        number: int,
        layers: range,
        build: Build,
        sharding: Sharding,
        embedding: VocabParallelTable | None,
        head: VocabParallelTable | None,
    ) -> None:
        super().__init__()
        self._build, self._sharding = build, sharding
        rotary = Rotary(build) if build.model.positions == "rope" else None
        self.parts = nn.ModuleList()
        if embedding is not None:
            self.parts.append(Embedding(build, embedding))
        self.parts.extend(Block(layer, build, rotary) for layer in layers)
        if head is not None:
            self.parts.append(Head(build, head))
        self.units: list[Unit] = [sharding.adopt(number, model_parameters(part)) for part in self.parts]

    def boundary(self, micro_batch: MicroBatch) -> torch.Tensor:
        """An uninitialised tensor like those that pass between stages."""
        build = self._build
        scattered = build.mesh.layout.tp if build.region.scattered else 1
        batch, sequence = micro_batch.tokens.shape
        shape = (sequence // scattered, batch, build.model.hidden)
        return torch.empty(shape, dtype=build.make.dtype, device=build.mesh.device)

    def forward(self, x: torch.Tensor | None, micro_batch: MicroBatch) -> torch.Tensor:
        """The previous stage's output, None for the first -> the next one's input, or the loss sum."""
        self._build.noise.micro_batch = micro_batch.number
        for unit, part in zip(self.units, self.parts, strict=True):
            x = self._sharding.enter(unit, x)
            x = self._sharding.leave(unit, part(x, micro_batch))
        assert x is not None
        return x
