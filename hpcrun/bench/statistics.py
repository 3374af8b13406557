"""Medians and paired ratios with intervals that assume no distribution.

Samples must be independent. Timings are skewed and have outliers, so means and normal
intervals mislead (Hoefler and Belli, "Scientific Benchmarking of Parallel Computing
Systems", SC15, rules 5 to 8).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Interval:
    """A median and what encloses the true one with probability ``confidence`` or more.

    ``confidence`` is what the order statistics give, which is not the level asked for: more,
    as a rule, and less where there are too few samples (0.94 for 5, 0 for one).
    """

    median: float
    low: float
    high: float
    confidence: float
    samples: int


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """The sample median with the narrowest symmetric interval of order statistics.

    The number of n samples below the true median is binomial (n, 1/2), so the k-th smallest
    and the k-th largest enclose it with probability sum(comb(n, i), i = k .. n - k) / 2**n
    (David and Nagaraja, "Order Statistics", 3rd ed., section 7.1).

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("a median needs at least one sample")
    ordered, n = sorted(samples), len(samples)
    rank, enclosing = 1, 2**n - 2
    while (narrower := enclosing - 2 * comb(n, rank)) / 2**n >= confidence:
        rank, enclosing = rank + 1, narrower
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[n - rank], enclosing / 2**n, n)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95
) -> Interval:
    """The median of the ratios of paired samples, with its interval.

    Pairs come from the same round, so what slowed a whole round cancels out.

    Raises:
        ValueError: no samples, or not as many of one as of the other.
    """
    pairs = zip(numerators, denominators, strict=True)
    return median_interval([numerator / denominator for numerator, denominator in pairs], confidence)
