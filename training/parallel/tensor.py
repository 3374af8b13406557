"""Tensor parallelism on plain tensors (Shoeybi et al., 2019, "Megatron-LM").

A column parallel linear splits its output features, a row parallel one its input
features; together they need one all-reduce forward and one backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hpcrun.layout import padded_vocab
from training.model.parameters import Sharded, make_parameter
from training.parallel.mesh import Mesh, all_reduce_


class _CopyToTensorParallel(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_(grads[0].contiguous(), ctx.group), None


class _ReduceFromTensorParallel(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return all_reduce_(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def copy_to_tp(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Enter a tensor parallel region: the gradients of all its ranks are summed on the way back."""
    return x if mesh.tp is None else _CopyToTensorParallel.apply(x, mesh.tp)


def reduce_from_tp(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Leave a tensor parallel region: the partial results of all its ranks are summed."""
    return x if mesh.tp is None else _ReduceFromTensorParallel.apply(x, mesh.tp)


class ColumnParallelLinear(nn.Module):
    """y = x W^T with the rows of W (the outputs) split over tp. (..., in) -> (..., out / tp)."""

    def __init__(self, name: str, inputs: int, outputs: int, std: float, mesh: Mesh, seed: int) -> None:
        super().__init__()
        sharded = Sharded.along(0, (outputs, inputs), outputs // mesh.layout.tp, mesh.at.tp)
        self.weight = make_parameter(name, sharded, std, seed, mesh.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class RowParallelLinear(nn.Module):
    """y = x W^T with the columns of W (the inputs) split over tp. (..., in / tp) -> (..., out)."""

    def __init__(self, name: str, inputs: int, outputs: int, std: float, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.mesh = mesh
        sharded = Sharded.along(1, (outputs, inputs), inputs // mesh.layout.tp, mesh.at.tp)
        self.weight = make_parameter(name, sharded, std, seed, mesh.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reduce_from_tp(F.linear(x, self.weight), self.mesh)


class VocabParallelTable(nn.Module):
    """One row per token, split over tp; serves as embedding, output head, or both when tied.

    The vocabulary is padded to a multiple of tp. Padding rows are zero and stay so:
    no token selects them, and the loss masks their logits.
    """

    def __init__(self, name: str, vocab: int, hidden: int, std: float, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.mesh = mesh
        self.vocab = vocab
        rows = padded_vocab(vocab, mesh.layout.tp) // mesh.layout.tp
        self.start = mesh.at.tp * rows
        sharded = Sharded.along(0, (vocab, hidden), rows, mesh.at.tp)
        self.weight = make_parameter(name, sharded, std, seed, mesh.device)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) token ids -> (batch, sequence, hidden)."""
        local = tokens - self.start
        absent = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(absent, 0), self.weight)
        return reduce_from_tp(rows.masked_fill(absent.unsqueeze(-1), 0.0), self.mesh)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, padded vocab / tp), padding at -inf."""
        out = F.linear(copy_to_tp(x, self.mesh), self.weight)
        padding = min(self.start + out.shape[-1] - self.vocab, out.shape[-1])
        if padding > 0:
            out = torch.cat(
                [out[..., :-padding], out.new_full((*out.shape[:-1], padding), float("-inf"))], -1
            )
        return out


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy over logits whose last dimension is split over tp, without gathering them."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, start: int, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        logits = logits.float()
        largest = all_reduce_(logits.amax(-1), group, dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(-1)
        exponents = shifted.exp()
        total = all_reduce_(exponents.sum(-1), group)
        local = target - start
        absent = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(absent, 0)
        chosen = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(absent, 0.0)
        chosen = all_reduce_(chosen, group)
        ctx.save_for_backward(exponents / total.unsqueeze(-1), local, absent)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, local, absent = ctx.saved_tensors
        grad = probabilities.clone()
        ones = (~absent).to(grad.dtype).unsqueeze(-1)
        grad.scatter_add_(-1, local.unsqueeze(-1), -ones)
        return grad * grads[0].unsqueeze(-1), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, start: int, mesh: Mesh
) -> torch.Tensor:
    """Loss per token: (..., padded vocab / tp) and (...) -> (...). ``start`` is this rank's first row."""
    loss: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, target, start, mesh.tp)
    return loss
