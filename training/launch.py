"""How this rank was started: by hpcrun's agent, by torchrun, or alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcrun.errors import UserError
from hpcrun.recipe import Recipe
from hpcrun.records import RunDir, claim_attempt
from training.parallel.exchange import broadcast_json

_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """A rank's place, and the attempt it belongs to."""

    rank: int
    local_rank: int
    world: int
    run: RunDir
    attempt: int
    claim: str
    metrics: Path
    heartbeats: str | None = None
    local_world: int = 1
    """Ranks of this node; all nodes have as many, one node's one after the other."""
    memory: Path | None = None
    """The agent's folder in this node's memory."""


def number(environ: Mapping[str, str], name: str) -> int:
    """An integer variable.

    Raises:
        UserError: missing or not an integer; a rank never guesses its place.
    """
    try:
        return int(environ[name])
    except KeyError as error:
        raise UserError(f"{name} is not set: start ranks with hpcrun submit or torchrun") from error
    except ValueError as error:
        raise UserError(f"{name}={environ[name]!r} is not a whole number") from error


def under_agent(environ: Mapping[str, str]) -> Launch:
    """The launch that the agent describes in the environment.

    Raises:
        UserError: a variable is missing.
    """
    for name in ("HPCRUN_RUN_DIR", "HPCRUN_CLAIM"):
        if not environ.get(name):
            raise UserError(f"{name} is not set: ranks of a run directory are started by hpcrun's agent")
    run = RunDir(Path(environ["HPCRUN_RUN_DIR"]))
    attempt = number(environ, "HPCRUN_ATTEMPT")
    return Launch(
        rank=number(environ, "RANK"),
        local_rank=number(environ, "LOCAL_RANK"),
        world=number(environ, "WORLD_SIZE"),
        run=run,
        attempt=attempt,
        claim=environ["HPCRUN_CLAIM"],
        metrics=run.metrics(attempt),
        heartbeats=environ.get("HPCRUN_HEARTBEAT_DIR"),
        local_world=number(environ, "LOCAL_WORLD_SIZE"),
        memory=Path(environ["HPCRUN_MEMORY_DIR"]) if environ.get("HPCRUN_MEMORY_DIR") else None,
    )


def choose_device(recipe: Recipe, local_rank: int) -> torch.device:
    """The rank's device.

    Raises:
        UserError: CUDA is asked for, or fewer GPUs are visible than ranks run here.
    """
    wanted = recipe.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise UserError(
            f"local rank {local_rank} has no GPU: {visible} visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); ask for one per rank"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def join(
    rank: int, world: int, device: torch.device, timeout: timedelta, store: dist.Store | None = None
) -> None:
    """Join the default process group: by ``store``, or at MASTER_ADDR and MASTER_PORT."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def under_torchrun(environ: Mapping[str, str], out: Path) -> Launch:
    """The launch of a rank that torchrun, or a plain shell for one rank, has started.

    Rank 0 claims the attempt in ``out``; the process group must have been joined.

    Raises:
        UserError: on every rank, when ``out`` cannot be written or another process was faster.
    """
    rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    run = RunDir(out.resolve())
    claimed = broadcast_json(_claim(run) if rank == 0 else None)
    if "problem" in claimed:
        raise UserError(claimed["problem"])
    attempt, claim = claimed["attempt"], claimed["claim"]
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    return Launch(rank, local_rank, world, run, attempt, claim, run.path / "metrics.jsonl")


def _claim(run: RunDir) -> dict[str, Any]:
    """The next attempt of ``run``, or what is in the way: the other ranks wait to hear it."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        claimed = claim_attempt(run, job_id="torchrun", restart=0)
    except OSError as error:
        return {"problem": f"--out {run.path}: cannot be written: {error.strerror}"}
    if claimed is None:
        return {"problem": f"{run.path}: another process claimed the next attempt at this moment; start once"}
    return {"attempt": claimed[0], "claim": claimed[1]}


def alone(environ: Mapping[str, str]) -> bool:
    """Whether nobody has told this process a place: then it is the only rank."""
    told = [name for name in _PLACE if name in environ]
    if told and len(told) < len(_PLACE):
        missing = [name for name in _PLACE if name not in environ]
        raise UserError(f"{missing[0]} is not set, but {told[0]} is: start ranks with torchrun")
    return not told
