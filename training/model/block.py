"""The transformer block. Activations are (sequence [/ tp], batch, hidden)."""

from __future__ import annotations

import torch
from torch import nn

from training.model.dropout import Dropout
from training.model.experts import Experts
from training.model.layers import MLP, Attention, Build, Norm, Rotary
from training.model.micro_batch import MicroBatch


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), where experts may stand for the MLP."""

    def __init__(self, layer: int, build: Build, rotary: Rotary | None) -> None:
        super().__init__()
        name, rate = f"layers.{layer}", build.model.dropout
        self.attention_norm = Norm(f"{name}.attention_norm", build)
        self.attention = Attention(f"{name}.attention", build, rotary)
        self.attention_dropout = Dropout(f"{name}.attention", rate, build.noise)
        self.mlp_norm = Norm(f"{name}.mlp_norm", build)
        self.mlp = (
            Experts(f"{name}.mlp", build)
            if build.model.has_experts(layer)
            else MLP(f"{name}.mlp", build, build.model.ffn)
        )
        self.mlp_dropout = Dropout(f"{name}.mlp", rate, build.noise)

    def forward(self, x: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), micro_batch))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x), micro_batch))
