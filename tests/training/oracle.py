"""The oracle of every layout: one process without parallelism, compared gradient by gradient."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrun.recipe import Recipe
from tests.ranks import run_ranks
from tests.training.runs import curve
from training.launch import under_torchrun
from training.train import StopRequest, Totals, Trainer

STEPS = 5
Gradients = dict[str, np.ndarray]


class Recording(Trainer):
    """Writes every gradient that the optimizer is about to use."""

    folder: Path

    def _totals(self, loss: torch.Tensor) -> Totals:
        places, values = [], []
        for shard in self.parts.sharding.shards:
            assert shard.grad is not None
            for piece in shard.pieces:
                places.append([piece.name, piece.shape, piece.box])
                values.append(piece.of(shard.grad).double().numpy())
        path = self.folder / f"gradients.{self.step + 1}.{self.launch.rank}.npz"
        np.savez(path, np.array(json.dumps(places)), *values)
        return super()._totals(loss)


def record_on(wanted: Recipe, out: str) -> int:
    """Train on this rank and record; for ``run_ranks``."""
    Recording.folder = Path(out)
    launch = under_torchrun(os.environ, Path(out))
    return Recording(wanted, launch, torch.device("cpu"), StopRequest()).train()


def record(wanted: Recipe, world: int, out: Path) -> list[Gradients]:
    """The whole gradient of each step, put together from all ranks, which must agree where they overlap."""
    out.mkdir()
    assert run_ranks(world, record_on, wanted, str(out), seconds=120) == [0] * world
    return [_put_together(out, step, world) for step in range(1, wanted.train.steps + 1)]


def _put_together(out: Path, step: int, world: int) -> Gradients:
    whole: Gradients = {}
    for rank in range(world):
        with np.load(out / f"gradients.{step}.{rank}.npz") as found:
            for number, (name, shape, box) in enumerate(json.loads(str(found["arr_0"])), start=1):
                values = found[f"arr_{number}"]
                into = whole.setdefault(name, np.full(shape, np.nan))
                place = tuple(slice(*edge) for edge in box)
                known = into[place]
                if not np.isnan(known).any():
                    np.testing.assert_allclose(values, known, rtol=1e-4, atol=1e-7, err_msg=name)
                into[place] = values
    missing = [name for name, values in whole.items() if np.isnan(values).any()]
    assert not missing
    return whole


def norm_of(gradients: Gradients) -> float:
    """Over all of them."""
    return float(sum(float(np.square(values).sum()) for values in gradients.values()) ** 0.5)


def furthest(found: list[Gradients], expected: list[Gradients]) -> float:
    """The largest relative difference of any gradient in any step, by norms.

    A key bias under learned positions moves all scores alike: its gradient is rounding only, and is
    held against 1e-4 of the whole gradient's norm instead of its own.
    """
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        total = norm_of(theirs)
        for name, values in theirs.items():
            scale = max(float(np.linalg.norm(values)), 1e-4 * total)
            worst = max(worst, float(np.linalg.norm(mine[name] - values)) / scale)
    return worst


def losses(out: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(loss, norm) for _, loss, norm in curve(out)]


def world_of(layout: dict[str, Any]) -> int:
    sizes = [int(layout.get(size, 1)) for size in ("tp", "cp", "dp", "pp")]
    return int(np.prod(sizes))
