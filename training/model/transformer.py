"""The transformer: RMSNorm, rotary positions, grouped attention, SwiGLU (Touvron et al., 2023)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from hpcrun.layout import stage_layers
from hpcrun.recipe import Model
from training.model.dropout import Dropout, Noise
from training.model.parameters import Sharded, make_parameter
from training.parallel.mesh import Mesh
from training.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelTable,
    copy_to_tp,
    vocab_parallel_cross_entropy,
)


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019), in fp32."""

    def __init__(self, name: str, hidden: int, eps: float, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_parameter(name, Sharded.whole((hidden,)), None, seed, mesh.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


def rotary(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate pairs by their position (Su et al., 2021). (batch, heads, sequence, head size)."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, base**-exponents)
    cos, sin = angles.cos(), angles.sin()
    left, right = x[..., :half].float(), x[..., half:].float()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with the heads split over tp. (batch, sequence, hidden) -> the same."""

    def __init__(self, name: str, model: Model, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.mesh, self.model = mesh, model
        hidden, kv_hidden = model.hidden, model.kv * model.head_size
        out_std = model.init_std / (2 * model.layers) ** 0.5
        self.q = ColumnParallelLinear(f"{name}.q.weight", hidden, hidden, model.init_std, mesh, seed)
        self.k = ColumnParallelLinear(f"{name}.k.weight", hidden, kv_hidden, model.init_std, mesh, seed)
        self.v = ColumnParallelLinear(f"{name}.v.weight", hidden, kv_hidden, model.init_std, mesh, seed)
        self.o = RowParallelLinear(f"{name}.o.weight", hidden, hidden, out_std, mesh, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = copy_to_tp(x, self.mesh)
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        q, k = rotary(q, self.model.rope_base), rotary(k, self.model.rope_base)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.model.head_size)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020) with its inner features split over tp."""

    def __init__(self, name: str, model: Model, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.mesh = mesh
        out_std = model.init_std / (2 * model.layers) ** 0.5
        self.gate = ColumnParallelLinear(
            f"{name}.gate.weight", model.hidden, model.ffn, model.init_std, mesh, seed
        )
        self.up = ColumnParallelLinear(
            f"{name}.up.weight", model.hidden, model.ffn, model.init_std, mesh, seed
        )
        self.down = RowParallelLinear(f"{name}.down.weight", model.ffn, model.hidden, out_std, mesh, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = copy_to_tp(x, self.mesh)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: int, model: Model, mesh: Mesh, seed: int, noise: Noise) -> None:
        super().__init__()
        name = f"layers.{layer}"
        self.attention_norm = RMSNorm(
            f"{name}.attention_norm.weight", model.hidden, model.norm_eps, mesh, seed
        )
        self.attention = Attention(f"{name}.attention", model, mesh, seed)
        self.attention_dropout = Dropout(f"{name}.attention", model.dropout, noise)
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm.weight", model.hidden, model.norm_eps, mesh, seed)
        self.mlp = MLP(f"{name}.mlp", model, mesh, seed)
        self.mlp_dropout = Dropout(f"{name}.mlp", model.dropout, noise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class Stage(nn.Module):
    """The layers of one pipeline stage; the first embeds tokens, the last gives logits."""

    def __init__(self, model: Model, mesh: Mesh, seed: int, noise: Noise) -> None:
        super().__init__()
        self.mesh, self.noise = mesh, noise
        layers = stage_layers(model.layers, mesh.layout.pp, mesh.at.pp)
        table = ("embedding.weight", model.vocab, model.hidden, model.init_std, mesh, seed)
        head = table if model.tie_embeddings else ("head.weight", *table[1:])
        self.embedding = VocabParallelTable(*table) if mesh.first_stage else None
        self.blocks = nn.ModuleList(Block(layer, model, mesh, seed, noise) for layer in layers)
        self.norm: RMSNorm | None = None
        self.head: VocabParallelTable | None = None
        if mesh.last_stage:
            self.norm = RMSNorm("norm.weight", model.hidden, model.norm_eps, mesh, seed)
            shared = self.embedding if model.tie_embeddings else None
            self.head = shared or VocabParallelTable(*head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) token ids or (batch, sequence, hidden) -> the next stage's input, or logits."""
        self.noise.next_micro_batch()
        if self.embedding is not None:
            x = self.embedding.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head.logits(self.norm(x))
        return x

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of the tokens of one micro-batch, on the last stage."""
        assert self.head is not None
        return vocab_parallel_cross_entropy(logits, target, self.head.start, self.mesh).mean()
