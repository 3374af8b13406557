"""``torchrun --nproc-per-node 4 -m training RECIPE --out DIR``: the trainer without hpcrun's launcher."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hpcrun.errors import UserError
from hpcrun.recipe import load_recipe
from hpcrun.records import EXIT_STOP
from training.exit import leave
from training.launch import alone, choose_device, join, number, under_torchrun
from training.train import StopRequest, Trainer, guarded


def main() -> int:
    stop = StopRequest()
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--out", type=Path, required=True, help="where metrics and checkpoints go; resumes from it"
    )
    arguments = parser.parse_args()
    try:
        recipe = load_recipe(arguments.recipe, tuple(arguments.overrides))
        single = alone(os.environ)
        local_rank = 0 if single else number(os.environ, "LOCAL_RANK")
        device = choose_device(recipe, local_rank)
    except UserError as error:
        print(f"hpcrun: {error}", file=sys.stderr)
        return 2
    timeout = timedelta(seconds=recipe.recovery.collective_timeout)
    if single:
        join(0, 1, device, timeout, dist.HashStore())
    else:
        join(number(os.environ, "RANK"), number(os.environ, "WORLD_SIZE"), device, timeout)
    code = guarded(lambda: Trainer(recipe, under_torchrun(os.environ, arguments.out), device, stop).train())
    return 2 if code == EXIT_STOP else code  # 86 is a word for hpcrun's agent, and none listens here


if __name__ == "__main__":
    leave(main())
