"""Ranks that stay alive and do one step whenever they are asked, so that others can be measured between."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, TextIO

import torch
import torch.distributed as dist

from hpcrun.errors import UserError
from hpcrun.recipe import Recipe
from training.exit import end_with
from training.launch import choose_device, join

Step = Callable[[], object]
Make = Callable[[torch.device], Step]


class Ranks:
    """``world`` processes that have been made ready by ``make``, and wait.

    They are forked: this process must not have computed anything with torch.
    """

    def __init__(self, world: int, recipe: Recipe, folder: Path, make: Make) -> None:
        """Raises:
        UserError: a rank could not be made ready.
        """
        folder.mkdir(parents=True)
        self._ranks = [_fork(rank, world, recipe, folder, make) for rank in range(world)]
        try:
            self._hear()
        except UserError:
            self.close()
            raise

    def step(self) -> float:
        """All ranks do one step at the same time; the slowest one's seconds."""
        for rank in self._ranks:
            rank.ask.write(b"\n")
            rank.ask.flush()
        return max(self._hear())

    def close(self) -> None:
        for rank in self._ranks:
            os.kill(rank.pid, signal.SIGKILL)
            os.waitpid(rank.pid, 0)
            rank.ask.close()
            rank.answers.close()

    def _hear(self) -> list[float]:
        seconds = []
        for number, rank in enumerate(self._ranks):
            answer = json.loads(rank.answers.readline() or b'{"problem": "it died without a word"}')
            if "problem" in answer:
                raise UserError(f"rank {number} of {len(self._ranks)}: {answer['problem']}")
            seconds.append(float(answer["seconds"]))
        return seconds


class _Rank:
    """One forked process, seen from its parent."""

    def __init__(self, pid: int, ask: BinaryIO, answers: BinaryIO) -> None:
        self.pid, self.ask, self.answers = pid, ask, answers


def _fork(rank: int, world: int, recipe: Recipe, folder: Path, make: Make) -> _Rank:
    asked, ask = os.pipe()
    answers, answer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(asked)
        os.close(answer)
        return _Rank(pid, os.fdopen(ask, "wb"), os.fdopen(answers, "rb"))
    os.close(ask)
    os.close(answers)
    end_with(parent)
    with os.fdopen(asked, "rb") as questions, os.fdopen(answer, "w", buffering=1) as out:
        try:
            step, device = _prepare(rank, world, recipe, folder, make)
            _answer(questions, out, step, device)
        except UserError as error:
            print(json.dumps({"problem": str(error)}), file=out)
        except BaseException:  # noqa: BLE001 - the parent must hear whatever it was
            print(json.dumps({"problem": traceback.format_exc()}), file=out)
    os._exit(0)


def _prepare(rank: int, world: int, recipe: Recipe, folder: Path, make: Make) -> tuple[Step, torch.device]:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    device = choose_device(recipe, rank)
    join(rank, world, device, timedelta(minutes=5), dist.FileStore(str(folder / "store"), world))
    return make(device), device


def _answer(questions: BinaryIO, out: TextIO, step: Step, device: torch.device) -> None:
    print(json.dumps({"seconds": 0.0}), file=out)
    while questions.readline():
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        print(json.dumps({"seconds": time.perf_counter() - began}), file=out)
