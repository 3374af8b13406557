"""Model FLOP utilisation."""

from __future__ import annotations

import pytest

from hpcrun.counts import training_flops
from hpcrun.recipe import Model
from training.monitor.utilisation import Utilisation

MODEL = Model(layers=2, hidden=64)


def test_utilisation_is_useful_operations_over_the_peak_of_all_ranks() -> None:
    found = Utilisation(MODEL, "NVIDIA A100-SXM4-80GB", "bf16", ranks=4).of(1000.0)
    assert found["model_flops_per_s"] == 1000 * training_flops(MODEL)
    assert found["mfu"] == pytest.approx(1000 * training_flops(MODEL) / (4 * 312e12))


@pytest.mark.parametrize("name", [None, "NVIDIA H200 NVL"])
def test_without_a_published_peak_there_is_no_utilisation(name: str | None) -> None:
    assert set(Utilisation(MODEL, name, "bf16", ranks=1).of(1.0)) == {"model_flops_per_s"}
