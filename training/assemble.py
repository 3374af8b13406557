"""From recipe and mesh to the parts that train: the order in which they are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hpcrun.layout import micro_batches as micro_batches_of
from hpcrun.layout import stage_layers
from hpcrun.recipe import Recipe
from hpcrun.schedule import stages_of
from training.data.batches import Batches
from training.model.dropout import Noise
from training.model.layers import Build
from training.model.transformer import Stage, token_table
from training.monitor.load import ExpertLoad
from training.optim.adamw import make_optimizer
from training.parallel.collectives import Region
from training.parallel.dispatch import Dispatch, Planner
from training.parallel.mesh import Mesh
from training.parallel.parameters import Maker
from training.parallel.pipeline import Pipeline
from training.parallel.sharding import Sharding
from training.parallel.tensor import WeightGradients


@dataclass(frozen=True)
class Parts:
    """One rank's share of the model and what moves it."""

    model: nn.ModuleDict
    """Its stages by their number."""
    sharding: Sharding
    pipeline: Pipeline
    optimizer: torch.optim.AdamW
    batches: Batches
    noise: Noise
    load: ExpertLoad


def assemble(
    recipe: Recipe,
    mesh: Mesh,
    *,
    micro_batches: int | None = None,
    plan: Planner = Dispatch.plan,
    draw: bool = True,
) -> Parts:
    """The trainer of one rank, with its initial weights. Collective.

    A dry run has fewer ``micro_batches`` than the recipe, another ``plan`` of what experts get, and
    does not ``draw`` weights.
    """
    parallel, model, at = recipe.parallel, recipe.model, mesh.at
    region = Region(mesh.tp, parallel.sequence_parallel)
    place = f"/cp{at.cp}" * (mesh.layout.cp > 1) + f"/tp{at.tp}" * region.scattered
    noise = Noise(recipe.train.seed, place)
    products = WeightGradients()
    make = Maker(recipe.train.seed, mesh.device, draw=draw)
    load = ExpertLoad()
    samples = recipe.train.global_batch // recipe.train.micro_batch
    build = Build(model, mesh, make, region, products, noise, load, samples, plan)
    sharding = Sharding(mesh, parallel.zero, parallel.offload)
    numbers = stages_of(parallel.schedule, mesh.layout.pp, parallel.stages_per_rank, at.pp)
    last = parallel.stages - 1
    embedding = token_table("embedding.weight", build) if 0 in numbers else None
    head = None
    if last in numbers:
        if model.tie_embeddings:
            head = embedding or token_table("embedding.weight", build)
        else:
            head = token_table("head.weight", build)
    if model.tie_embeddings and last not in numbers and embedding is not None:
        embedding.weight.tied = True
    if model.tie_embeddings and 0 not in numbers and head is not None:
        head.weight.tied = True
    layers = stage_layers(model, parallel)
    stages = {
        number: Stage(
            number,
            layers[number],
            build,
            sharding,
            embedding if number == 0 else None,
            head if number == last else None,
        )
        for number in numbers
    }
    count = micro_batches or micro_batches_of(recipe, mesh.layout)
    pipeline = Pipeline(stages, recipe, mesh, sharding, products, count)
    optimizer = make_optimizer(sharding.shards, recipe.train)
    modules = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
    return Parts(modules, sharding, pipeline, optimizer, Batches(recipe, mesh), noise, load)
