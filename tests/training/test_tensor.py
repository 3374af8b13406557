"""Tensor parallel parts against their definition, in fp64."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hpcrun.layout import Layout
from hpcrun.recipe import Recipe
from tests.ranks import run_ranks
from training.parallel.collectives import Region
from training.parallel.mesh import Mesh
from training.parallel.parameters import Maker
from training.parallel.pieces import split_columns, split_rows
from training.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelTable,
    WeightGradients,
)

HIDDEN = 3


def inputs(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole table, activations (batch, sequence, hidden) and a target for each position."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64)
    x = torch.randn(2, vocab, HIDDEN, generator=generator, dtype=torch.float64)
    return table, x.requires_grad_(), torch.arange(vocab).repeat(2, 1)


def make_mesh() -> Mesh:
    """All ranks are tensor parallel."""
    layout = Layout(tp=dist.get_world_size(), cp=1, dp=1, pp=1)
    return Mesh(layout, dist.get_rank(), torch.device("cpu"), timedelta(seconds=30), Recipe())


def make_wide(mesh: Mesh) -> Maker:
    make = Maker(0, mesh.device)
    make.dtype = torch.float64
    return make


def same(found: object, expected: torch.Tensor | None) -> None:
    assert expected is not None
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)


def split_loss(vocab: int) -> dict[str, object]:
    """Loss per token and gradient of the activations with the table split over all ranks."""
    mesh = make_mesh()
    head = VocabParallelTable(
        "head.weight",
        vocab,
        HIDDEN,
        0.02,
        mesh=mesh,
        make=make_wide(mesh),
        region=Region(mesh.tp, scattered=False),
        products=WeightGradients(),
    )
    table, x, target = inputs(vocab)
    head.weight.gradient = torch.zeros_like(head.weight)
    with torch.no_grad():
        for piece in head.weight.pieces:
            piece.of(head.weight).copy_(table[slice(*piece.box[0])])
    loss = head.losses(x.transpose(0, 1), target).t()
    loss.sum().backward()
    assert x.grad is not None
    rows = [row for piece in head.weight.pieces for row in piece.of(head.weight.gradient).tolist()]
    return {
        "width": head.weight.shape[0],
        "loss": loss.tolist(),
        "grad": x.grad.tolist(),
        "table": rows,
    }


@pytest.mark.parametrize(
    ("tp", "vocab", "width"), [(2, 6, 3), (2, 7, 4), (4, 5, 2)], ids=["even", "padded", "a rank of padding"]
)
def test_the_loss_over_a_split_vocabulary_is_cross_entropy(tp: int, vocab: int, width: int) -> None:
    table, x, target = inputs(vocab)
    table.requires_grad_()
    expected = F.cross_entropy((x @ table.T).transpose(1, 2), target, reduction="none")
    expected.sum().backward()
    answers = run_ranks(tp, split_loss, vocab)
    same([row for found in answers for row in found["table"]], table.grad)
    for found in answers:
        assert found["width"] == width
        same(found["loss"], expected.detach())
        same(found["grad"], x.grad)


INNER = 6


def matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """An input (sequence, batch, hidden), the matrices of two layers, and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, 2, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (4, 2, HIDDEN))
    x, up, down, grad = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x.requires_grad_(), up.requires_grad_(), down.requires_grad_(), grad


def split_layers(scattered: bool, later: bool) -> dict[str, object]:
    """The two layers split over all ranks, their weight gradients made at once or ``later``."""
    mesh, products = make_mesh(), WeightGradients()
    tp, index, region = mesh.layout.tp, mesh.at.tp, Region(mesh.tp, scattered)
    rows = INNER // tp
    common: dict[str, Any] = {"bias": None, "make": make_wide(mesh), "region": region, "products": products}
    up_pieces = split_rows("up", (INNER, HIDDEN), rows, index)
    down_pieces = split_columns("down", (HIDDEN, INNER), tp, index)
    up = ColumnParallelLinear(up_pieces, HIDDEN, rows, 0.02, **common)
    down = RowParallelLinear(down_pieces, rows, HIDDEN, 0.02, **common)
    x, whole_up, whole_down, grad = (tensor.detach() for tensor in matrices())
    gradients = []
    for layer, full in ((up, whole_up), (down, whole_down)):
        layer.weight.data.copy_(full[tuple(slice(*edge) for edge in layer.weight.pieces[0].box)])
        layer.weight.gradient = torch.zeros_like(layer.weight)
        gradients.append(layer.weight.gradient)
    if scattered:
        x, grad = x.chunk(tp)[index], grad.chunk(tp)[index]
    out = down(up(x.requires_grad_()).tanh())
    if later:
        with products.keep() as kept:
            out.backward(grad)
        assert not any(gradient.any() for gradient in gradients)
        with torch.no_grad():
            for product in kept:
                product()
    else:
        out.backward(grad)
    assert x.grad is not None
    up_grad, down_grad = gradients[0].tolist(), gradients[1].t().tolist()
    return {"out": out.tolist(), "x": x.grad.tolist(), "up": up_grad, "down": down_grad}


@pytest.mark.parametrize("later", [False, True], ids=["at once", "split"])
@pytest.mark.parametrize(("tp", "scattered"), [(1, False), (2, False), (2, True)])
def test_a_split_backward_gives_the_gradients_of_the_whole(tp: int, scattered: bool, later: bool) -> None:
    """Under zero bubble the input gradient comes first and weight gradients are made in an action W."""
    x, up, down, grad = matrices()
    out = (x @ up.T).tanh() @ down.T
    out.backward(grad)
    answers = run_ranks(tp, split_layers, scattered, later)
    for name, expected in (("out", out.detach()), ("x", x.grad)):
        if scattered:
            same([row for found in answers for row in found[name]], expected)
        else:
            for found in answers:
                same(found[name], expected)
    assert down.grad is not None
    for name, expected in (("up", up.grad), ("down", down.grad.T)):
        same([row for found in answers for row in found[name]], expected)
