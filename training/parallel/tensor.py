"""Tensor parallelism on plain tensors (Shoeybi et al., 1909.08053, "Megatron-LM").

A column parallel linear splits its output features over the ranks, a row parallel one its input
features; between the two, no rank needs another. Activations are (sequence, batch, features).

The weight gradient is not autograd's: backward sums dY^T X into the parameter's own gradient while
the gradient of the input travels, or leaves the product for later (zero bubble, Qi et al., 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hpcrun.layout import padded_vocab
from training.parallel.collectives import (
    Pending,
    Region,
    all_reduce_,
    all_reduce_start,
    gather_start,
    reduce_scatter_start,
)
from training.parallel.mesh import Mesh
from training.parallel.parameters import Maker, ModelParameter, add_gradient
from training.parallel.pieces import Piece, split_rows


class WeightGradients:
    """The products dY^T X of a backward: made at once, or kept for an action W."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], None]] | None = None

    @contextmanager
    def keep(self) -> Iterator[list[Callable[[], None]]]:
        """Within, products are put into the list instead of being made."""
        self.kept = []
        try:
            yield self.kept
        finally:
            self.kept = None


class _Linear(torch.autograd.Function):
    """y = x W^T + b; with a region, x enters it on the way and its gradient leaves it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: ModelParameter,
        bias: ModelParameter | None,
        region: Region | None,
        products: WeightGradients,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.region, ctx.products = weight, bias, region, products
        ctx.needs_input = ctx.needs_input_grad[0]
        full = gather_start(x, region.group).wait() if region and region.scattered else x
        return F.linear(full, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias, region, products = ctx.weight, ctx.bias, ctx.region, ctx.products
        grad = grads[0].contiguous()
        flat = grad.flatten(0, -2)

        def input() -> Pending:
            return gather_start(x, region.group) if region and region.scattered else Pending(x)

        later = products.kept is not None
        gathered = None if later else input()
        dx = Pending(grad)
        if ctx.needs_input:
            product = (flat @ weight.to(grad.dtype)).view(*grad.shape[:-1], -1)
            dx = _leave(product, region) if region else Pending(product)

        def sum_products() -> None:
            full = (gathered or input()).wait()
            add_gradient(weight, flat, full.flatten(0, -2))
            if bias is not None:
                bias.grad.add_(flat.sum(0))

        if later:
            products.kept.append(sum_products)
        else:
            sum_products()
        return dx.wait() if ctx.needs_input else None, None, None, None, None


def _leave(grad: torch.Tensor, region: Region) -> Pending:
    return (
        reduce_scatter_start(grad, region.group) if region.scattered else all_reduce_start(grad, region.group)
    )


def linear(x: torch.Tensor, weight: ModelParameter, products: WeightGradients) -> torch.Tensor:
    """y = x W^T of a matrix that is not split."""
    y: torch.Tensor = _Linear.apply(x, weight, None, None, products)
    return y


class ColumnParallelLinear(nn.Module):
    """(sequence [/ tp], batch, in) -> (sequence, batch, out / tp)."""

    def __init__(
        self,
        pieces: list[Piece],
        inputs: int,
        outputs: int,
        std: float,
        *,
        bias: list[Piece] | None,
        make: Maker,
        region: Region,
        products: WeightGradients,
    ) -> None:
        """``outputs`` counts this rank's features, which ``pieces`` name."""
        super().__init__()
        self.weight = make.normal(pieces, outputs, inputs, std)
        self.bias = make.constant(bias, outputs, 0.0) if bias is not None else None
        self._region, self._products = region, products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x, self.weight, self.bias, self._region, self._products)


class RowParallelLinear(nn.Module):
    """(sequence, batch, in / tp) -> (sequence [/ tp], batch, out)."""

    def __init__(
        self,
        pieces: list[Piece],
        inputs: int,
        outputs: int,
        std: float,
        *,
        bias: list[Piece] | None,
        make: Maker,
        region: Region,
        products: WeightGradients,
    ) -> None:
        """``inputs`` counts this rank's features, which ``pieces`` name."""
        super().__init__()
        self.weight = make.normal(pieces, outputs, inputs, std)
        self.bias = make.constant(bias, outputs, 0.0) if bias is not None else None
        self._region, self._products = region, products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._region.leave(linear(x, self.weight, self._products))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabParallelTable(nn.Module):
    """One row per token, split over tp; serves as embedding, output head, or both when tied.

    The vocabulary is padded to a multiple of tp. Padding rows are zero and stay so:
    no token selects them, and the loss masks their logits.
    """

    def __init__(
        self,
        name: str,
        vocab: int,
        hidden: int,
        std: float,
        *,
        mesh: Mesh,
        make: Maker,
        region: Region,
        products: WeightGradients,
    ) -> None:
        super().__init__()
        tp, index = mesh.layout.tp, mesh.at.tp
        rows = padded_vocab(vocab, tp) // tp
        pieces = split_rows(name, (vocab, hidden), rows, index)
        self.start, self.held = index * rows, sum(piece.rows for piece in pieces)
        self.weight = make.normal(pieces, rows, hidden, std)
        self._region, self._products = region, products

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) token ids -> (sequence [/ tp], batch, hidden)."""
        return self._region.leave(lookup(tokens.t(), self.weight, self.start))

    def losses(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross entropy per token in fp32: (sequence [/ tp], batch, hidden) and (batch, sequence)
        -> (sequence, batch)."""
        logits = _Linear.apply(x, self.weight, None, self._region, self._products)
        return vocab_parallel_cross_entropy(logits, target.t(), self.start, self.held, self._region.group)


def lookup(numbers: torch.Tensor, weight: ModelParameter, start: int = 0) -> torch.Tensor:
    """Rows of a table that begins at row ``start``: (...) -> (..., columns), zero where it has none."""
    rows: torch.Tensor = _Lookup.apply(numbers, weight, start)
    return rows


class _Lookup(torch.autograd.Function):
    """Rows of a table, whose gradient is summed into the parameter's own."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: ModelParameter, start: int) -> torch.Tensor:
        local = tokens - start
        absent = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill(absent, 0)
        ctx.weight = weight
        ctx.save_for_backward(local, absent)
        return F.embedding(local, weight).masked_fill_(absent.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        local, absent = ctx.saved_tensors
        rows = grads[0].masked_fill(absent.unsqueeze(-1), 0.0).flatten(0, -2)
        total = ctx.weight.gradient
        total.index_add_(0, local.flatten(), rows.to(total.dtype))
        return None, None, None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy over logits whose last dimension is split, without gathering them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        start: int,
        held: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        wide[..., held:] = float("-inf")
        largest = all_reduce_(wide.amax(-1), group, dist.ReduceOp.MAX)
        wide.sub_(largest.unsqueeze(-1))
        local = target - start
        absent = (local < 0) | (local >= held)
        local = local.masked_fill(absent, 0).unsqueeze(-1)
        chosen = wide.gather(-1, local).squeeze(-1).masked_fill(absent, 0.0)
        exponents = wide.exp_()
        total, chosen = all_reduce_(torch.stack((exponents.sum(-1), chosen)), group)
        ctx.save_for_backward(exponents.div_(total.unsqueeze(-1)), local, absent)
        ctx.dtype = logits.dtype
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities, local, absent = ctx.saved_tensors
        ones = (~absent).to(probabilities.dtype).unsqueeze(-1)
        grad = probabilities.scatter_add_(-1, local, -ones).mul_(grads[0].unsqueeze(-1))
        return grad.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, start: int, held: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Loss per token: (..., padded vocab / tp) and (...) -> (...).

    This rank's columns are tokens ``start`` to ``start + held``; those beyond are padding. Its backward
    may run once: it works in place.
    """
    loss: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, target, start, held, group)
    return loss
