"""Backward passes written by hand, against autograd's of the plain formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from training.model.pointwise import rms_norm, rotate, swiglu

Function = Callable[..., torch.Tensor]

_GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=_GENERATOR, dtype=torch.float64).to(dtype)


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def plain_rotation(x: torch.Tensor) -> torch.Tensor:
    angles = ANGLES.to(x.dtype)
    left, right = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def plain_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


ANGLES = draw(5, 1, 1, 4)
CASES: dict[str, tuple[Function, Function, list[torch.Tensor]]] = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-5), plain_norm, [draw(5, 3, 8), draw(8)]),
    "norm of a slice": (
        lambda x, w: rms_norm(x[:, :, :2], w, 1e-5),
        lambda x, w: plain_norm(x[:, :, :2], w),
        [draw(5, 3, 4, 8), draw(8)],
    ),
    "rotation": (
        lambda x: rotate(x, torch.cat((ANGLES, ANGLES), -1).cos(), ANGLES.sin()),
        plain_rotation,
        [draw(5, 3, 2, 8)],
    ),
    "swiglu": (swiglu, plain_swiglu, [draw(5, 3, 8)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_formula(name: str) -> None:
    mine, plain, inputs = CASES[name]
    for tensor in inputs:
        tensor.requires_grad_()
    out, expected = mine(*inputs), plain(*inputs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = draw(*out.shape[1:], out.shape[0]).movedim(-1, 0)
    found = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_narrow_inputs_are_computed_wide_and_keep_their_type() -> None:
    x = draw(5, 3, 8, dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(8, requires_grad=True)
    out = rms_norm(x, weight, 1e-5)
    out.sum().backward()
    assert out.dtype == x.dtype and x.grad is not None and x.grad.dtype == x.dtype
    assert weight.grad is not None and weight.grad.dtype == weight.dtype
    exact = plain_norm(x.detach().float(), torch.ones(8))
    torch.testing.assert_close(out.float(), exact.bfloat16().float(), rtol=0, atol=0)
    turned = rotate(x, torch.cat((ANGLES, ANGLES), -1).cos().float(), ANGLES.sin().float())
    assert turned.dtype == x.dtype
