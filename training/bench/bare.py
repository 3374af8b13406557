"""A plain single-process loop, as one writes it with torch alone: what a framework's cost is held against.

Nothing of the trainer is used here but the recipe.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from hpcrun.recipe import Model, Recipe


class Block(nn.Module):
    """Llama's (Touvron et al., 2023), on (batch, sequence, hidden)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads, self.kv, self.size = model.heads, model.kv, model.head_size
        hidden, eps = model.hidden, model.norm_eps

        def matrix(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.q = matrix(hidden, self.heads * self.size)
        self.k, self.v = matrix(hidden, self.kv * self.size), matrix(hidden, self.kv * self.size)
        self.o = matrix(self.heads * self.size, hidden)
        self.gate, self.up = matrix(hidden, model.ffn), matrix(hidden, model.ffn)
        self.down = matrix(model.ffn, hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        normal = self.attention_norm(x)
        q = rotate(self.q(normal).view(batch, sequence, self.heads, self.size), cos, sin).transpose(1, 2)
        k = rotate(self.k(normal).view(batch, sequence, self.kv, self.size), cos, sin).transpose(1, 2)
        v = self.v(normal).view(batch, sequence, self.kv, self.size).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv < self.heads)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normal = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(batch, sequence, heads, size) turned by (sequence, 1, size / 2) angles."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


class Decoder(nn.Module):
    """(batch, sequence) tokens and targets -> the mean loss."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden, model.norm_eps)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tie_embeddings:
            self.head.weight = self.embedding.weight
        half = model.head_size // 2
        frequencies = model.rope_base ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(model.sequence, dtype=torch.float64), frequencies).unsqueeze(1)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Loop:
    """Model, AdamW and accumulation over micro-batches, on one device in fp32 or bf16 autocast."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._train, self._device = recipe.train, device
        self.model = Decoder(recipe.model).to(device)
        decayed = [weight for weight in self.model.parameters() if weight.dim() > 1]
        others = [weight for weight in self.model.parameters() if weight.dim() == 1]
        groups = [
            {"params": decayed, "weight_decay": recipe.train.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = (recipe.train.beta1, recipe.train.beta2)
        self.optimizer = torch.optim.AdamW(groups, recipe.train.lr, betas, recipe.train.eps, fused=True)

    def step(self, samples: torch.Tensor, lr: float) -> float:
        """One optimizer step on (samples, sequence + 1) tokens. Returns the loss."""
        train = self._train
        parts = samples.to(self._device).split(train.micro_batch)
        total = torch.zeros((), device=self._device)
        for part in parts:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=train.precision == "bf16"):
                loss = self.model(part[:, :-1], part[:, 1:]) / len(parts)
            loss.backward()
            total += loss.detach()
        if train.clip_grad:
            nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return total.item()


def problem(recipe: Recipe) -> str | None:
    """What the recipe asks for that the plain loop does not know; None when it trains the same model."""
    model = recipe.model
    known = {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rope",
        "rope_scaling": None,
        "biases": False,
        "qk_norm": False,
        "dropout": 0.0,
        "moe": None,
    }
    for name, value in known.items():
        if getattr(model, name) != value:
            return f"model.{name} is not {value}"
    return None if recipe.data.document_end is None else "data.document_end is set"
