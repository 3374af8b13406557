"""The parts of a transformer block, in the styles of GPT-2 (Radford et al., 2019) and Llama
(Touvron et al., 2023). Activations are (sequence, batch, features)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from hpcrun.recipe import Model, RopeScaling
from training.model.dropout import Noise
from training.model.micro_batch import MicroBatch
from training.model.pointwise import rms_norm, rotate, swiglu
from training.monitor.load import ExpertLoad
from training.parallel.collectives import Region
from training.parallel.dispatch import Planner
from training.parallel.mesh import Mesh
from training.parallel.parameters import Maker
from training.parallel.pieces import Piece, split_columns, split_rows, stack, whole
from training.parallel.ring import attention, zigzag_positions
from training.parallel.tensor import ColumnParallelLinear, RowParallelLinear, WeightGradients


@dataclass(frozen=True)
class Build:
    """What the parts of one rank's model are made with."""

    model: Model
    mesh: Mesh
    make: Maker
    region: Region
    products: WeightGradients
    noise: Noise
    load: ExpertLoad
    micro_batches: int
    """In the global batch."""
    plan: Planner
    """Decides which tokens travel where."""

    @property
    def out_std(self) -> float:
        """Of matrices that add to the residual stream, smaller the deeper (Radford et al., 2019)."""
        return self.model.init_std / math.sqrt(2 * self.model.layers)

    @property
    def positions(self) -> torch.Tensor:
        """Global positions of this rank's part of the sequence, (sequence / cp,) int64."""
        layout = self.mesh.layout
        return zigzag_positions(self.model.sequence, layout.cp, self.mesh.at.cp, self.mesh.device)


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019) or LayerNorm (Ba et al., 2016), over the last dimension."""

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        hidden, partial = build.model.hidden, build.region.scattered
        self.eps = build.model.norm_eps

        def vector(kind: str, value: float) -> nn.Parameter:
            pieces = whole(f"{name}.{kind}", (hidden,), partial=partial)
            return build.make.constant(pieces, hidden, value)

        self.weight = vector("weight", 1.0)
        self.bias = vector("bias", 0.0) if build.model.norm == "layernorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps)


class Rotary:
    """Rotates pairs of features by their position (Su et al., 2021), for this rank's positions."""

    def __init__(self, build: Build) -> None:
        model = build.model
        half = model.head_size // 2
        frequencies = model.rope_base ** -(torch.arange(half, dtype=torch.float64) / half)
        if model.rope_scaling:
            frequencies = scale_frequencies(frequencies, model.rope_scaling)
        angles = torch.outer(build.positions.cpu().double(), frequencies)[:, None, None]
        self._cos = torch.cat((angles, angles), -1).cos().float().to(build.mesh.device)
        self._sin = angles.sin().float().to(build.mesh.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(sequence, batch, heads, head size) -> the same."""
        return rotate(x, self._cos, self._sin)


def scale_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Angles per position, for a sequence longer than that of the first training.

    llama3 (Grattafiori et al., 2407.21783) divides those that turn less than ``low_frequency`` times
    in the original sequence, leaves those that turn more than ``high_frequency``, and blends between.
    """
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_sequence * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency, scaling.high_frequency
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class Attention(nn.Module):
    """Causal attention, heads split over tp, the sequence over cp."""

    def __init__(self, name: str, build: Build, rotary: Rotary | None) -> None:
        super().__init__()
        model, mesh, size = build.model, build.mesh, build.model.head_size
        tp = mesh.layout.tp
        self.heads, self.kv_heads = model.heads // tp, max(1, model.kv // tp)
        self.size, self.rotary, self._cp = size, rotary, mesh.cp
        rows = (self.heads + 2 * self.kv_heads) * size

        def qkv(kind: str, *columns: int) -> list[Piece]:
            copied = mesh.kv_copies > 1
            key_value = [
                [
                    replace(piece, holders="kv", partial=True) if copied else piece
                    for piece in split_rows(
                        f"{name}.{part}.{kind}",
                        (model.kv * size, *columns),
                        self.kv_heads * size,
                        mesh.at.tp // mesh.kv_copies,
                    )
                ]
                for part in "kv"
            ]
            query = split_rows(
                f"{name}.q.{kind}", (model.heads * size, *columns), self.heads * size, mesh.at.tp
            )
            return stack(query, *key_value)

        self.qkv = ColumnParallelLinear(
            qkv("weight", model.hidden),
            model.hidden,
            rows,
            model.init_std,
            bias=qkv("bias") if model.biases else None,
            make=build.make,
            region=build.region,
            products=build.products,
        )
        self.o = RowParallelLinear(
            split_columns(f"{name}.o.weight", (model.hidden, model.heads * size), tp, mesh.at.tp),
            self.heads * size,
            model.hidden,
            build.out_std,
            bias=_whole_bias(f"{name}.o.bias", build),
            make=build.make,
            region=build.region,
            products=build.products,
        )
        self.q_norm = HeadNorm(f"{name}.q_norm.weight", build) if model.qk_norm else None
        self.k_norm = HeadNorm(f"{name}.k_norm.weight", build) if model.qk_norm else None

    def forward(self, x: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.size))
        both, v = heads.split((self.heads + self.kv_heads, self.kv_heads), 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = both.split((self.heads, self.kv_heads), 2)
            both = torch.cat((self.q_norm(q), self.k_norm(k)), 2)
        if self.rotary is not None:
            both = self.rotary(both)
        q, k = both.split((self.heads, self.kv_heads), 2)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        mixed = attention(q, k, v, group=self._cp, documents=micro_batch.documents)
        return self.o(mixed.permute(2, 0, 1, 3).flatten(2))


class HeadNorm(nn.Module):
    """RMSNorm of each head by one weight, of which each rank sees its own heads' gradient only."""

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        size = build.model.head_size
        self.weight = build.make.constant(whole(name, (size,), partial=True), size, 1.0)
        self.eps = build.model.norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020) or GELU, the ``width`` inner features split over tp."""

    def __init__(self, name: str, build: Build, width: int) -> None:
        super().__init__()
        model, mesh = build.model, build.mesh
        tp, index = mesh.layout.tp, mesh.at.tp
        self.gated = model.activation == "swiglu"
        parts = ("gate", "up") if self.gated else ("up",)
        inner = width // tp

        def pieces(kind: str, *columns: int) -> list[Piece]:
            return stack(
                *(split_rows(f"{name}.{part}.{kind}", (width, *columns), inner, index) for part in parts)
            )

        self.up = ColumnParallelLinear(
            pieces("weight", model.hidden),
            model.hidden,
            inner * len(parts),
            model.init_std,
            bias=pieces("bias") if model.biases else None,
            make=build.make,
            region=build.region,
            products=build.products,
        )
        self.down = RowParallelLinear(
            split_columns(f"{name}.down.weight", (model.hidden, width), tp, index),
            inner,
            model.hidden,
            build.out_std,
            bias=_whole_bias(f"{name}.down.bias", build),
            make=build.make,
            region=build.region,
            products=build.products,
        )

    def forward(self, x: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        return self.down(activate(self.up(x), self.gated))


def activate(x: torch.Tensor, gated: bool) -> torch.Tensor:
    """SwiGLU of [gate; up] along the last dimension, or GELU in GPT-2's tanh form."""
    if not gated:
        return F.gelu(x, approximate="tanh")
    return swiglu(x)


def _whole_bias(name: str, build: Build) -> list[Piece] | None:
    """Added behind the region, where under sequence parallelism each rank has its own positions."""
    if not build.model.biases:
        return None
    return whole(name, (build.model.hidden,), partial=build.region.scattered)
