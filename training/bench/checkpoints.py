"""``python -m training.bench.checkpoints --folder DIR``: checkpoints beside what the disk and memory can do.

One rank saves and loads a made-up state in turns with raw writes and reads of as many bytes, hashed by the
same xxh3 in a thread beside them, with PyTorch's own writer, and with a copy in memory. Reads are warm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as torch_save

from hpcrun.bench.interleave import Result, interleave
from hpcrun.manifest import HASH_BLOCK, block_hash
from hpcrun.records import RunDir, claim_attempt
from hpcrun.retention import remove_checkpoint
from hpcrun.units import show_bytes
from training.checkpoint.load import restore
from training.checkpoint.local import LocalTensor
from training.checkpoint.save import Facts
from training.checkpoint.saver import Saver

AGAINST = (
    ("save", "raw write + xxh3", 0.9),
    ("save", "FileSystemWriter", 1.3),
    ("load", "raw read + xxh3", 0.9),
    ("stall", "memcpy", 1 / 1.2),
)
"""(candidate, baseline, the least speed of the candidate over the baseline's that is promised)."""

_WIDTH = 1024
_SMALL = 64
"""Tensors of one row beside the large ones, like norms and biases."""


class State:
    """A rank's tensors, and the candidates that save, load and copy them in ``folder``."""

    def __init__(self, size: int, folder: Path) -> None:
        self.folder = folder
        rows = max(1, size // (16 * _WIDTH * 4))
        shapes = [(rows, _WIDTH)] * 16 + [(_WIDTH,)] * _SMALL
        self.tensors = [
            LocalTensor(f"model/t{index}", shape, tuple((0, one) for one in shape), torch.randn(shape))
            for index, shape in enumerate(shapes)
        ]
        self.bytes = sum(tensor.bytes for tensor in self.tensors)
        self.run = RunDir(folder / "run")
        self.run.path.mkdir(parents=True)
        claimed = claim_attempt(self.run)
        assert claimed is not None
        self._attempt, self._claim = claimed
        self._steps = count(1)
        self._saver = Saver(timeout=3600)
        self._copies = [torch.empty_like(tensor.data) for tensor in self.tensors]
        self._loaded = [
            LocalTensor(tensor.name, tensor.shape, tensor.box, torch.empty_like(tensor.data))
            for tensor in self.tensors
        ]
        self._raw = folder / "raw"
        self._write_raw(self._raw)
        self._buffer = torch.empty(self.bytes, dtype=torch.uint8)
        self._kept = self._save(background=False)

    def candidates(self) -> dict[str, Callable[[], float]]:
        """Name -> seconds of one go."""
        return {
            "save": self.save,
            "raw write + xxh3": self.raw_write,
            "FileSystemWriter": self.torch_write,
            "load": self.load,
            "raw read + xxh3": self.raw_read,
            "stall": self.stall,
            "memcpy": self.memcpy,
        }

    def save(self) -> float:
        with _clock() as seconds:
            saved = self._save(background=False)
        remove_checkpoint(saved)
        return seconds[0]

    def stall(self) -> float:
        """Seconds for which a save in the background stops the step."""
        facts = self._facts()
        with _clock() as seconds:
            self._saver.start(facts, self.tensors, background=True)
        remove_checkpoint(self._saver.finish().facts.folder)
        return seconds[0]

    def load(self) -> float:
        with _clock() as seconds:
            restored = restore(self.run, {}, self._loaded)
        assert restored is not None
        return seconds[0]

    def memcpy(self) -> float:
        with _clock() as seconds:
            for copy, tensor in zip(self._copies, self.tensors, strict=True):
                copy.copy_(tensor.data)
        return seconds[0]

    def raw_write(self) -> float:
        path = self.folder / "written"
        with _clock() as seconds:
            self._write_raw(path)
        path.unlink()
        return seconds[0]

    def raw_read(self) -> float:
        target = self._buffer.numpy().data
        with _clock() as seconds, ThreadPoolExecutor(1) as hasher:
            fd = os.open(self._raw, os.O_RDONLY)
            hashes = []
            for start in range(0, self.bytes, HASH_BLOCK):
                block = target[start : start + HASH_BLOCK]
                os.preadv(fd, [block], start)
                hashes.append(hasher.submit(block_hash, block))
            for one in hashes:
                one.result()
            os.close(fd)
        return seconds[0]

    def torch_write(self) -> float:
        folder = self.folder / "torch"
        state = {tensor.name: tensor.data for tensor in self.tensors}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _clock() as seconds:
                torch_save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        shutil.rmtree(folder)
        return seconds[0]

    def _facts(self) -> Facts:
        return Facts(self.run, next(self._steps), self._attempt, self._claim, layout={}, model={}, state={})

    def _save(self, background: bool) -> Path:
        self._saver.start(self._facts(), self.tensors, background=background)
        return self._saver.finish().facts.folder

    def _write_raw(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        with ThreadPoolExecutor(1) as hasher:
            hashes = []
            for tensor in self.tensors:
                data = tensor.data.view(-1).view(torch.uint8).numpy().data
                for start in range(0, len(data), HASH_BLOCK):
                    block = data[start : start + HASH_BLOCK]
                    hashes.append(hasher.submit(block_hash, block))
                    os.write(fd, block)
            os.fsync(fd)
            for one in hashes:
                one.result()
        os.close(fd)


@contextmanager
def _clock() -> Iterator[list[float]]:
    """Seconds spent inside, once it has been left. What earlier goes left to write is out of the way."""
    os.sync()
    seconds: list[float] = []
    began = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - began)


def report(state: State, result: Result) -> dict[str, Any]:
    """All figures as plain values. A ratio is of speeds: above 1 the candidate is the faster one."""
    ratios = []
    for name, baseline, wanted in AGAINST:
        ratio = result.ratio(baseline, name)
        figures = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
        ratios.append({"of": name, "to": baseline, "wanted": wanted, **figures})
    return {"bytes": state.bytes, "folder": str(state.folder), "ratios": ratios, **result.to_json()}


def text(told: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{show_bytes(told['bytes'])} of one rank, {told['folder']}, {len(told['orders'])} rounds", ""]
    lines.append(f"{'':20}{'seconds':>10}{'95 % within':>22}{'GB/s':>8}")
    for name, median in told["medians"].items():
        within = f"{median['low']:.4f} .. {median['high']:.4f}"
        rate = told["bytes"] / median["median"] / 1e9
        lines.append(f"{name:20}{median['median']:>10.4f}{within:>22}{rate:>8.2f}")
    lines.append("")
    for one in told["ratios"]:
        inside = f"({one['low']:.3f} .. {one['high']:.3f})"
        line = f"{one['of']:6}{one['ratio']:.3f} times as fast as {one['to']} {inside}"
        lines.append(f"{line}; wanted {one['wanted']:.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.bench.checkpoints", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--size", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="hpcrun-bench-", dir=arguments.folder) as folder:
            state = State(arguments.size, Path(folder))
            result = interleave("checkpoints", state.candidates(), "s", arguments.rounds)
            told = report(state, result)
    except OSError as error:
        print(f"hpcrun: {error.filename or arguments.folder}: {error.strerror}", file=sys.stderr)
        return 2
    print(json.dumps(told) if arguments.json else text(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
