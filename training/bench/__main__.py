"""``python -m training.bench RECIPE --layout tp=2 --layout dp=2,zero=3``: layouts side by side.

Each candidate does one optimizer step per round, in an order that changes. ``sgemm`` is the roof: a
matrix product as large as the MLP's, told as the tokens that a step of nothing else would train.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hpcrun.bench.interleave import Result
from hpcrun.counts import parameter_count, training_flops
from hpcrun.errors import UserError
from hpcrun.recipe import Recipe, load_recipe
from training.bench import bare
from training.bench.candidates import Candidate, candidates, measure

_DIMENSIONS = ("tp", "cp", "pp", "dp", "ep")


def report(recipe: Recipe, wanted: list[Candidate], result: Result) -> dict[str, Any]:
    """All figures as plain values."""
    rows = {}
    for one in wanted:
        row: dict[str, Any] = {"ranks": one.world, "limit": one.limit, "baseline": one.baseline}
        if one.baseline:
            ratio = result.ratio(one.name, one.baseline)
            row |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
        rows[one.name] = row
    return {
        "parameters": parameter_count(recipe.model),
        "flops_per_token": training_flops(recipe.model),
        "tokens_per_step": recipe.train.global_batch * recipe.model.sequence,
        "model": recipe.model.model_dump(),
        "train": recipe.train.model_dump(),
        "no_bare_loop": bare.problem(recipe),
        "candidates": rows,
        **result.to_json(),
    }


def text(told: dict[str, Any]) -> str:
    """The report for people."""
    machine, model, train = told["machine"], told["model"], told["train"]
    lines = [
        f"{machine['cpu']}, {machine['cpus']} CPUs, {', '.join(machine['gpus']) or 'no GPU'}; "
        f"load {machine['load'][0]:.1f}; torch {machine['packages']['torch']}",
        f"{told['parameters']:,} parameters: {model['layers']} layers, hidden {model['hidden']}, "
        f"sequence {model['sequence']}; {told['tokens_per_step']:,} tokens a step, "
        f"{train['micro_batch']} samples at a time, {train['precision']}",
        "",
        f"{'':24}{'ranks':>6}{'tokens/s':>10}{'95 % within':>18}   against",
    ]
    for name, row in told["candidates"].items():
        median = told["medians"][name]
        within = f"{median['low']:,.0f} .. {median['high']:,.0f}"
        line = f"{name:24}{row['ranks']:>6}{median['median']:>10,.0f}{within:>18}"
        if row["baseline"]:
            inside = f"({row['ratio_low']:.3f} .. {row['ratio_high']:.3f})"
            line += f"   {row['ratio']:.3f} of {row['baseline']} {inside}"
        if row["limit"] < 1:
            line += f"; {row['ratio'] / row['limit']:.3f} of the {row['limit']:.2f} that a pipeline allows"
        lines.append(line)
    if told["no_bare_loop"]:
        lines.append(f"no bare loop to compare with: {told['no_bare_loop']}")
    return "\n".join(lines)


def make_tokens(recipe: Recipe, path: Path) -> None:
    """Random tokens: speed does not depend on which."""
    count = 8 * recipe.train.global_batch * recipe.model.sequence + 1
    drawn = np.random.default_rng(0).integers(0, recipe.model.vocab, count, dtype=np.uint32)
    path.write_bytes(drawn.astype("<u4").tobytes())


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure in ``folder``, which is empty.

    Raises:
        UserError: recipe or layout are impossible, or a rank failed.
    """
    tokens = folder / "tokens"
    alone = [f"parallel.{name}=1" for name in _DIMENSIONS]
    common = (*arguments.overrides, f"data.path={tokens}", "data.dtype=uint32", *alone)
    recipe = load_recipe(arguments.recipe, common)
    layouts = {
        name: load_recipe(arguments.recipe, (*common, *(f"parallel.{key}" for key in name.split(","))))
        for name in arguments.layouts
    }
    make_tokens(recipe, tokens)
    wanted = candidates(recipe, layouts, folder / "runs")
    return report(recipe, wanted, measure(recipe, wanted, arguments.rounds, folder / "stores"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.bench", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--layout", dest="layouts", action="append", default=[], metavar="KEY=VALUE,...")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="hpcrun-bench-") as folder:
            told = run(arguments, Path(folder))
    except UserError as error:
        print(f"hpcrun: {error}", file=sys.stderr)
        return 2
    print(json.dumps(told) if arguments.json else text(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
