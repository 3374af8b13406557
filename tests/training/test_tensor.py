"""Tensor parallel parts against their definition."""

from __future__ import annotations

from datetime import timedelta

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
from training.parallel.tensor import VocabParallelTable, WeightGradients

HIDDEN = 3


def inputs(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole table, activations (batch, sequence, hidden) and a target for each position."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab, HIDDEN, generator=generator)
    x = torch.randn(2, vocab, HIDDEN, generator=generator)
    return table, x.requires_grad_(), torch.arange(vocab).repeat(2, 1)


def split_loss(vocab: int) -> dict[str, object]:
    """Loss per token and gradient of the activations with the table split over all ranks."""
    layout = Layout(tp=dist.get_world_size(), cp=1, dp=1, pp=1)
    mesh = Mesh(layout, dist.get_rank(), torch.device("cpu"), timedelta(seconds=30), Recipe())
    head = VocabParallelTable(
        "head.weight",
        vocab,
        HIDDEN,
        0.02,
        mesh=mesh,
        make=Maker(0, mesh.device),
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
    torch.testing.assert_close(torch.tensor([row for found in answers for row in found["table"]]), table.grad)
    for found in answers:
        assert found["width"] == width
        torch.testing.assert_close(torch.tensor(found["loss"]), expected)
        torch.testing.assert_close(torch.tensor(found["grad"]), x.grad)
