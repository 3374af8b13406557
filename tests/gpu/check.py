"""``make gpu-check``: the trainer on one GPU, in a few minutes. One line of JSON per check.

    python -m tests.gpu.check [--device cpu]

Ends with 1 when a check failed. On ``cpu`` it only shows that the script itself works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpcrun.hardware import match
from hpcrun.recipe import Recipe
from hpcrun.records import read_json_lines
from training._torch import flash_backward, flash_forward
from training.launch import join, under_torchrun
from training.train import StopRequest, Trainer

LLAMA: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "sequence": 256, "vocab": 512}
MOE = LLAMA | {"moe": {"experts": 4, "shared_experts": 1}}
FULL_SIZE = """\
name: gpu
model: {layers: 8, hidden: 4096, heads: 32, kv_heads: 8, ffn_hidden: 14336, vocab: 32000, sequence: 2048}
train: {global_batch: 16, micro_batch: 4, precision: bf16, steps: 1000}
"""
STEPS = 6


class Check:
    """One device and a folder to work in."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.tokens = folder / "tokens"
        steps = np.random.default_rng(0).integers(0, 3, 200_000, dtype=np.int64)
        self.tokens.write_bytes((np.cumsum(steps) % 509).astype("<u2").tobytes())
        self._runs = 0

    def train(
        self, model: dict[str, Any], device: torch.device, out: Path | None = None, **train: Any
    ) -> list[tuple[float, float]]:
        """Loss and gradient norm of each step."""
        if out is None:
            self._runs += 1
            out = self.folder / f"run{self._runs}"
        recipe = Recipe.model_validate(
            {
                "model": model,
                "data": {"path": str(self.tokens), "dtype": "uint16"},
                "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 4, "lr": 1e-3} | train,
                "checkpoint": {"every": STEPS // 2, "keep": None},
            }
        )
        Trainer(recipe, under_torchrun({}, out), device, StopRequest()).train()
        return [(line["loss"], line["grad_norm"]) for line in read_json_lines(out / "metrics.jsonl")]

    def what_it_is(self) -> dict[str, Any]:
        """The hardware table knows the GPU."""
        if self.device.type != "cuda":
            return {"torch": torch.__version__}
        properties = torch.cuda.get_device_properties(self.device)
        entry = match(properties.name)
        assert entry is not None, f"{properties.name} is not in hpcrun/hardware.yaml"
        found = {"name": properties.name, "memory": properties.total_memory, "torch": torch.__version__}
        return found | {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}

    def losses_are_the_cpus(self) -> dict[str, Any]:
        """In fp32, over a few steps, dense and with experts."""
        worst = {}
        for name, model in {"llama": LLAMA, "moe": MOE}.items():
            here, there = self.train(model, self.device), self.train(model, torch.device("cpu"))
            worst[name] = max(abs(one[0] - other[0]) for one, other in zip(here, there, strict=True))
        assert max(worst.values()) < 1e-3, worst
        return worst

    def runs_repeat_bit_for_bit(self) -> dict[str, Any]:
        """Two runs from one seed, with and without experts, in both precisions."""
        same = {}
        for name, model in {"llama": LLAMA, "moe": MOE}.items():
            for precision in ("fp32", "bf16"):
                runs = [self.train(model, self.device, precision=precision) for _ in range(2)]
                same[f"{name} {precision}"] = runs[0] == runs[1]
        assert all(same.values()), same
        return same

    def resuming_changes_nothing(self) -> dict[str, Any]:
        """A run cut after a checkpoint goes on with the same losses."""
        whole = self.train(LLAMA | {"dropout": 0.1}, self.device)
        out = self.folder / "cut"
        self.train(LLAMA | {"dropout": 0.1}, self.device, out)
        last = max((out / "checkpoints").iterdir())
        (last / "manifest.json").unlink()
        again = self.train(LLAMA | {"dropout": 0.1}, self.device, out)
        assert again[-STEPS // 2 :] == whole[-STEPS // 2 :], (again, whole)
        return {"steps repeated": len(again) - STEPS}

    def bf16_is_near_fp32(self) -> dict[str, Any]:
        runs = [self.train(LLAMA, self.device, precision=precision) for precision in ("fp32", "bf16")]
        worst = max(abs(one[0] - other[0]) for one, other in zip(*runs, strict=True))
        assert worst < 0.05, worst
        return {"loss apart": worst}

    def ring_attentions_operators_are_exact(self) -> dict[str, Any]:
        """The private flash operators against the definition, as far as bf16 goes."""
        kind = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        q, k, v, grad = (torch.randn(2, 4, 256, 64, device=self.device) for _ in range(4))
        scores = (q @ k.transpose(-1, -2)) / 8
        future = torch.ones(256, 256, dtype=torch.bool, device=self.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        expected = scores.softmax(-1) @ v
        out, lse = flash_forward(q.to(kind), k.to(kind), v.to(kind), True)
        gradients = flash_backward(grad.to(kind), q.to(kind), k.to(kind), v.to(kind), out, lse, True)
        apart = {
            "out": float((out.float() - expected).abs().max()),
            "lse": float((lse - scores.logsumexp(-1)).abs().max()),
        }
        assert max(apart.values()) < 0.05, apart
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        return apart

    def speed(self) -> dict[str, Any]:
        """A model of 2 billion parameters in bf16 beside the plain loop and the roof."""
        if self.device.type != "cuda":
            return {}
        recipe = self.folder / "full.yaml"
        recipe.write_text(FULL_SIZE)
        command = [sys.executable, "-P", "-m", "training.bench", str(recipe), "--rounds", "5", "--json"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        entry = match(told["machine"]["gpus"][0]) if told["machine"]["gpus"] else None
        peak = {str(name): value for name, value in entry.peak.items()}["bf16"] if entry else None
        rates = {name: median["median"] for name, median in told["medians"].items()}
        share = {name: rate * told["flops_per_token"] / peak for name, rate in rates.items()} if peak else {}
        return {"tokens/s": rates, "of the peak": share}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("hpcrun: no GPU here; --device cpu shows that this script works", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    join(0, 1, device, timedelta(minutes=2), dist.HashStore())
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        check = Check(device, Path(folder))
        checks: list[Callable[[], dict[str, Any]]] = [
            check.what_it_is,
            check.losses_are_the_cpus,
            check.runs_repeat_bit_for_bit,
            check.resuming_changes_nothing,
            check.bf16_is_near_fp32,
            check.ring_attentions_operators_are_exact,
            check.speed,
        ]
        for one in checks:
            began = time.monotonic()
            try:
                told = {"ok": True, "figures": one()}
            except Exception as error:  # noqa: BLE001 - the other checks are to run as well
                told = {"ok": False, "error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
                failed += 1
            took = round(time.monotonic() - began, 1)
            print(json.dumps({"check": one.__name__, "seconds": took} | told), flush=True)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
