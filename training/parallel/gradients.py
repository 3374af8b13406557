"""Gradients between ranks: data parallel mean, tied embeddings, global norm."""

from __future__ import annotations

import torch

from training.model.parameters import ModelParameter
from training.model.transformer import Stage
from training.parallel.mesh import Mesh, all_reduce_


def reduce_gradients(parameters: list[ModelParameter], mesh: Mesh) -> None:
    """Replace each gradient by its mean over dp, one after the other in a fixed order."""
    if mesh.dp is None:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            all_reduce_(parameter.grad, mesh.dp).div_(mesh.layout.dp)


def reduce_tied_gradients(stage: Stage, tied: bool, mesh: Mesh) -> None:
    """Sum the two gradients of an embedding whose table is also the last stage's head."""
    table = stage.embedding or stage.head
    if tied and mesh.layout.pp > 1 and table is not None and table.weight.grad is not None:
        all_reduce_(table.weight.grad, mesh.tied)


def global_norm(parameters: list[ModelParameter], tied: bool, mesh: Mesh) -> torch.Tensor:
    """The L2 norm of the whole model's gradient, every element counted once. Same on all ranks."""
    squares = torch.zeros((), dtype=torch.float32, device=mesh.device)
    for parameter in parameters:
        if parameter.grad is not None and _counts_here(parameter, tied, mesh):
            squares += parameter.grad.float().square().sum()
    return all_reduce_(squares, mesh.replica).sqrt()


def clip_(parameters: list[ModelParameter], norm: torch.Tensor, limit: float) -> None:
    """Scale all gradients so that their global norm is at most ``limit``; 0 does not clip."""
    if limit > 0:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _counts_here(parameter: ModelParameter, tied: bool, mesh: Mesh) -> bool:
    if parameter.sharded.replicated and mesh.at.tp:
        return False
    copy = tied and mesh.layout.pp > 1 and parameter.canonical == "embedding.weight"
    return not (copy and not mesh.first_stage)
