"""Gloo ranks for tests: forked from the test process, which has imported torch once."""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from training.exit import end_with


class RankFailed(AssertionError):
    """A rank raised or died; the text is its traceback."""


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> list[Any]:
    """``function(*arguments)`` on ``world`` ranks of one process group; its JSON results by rank.

    All ranks are killed when one fails or the deadline passes.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(rank, world, folder, function, arguments) for rank in range(world)]
        try:
            return _collect(ranks, time.monotonic() + seconds)
        finally:
            for pid, read_end in ranks:
                _kill(pid)
                os.close(read_end)


def _fork(
    rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    end_with(parent)
    os.close(read_end)
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        store = dist.FileStore(f"{folder}/store", world)
        timeout = timedelta(seconds=30)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        answer = {"result": function(*arguments)}
    except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
        answer = {"error": f"rank {rank}: {traceback.format_exc()}"}
    with os.fdopen(write_end, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def _collect(ranks: list[tuple[int, int]], deadline: float) -> list[Any]:
    texts = {read_end: b"" for _, read_end in ranks}
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        ready, _, _ = select.select([fd for fd in texts if fd not in results], [], [], 0.2)
        for fd in ready:
            data = os.read(fd, 1 << 16)
            texts[fd] += data
            if not data:
                answer = json.loads(texts[fd] or b'{"error": "a rank died without a word"}')
                if "error" in answer:
                    raise RankFailed(answer["error"])
                results[fd] = answer["result"]
        if time.monotonic() > deadline:
            raise RankFailed(f"{len(ranks) - len(results)} of {len(ranks)} ranks did not end in time")
    return [results[read_end] for _, read_end in ranks]


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
