"""What is measured side by side: a roof, a plain loop, and the trainer in layouts."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hpcrun.bench.interleave import Result, interleave
from hpcrun.counts import training_flops
from hpcrun.errors import UserError
from hpcrun.layout import Layout, make_layout, micro_batches
from hpcrun.recipe import Recipe
from training.bench import bare
from training.bench.ranks import Ranks, Step
from training.data.tokens import Samples
from training.launch import under_torchrun
from training.optim.adamw import learning_rate
from training.train import StopRequest, Trainer

SINGLE = "single"
_SHARE = 4
"""The roof does this part of a step's operations."""


@dataclass(frozen=True)
class Candidate:
    """What is measured, and what its speed is held against."""

    name: str
    world: int
    tokens: int
    """Of all its ranks in one step."""
    make: Callable[[torch.device], Step]
    baseline: str | None = None
    limit: float = 1.0
    """The share of the baseline's speed that the schedule allows: m / (m + p - 1) of a pipeline."""


def candidates(recipe: Recipe, layouts: dict[str, Recipe], folder: Path) -> list[Candidate]:
    """The roof and the plain loop on as many ranks as the others, and the trainer alone and in ``layouts``.

    Raises:
        UserError: a layout is impossible.
    """
    tokens = recipe.train.global_batch * recipe.model.sequence
    plain = bare.problem(recipe) is None
    trainers = []
    for name, wanted in {SINGLE: recipe, **layouts}.items():
        layout = _layout(name, wanted)
        count = micro_batches(wanted, layout)
        baseline = _times("bare loop", layout.world) if plain else _times("sgemm", layout.world)
        limit = count / (count + layout.pp - 1)
        make = partial(trainer_step, wanted, folder / name)
        trainers.append(Candidate(name, layout.world, tokens, make, baseline, limit))
    others = []
    for world in sorted({one.world for one in trainers}):
        roof = _times("sgemm", world)
        others.append(Candidate(roof, world, world * tokens // _SHARE, partial(_sgemm, recipe)))
        if plain:
            loop = partial(_bare, recipe)
            others.append(Candidate(_times("bare loop", world), world, world * tokens, loop, roof))
    return others + trainers


def measure(recipe: Recipe, wanted: list[Candidate], rounds: int, folder: Path) -> Result:
    """Tokens per second of all ``wanted``, whose ranks wait while others are measured."""
    with ExitStack() as stack:
        rates = {}
        for one in wanted:
            ranks = Ranks(one.world, recipe, folder / one.name, one.make)
            stack.callback(ranks.close)
            rates[one.name] = partial(rate, ranks, one.tokens)
        return interleave(recipe.name, rates, "tokens/s", rounds)


def rate(ranks: Ranks, tokens: int) -> float:
    return tokens / ranks.step()


def _times(name: str, world: int) -> str:
    return name if world == 1 else f"{name} x {world}"


def _layout(name: str, recipe: Recipe) -> Layout:
    parallel = recipe.parallel
    try:
        return make_layout(recipe, parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1))
    except ValueError as error:
        raise UserError(f"layout {name}: {error}") from error


def trainer_step(recipe: Recipe, out: Path, device: torch.device) -> Step:
    return Trainer(recipe, under_torchrun(os.environ, out), device, StopRequest()).train_step


def _bare(recipe: Recipe, device: torch.device) -> Step:
    loop, samples, train = bare.Loop(recipe, device), Samples(recipe), recipe.train
    step = 0

    def one() -> float:
        nonlocal step
        batch = samples.batch(step * train.global_batch, train.global_batch)
        step += 1
        return loop.step(batch, learning_rate(step, train))

    return one


def _sgemm(recipe: Recipe, device: torch.device) -> Step:
    """Products as large as the MLP's, so many that they are as much work as a part of a step."""
    model, train = recipe.model, recipe.train
    kind = torch.bfloat16 if train.precision == "bf16" else torch.float32
    rows = train.micro_batch * model.sequence
    left = torch.randn(rows, model.hidden, dtype=kind, device=device)
    right = torch.randn(model.hidden, model.ffn, dtype=kind, device=device)
    out = torch.empty(rows, model.ffn, dtype=kind, device=device)
    step = training_flops(model) * train.global_batch * model.sequence
    count = round(step / _SHARE / (2 * rows * model.hidden * model.ffn))

    def products() -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    return products
