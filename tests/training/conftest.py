"""Fixtures for the trainer's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of byte tokens with some structure, so that a model can learn it."""
    path = tmp_path_factory.mktemp("data") / "tokens.bin"
    generator = np.random.default_rng(0)
    steps = generator.integers(0, 3, 40_000, dtype=np.int64)
    path.write_bytes((np.cumsum(steps) % 61).astype(np.uint8).tobytes())
    return path
