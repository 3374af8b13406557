"""Samples from a flat file of token ids, in an order that no layout changes.

Sample i is tokens[i * sequence : (i + 1) * sequence + 1]. Epoch e visits all samples
in a permutation drawn from (seed, e); step s takes the next ``global_batch`` of them,
and data parallel rank d its d-th contiguous part.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import xxhash

from hpcrun.errors import UserError
from hpcrun.recipe import Recipe

_END = 1 << 20


class Samples:
    """The endless sequence of samples of one file.

    ``identity`` tells this sequence from others: a sample number means nothing in another one.

    Raises:
        UserError: no file is named, it is missing, or too short for one sample.
    """

    def __init__(self, recipe: Recipe) -> None:
        data, model = recipe.data, recipe.model
        if data.path is None:
            raise UserError("data.path is not set; make a file with python -m training.data.prepare")
        dtype = np.dtype(data.dtype).newbyteorder("<")
        try:
            size = Path(data.path).stat().st_size
        except OSError as error:
            raise UserError(f"data.path {data.path}: {error.strerror}") from error
        if size % dtype.itemsize:
            raise UserError(f"data.path {data.path}: {size} bytes are no whole number of {data.dtype} tokens")
        self.count = (size // dtype.itemsize - 1) // model.sequence
        if self.count < 1:
            raise UserError(
                f"data.path {data.path}: {size // dtype.itemsize} tokens are too few for one sample of "
                f"model.sequence {model.sequence} + 1"
            )
        self.identity = {
            "tokens": size // dtype.itemsize,
            "dtype": data.dtype,
            "seed": data.seed,
            "ends": _hash_of_ends(Path(data.path), size),
        }
        self._path = data.path
        self._tokens = np.memmap(data.path, dtype=dtype, mode="r")
        self._sequence, self._vocab, self._seed = model.sequence, model.vocab, data.seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Samples ``first`` to ``first + count`` of the endless order, (count, sequence + 1) int64.

        Raises:
            UserError: a token id beyond model.vocab; names its place in the file.
        """
        rows = [self._sample(number) for number in range(first, first + count)]
        return torch.from_numpy(np.stack(rows))

    def _sample(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self.count)
        start = int(self._order[place]) * self._sequence
        row = np.asarray(self._tokens[start : start + self._sequence + 1]).astype(np.int64)
        if int(row.max()) >= self._vocab:
            at = start + int(row.argmax())
            raise UserError(
                f"data.path {self._path}: token {row.max()} at position {at} is outside "
                f"model.vocab {self._vocab}"
            )
        return row


def _hash_of_ends(path: Path, size: int) -> str:
    """xxh3-64 (hex) of the first and the last MiB: reading all of a large file would delay every start."""
    with path.open("rb") as file:
        digest = xxhash.xxh3_64(file.read(_END))
        file.seek(max(0, size - _END))
        digest.update(file.read(_END))
    return digest.hexdigest()
