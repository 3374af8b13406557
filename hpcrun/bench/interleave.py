"""Candidates measured in turns, so that a drift of the machine strikes all of them alike."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from hpcrun.bench.machine import describe_machine
from hpcrun.bench.statistics import Interval, median_interval, ratio_interval

Candidate = Callable[[], float]


@dataclass(frozen=True)
class Result:
    """What was measured, in which order, and where."""

    title: str
    unit: str
    warmup: int
    seed: int
    machine: dict[str, Any]
    orders: list[list[str]]
    samples: dict[str, list[float]]

    def median(self, name: str) -> Interval:
        """Of one candidate, in ``unit``."""
        return median_interval(self.samples[name])

    def ratio(self, name: str, baseline: str) -> Interval:
        """``name`` over ``baseline``, round by round."""
        return ratio_interval(self.samples[name], self.samples[baseline])

    def to_json(self) -> dict[str, Any]:
        """All fields, and the median of each candidate, as plain values for ``json.dumps``."""
        return asdict(self) | {"medians": {name: asdict(self.median(name)) for name in self.samples}}


def interleave(
    title: str, candidates: Mapping[str, Candidate], unit: str, rounds: int, warmup: int = 1, seed: int = 0
) -> Result:
    """Measure every candidate once per round, in an order that changes from round to round.

    A candidate does its work when called and returns seconds or a rate, in ``unit``. What it
    returns in the ``warmup`` rounds before the others is dropped.

    Raises:
        ValueError: no candidates, or one returned no finite, positive number.
    """
    if not candidates:
        raise ValueError(f"{title}: nothing to measure")
    machine = describe_machine()
    for _ in range(warmup):
        for candidate in candidates.values():
            candidate()
    orders = list(islice(_orders(candidates, seed), rounds))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number, order in enumerate(orders):
        for name in order:
            value = candidates[name]()
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{title}: {name} returned {value} {unit} in round {number}")
            samples[name].append(value)
    return Result(title, unit, warmup, seed, machine, orders, samples)


def _orders(names: Iterable[str], seed: int) -> Iterator[list[str]]:
    """Rotations of a shuffle, then of the next one: in each, every name has every place once."""
    generator = random.Random(seed)
    shuffled = list(names)
    while True:
        generator.shuffle(shuffled)
        for shift in range(len(shuffled)):
            yield shuffled[shift:] + shuffled[:shift]
