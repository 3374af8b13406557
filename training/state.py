"""What a checkpoint of this trainer holds, rank by rank."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch

from training.checkpoint.local import LocalTensor
from training.optim.adamw import MOMENTS
from training.parallel.units import Shard


class RandomState:
    """The generators of one rank as byte tensors: Python, numpy, torch and, if in use, CUDA."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._prefix = f"rng/rank{rank:05d}"
        self._device = device
        self.buffers = self._capture()

    def refresh(self) -> None:
        """Bring the buffers up to date before a save."""
        self.buffers = self._capture()

    def apply(self) -> None:
        """Set the generators from the buffers after a load."""
        version, words, gauss = json.loads(bytes(self.buffers["python"].numpy()))
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = json.loads(bytes(self.buffers["numpy"].numpy()))
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(self.buffers["torch"])
        if "cuda" in self.buffers:
            torch.cuda.set_rng_state(self.buffers["cuda"], self._device)

    def local_tensors(self) -> list[LocalTensor]:
        return [
            LocalTensor(f"{self._prefix}/{kind}", tuple(data.shape), ((0, data.numel()),), data)
            for kind, data in self.buffers.items()
        ]

    def _capture(self) -> dict[str, torch.Tensor]:
        name, keys, *rest = np.random.get_state(legacy=True)
        buffers = {
            "python": _text_buffer(random.getstate()),
            "numpy": _text_buffer([name, np.asarray(keys).tolist(), *rest]),
            "torch": torch.get_rng_state(),
        }
        if self._device.type == "cuda":
            buffers["cuda"] = torch.cuda.get_rng_state(self._device)
        return buffers


def _text_buffer(value: Any) -> torch.Tensor:
    """JSON padded to one width, so that a buffer made now can take what was saved then."""
    text = json.dumps(value).encode()
    width = 16384
    return torch.frombuffer(bytearray(text.ljust(width)), dtype=torch.uint8)


def local_tensors(
    shards: list[Shard], optimizer: torch.optim.Optimizer, noise: RandomState
) -> list[LocalTensor]:
    """Weights, both moments and generators of this rank, as canonical rectangles."""
    found = []
    for shard in shards:
        state = optimizer.state[shard.values]
        values = {"model": shard.values.detach(), **{moment: state[moment] for moment in MOMENTS}}
        for kind, data in values.items():
            found += [
                LocalTensor(f"{kind}/{piece.name}", piece.shape, piece.box, piece.of(data))
                for piece in shard.pieces
            ]
    return found + noise.local_tensors()
