"""What a block does between its matrix products, with backward passes written by hand.

Each reads and writes memory as few times as it can, and keeps its inputs only: autograd would keep
what lies between. All compute in fp32, or wider where their input is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def wide(x: torch.Tensor) -> torch.Tensor:
    """fp32, or what is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RmsNorm(torch.autograd.Function):
    """y = x s w with s = 1 / sqrt(mean(x^2) + eps), so dx = s (g w - x s^2 mean(g w x))."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        full = wide(x)
        mean = torch.linalg.vector_norm(full, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (full * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        full, grad = wide(x), wide(grads[0])
        product = grad * full
        mean = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
        weight_grad = scale.reshape(1, -1) @ product.reshape(-1, x.shape[-1])
        dx = (grad * weight).mul_(scale).addcmul_(full, mean.mul_(scale.pow(3)), value=-1)
        return dx.to(x.dtype), weight_grad.view_as(weight), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019)."""
    out: torch.Tensor = _RmsNorm.apply(x, weight, eps)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation, whose transpose is the rotation by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, way: int) -> torch.Tensor:
    full = wide(x)
    out = full * cos
    for half, other, sign in zip(out.chunk(2, -1), reversed(full.chunk(2, -1)), (-way, way), strict=True):
        half.addcmul_(other, sin, value=sign)
    return out.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns feature i and feature i + size / 2 by one angle (Su et al., 2021).

    ``x`` is (..., size); ``cos`` broadcasts against it, ``sin`` against half of it.
    """
    out: torch.Tensor = _Rotate.apply(x, cos, sin)
    return out


class _SwiGLU(torch.autograd.Function):
    """silu(gate) up of [gate; up]; silu(gate) is made again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        gate_grad, up_grad = out.chunk(2, -1)
        torch.mul(grads[0], F.silu(gate), out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=gate_grad)
        return out


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [gate; up] along the last dimension (Shazeer, 2020)."""
    out: torch.Tensor = _SwiGLU.apply(x)
    return out
