"""The benchmark core on made-up candidates: no test here depends on how fast anything is."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from importlib import metadata
from itertools import count
from types import SimpleNamespace

import pytest

from hpcrun.bench.interleave import Candidate, Result, interleave
from hpcrun.bench.machine import cpu_model, describe_machine, gpu_names
from hpcrun.bench.statistics import Interval, median_interval, ratio_interval


def test_the_interval_is_the_one_of_the_binomial_table() -> None:
    """At 95 %: ranks 2 and 9 of 10, which miss by 0 or 1 heads in 10 tosses on a side; 6 and 15 of 20."""
    ten = median_interval([7, 1, 4, 10, 2, 8, 5, 3, 9, 6])
    assert ten == Interval(5.5, 2, 9, confidence=1 - 2 * (1 + 10) / 2**10, samples=10)
    twenty = median_interval(range(1, 21))
    assert (twenty.low, twenty.high) == (6, 15)
    assert twenty.confidence == pytest.approx(0.9586, abs=1e-4)


def test_a_higher_level_gives_a_wider_interval() -> None:
    wide, narrow = median_interval(range(30), 0.99), median_interval(range(30), 0.5)
    assert wide.low < narrow.low < narrow.median < narrow.high < wide.high
    assert narrow.confidence >= 0.5
    assert wide.confidence >= 0.99


@pytest.mark.parametrize(("samples", "confidence"), {1: 0, 2: 0.5, 5: 0.9375, 6: 0.96875}.items())
def test_too_few_samples_say_how_little_they_tell(samples: int, confidence: float) -> None:
    interval = median_interval(range(samples))
    assert (interval.low, interval.high) == (0, samples - 1)
    assert interval.confidence == confidence


def test_thousands_of_samples_do_not_overflow() -> None:
    """2**2000 is no float."""
    interval = median_interval(range(2000))
    half_width = 1.96 * math.sqrt(2000) / 2
    assert interval.high - interval.median == pytest.approx(half_width, abs=1.5)
    assert interval.median - interval.low == pytest.approx(half_width, abs=1.5)


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(0)
    tries, hits, stated = 4000, 0, 0.0
    for _ in range(tries):
        interval = median_interval([generator.expovariate(1) for _ in range(9)], 0.8)
        hits += interval.low <= math.log(2) <= interval.high
        stated = interval.confidence
    assert stated == pytest.approx(0.8203, abs=1e-4)
    assert hits / tries == pytest.approx(stated, abs=0.02)


def test_a_ratio_is_taken_pair_by_pair() -> None:
    drift = [1.0, 10.0, 100.0, 1000.0, 2.0, 20.0]
    ratio = ratio_interval([1.5 * second for second in drift], drift)
    assert (ratio.low, ratio.median, ratio.high) == (1.5, 1.5, 1.5)


def test_unpaired_or_absent_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one sample"):
        median_interval([])


def recording(calls: list[str], names: str) -> dict[str, Candidate]:
    """Candidates that write down when they were called and return the number of the call."""
    numbers = count(1)

    def candidate(name: str) -> Candidate:
        def call() -> float:
            calls.append(name)
            return float(next(numbers))

        return call

    return {name: candidate(name) for name in names}


def test_every_round_calls_every_candidate_once_in_the_order_it_reports() -> None:
    calls: list[str] = []
    result = interleave("made up", recording(calls, "abc"), "s", rounds=7, warmup=2)
    assert calls[:6] == list("abcabc")
    assert [name for order in result.orders for name in order] == calls[6:]
    assert all(sorted(order) == list("abc") for order in result.orders)
    for name in "abc":
        assert result.samples[name] == [n for n, called in enumerate(calls, 1) if called == name and n > 6]


def test_every_candidate_stands_at_every_place_equally_often() -> None:
    result = interleave("made up", recording([], "abcd"), "s", rounds=12)
    places = Counter((place, name) for order in result.orders for place, name in enumerate(order))
    assert set(places.values()) == {3}
    assert len(places) == 16


def test_the_seed_decides_the_order() -> None:
    def orders(seed: int) -> list[list[str]]:
        return interleave("made up", recording([], "abcde"), "s", rounds=10, seed=seed).orders

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert orders(1)[:5] != orders(1)[5:]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_sample_that_is_no_time_and_no_rate_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="made up: broken returned"):
        interleave("made up", {"broken": lambda: value}, "s", rounds=1, warmup=0)


def drifting() -> Result:
    """A machine that halves its speed every round, and a candidate that takes twice as long."""
    rounds = {"base": count(), "slow": count()}
    candidates: dict[str, Candidate] = {
        "base": lambda: 2.0 ** next(rounds["base"]),
        "slow": lambda: 2.0 ** (next(rounds["slow"]) + 1),
    }
    return interleave("made up", candidates, "s", rounds=9, warmup=0)


def test_a_drift_of_the_machine_leaves_the_ratio_alone() -> None:
    result = drifting()
    assert (result.median("base").median, result.median("slow").median) == (16, 32)
    ratio = result.ratio("slow", "base")
    assert (ratio.low, ratio.median, ratio.high) == (2, 2, 2)


def test_a_result_survives_json() -> None:
    result = drifting()
    read = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert read == result.to_json()
    assert read["samples"]["base"] == [2.0**n for n in range(9)]
    assert read["medians"]["slow"] == {
        "median": 32, "low": 4, "high": 256, "confidence": 1 - 2 * 10 / 2**9, "samples": 9
    }  # fmt: skip
    assert read["machine"]["python"].startswith("3.")


def test_a_machine_is_described_in_plain_values() -> None:
    machine = describe_machine(["numpy", "no-such-package"])
    assert machine["packages"] == {"numpy": metadata.version("numpy"), "no-such-package": None}
    assert machine["memory"] > 2**28
    assert machine["cpus"] >= 1
    assert len(machine["load"]) == 3
    assert all(machine[key] for key in ("time", "host", "kernel", "cpu", "python"))


def test_the_cpu_model_or_where_the_kernel_hides_it_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_model("processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7A53\n") == "AMD EPYC 7A53"
    assert cpu_model("processor\t: 0\nCPU implementer\t: 0x41\n") == "aarch64"


class NoDriver(Exception):
    """What NVML raises on a machine without a driver."""


def fake_nvml(names: list[str], closed: list[bool]) -> SimpleNamespace:
    def start() -> None:
        if not names:
            raise NoDriver

    return SimpleNamespace(
        NVMLError=NoDriver,
        nvmlInit=start,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=names.__getitem__,
        nvmlShutdown=lambda: closed.append(True),
    )


def test_gpus_are_named_where_nvml_can(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H200", "NVIDIA L40S"], closed))
    assert gpu_names() == ["NVIDIA H200", "NVIDIA L40S"]
    assert closed == [True]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([], closed))
    assert gpu_names() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_names() == []


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to measure"):
        interleave("empty", {}, "s", 1)
