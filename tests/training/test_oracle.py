"""Every layout has the losses and every gradient of one process, over five optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrun.recipe import Recipe
from tests.training.oracle import Gradients, furthest, losses, norm_of, record, world_of
from tests.training.runs import recipe

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt": {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "biases": True,
        "tie_embeddings": True,
        "vocab": 63,
    },
    "llama": {
        "kv_heads": 1,
        "qk_norm": True,
        "head_dim": 6,
        "rope_scaling": {"kind": "llama3", "factor": 4.0, "original_sequence": 8},
    },
}
MODELS["mixtral"] = {
    "kv_heads": 2,
    "ffn_hidden": 24,
    "moe": {
        "experts": 4,
        "expert_ffn": 20,
        "shared_experts": 1,
        "dense_layers": 1,
        "balance_loss": 0.5,
        "z_loss": 0.1,
    },
}
SP = {"sequence_parallel": True}

CASES: list[tuple[str, dict[str, Any], int | None]] = [
    ("gpt", {"tp": 2} | SP, None),
    ("llama", {"tp": 4}, None),
    ("llama", {"tp": 2} | SP, None),
    ("gpt", {"cp": 2}, None),
    ("plain", {"cp": 2}, 3),
    ("llama", {"cp": 2, "tp": 2} | SP, None),
    ("plain", {"dp": 3, "zero": 1}, None),
    ("gpt", {"dp": 2, "zero": 2}, 3),
    ("gpt", {"dp": 2, "zero": 3}, None),
    ("plain", {"dp": 4, "zero": 3, "zero_group": 2}, None),
    ("plain", {"dp": 4, "zero": 1, "zero_group": 2}, None),
    ("plain", {"dp": 1, "zero": 3}, None),
    ("plain", {"dp": 2, "zero": 1, "offload": True}, None),
    ("plain", {"dp": 2, "zero": 3, "offload": True}, None),
    ("plain", {"pp": 4}, None),
    ("plain", {"pp": 2, "schedule": "gpipe"}, None),
    ("plain", {"pp": 2, "schedule": "interleaved"}, None),
    ("gpt", {"pp": 2, "schedule": "zero_bubble"}, None),
    ("plain", {"pp": 2, "schedule": "zero_bubble", "virtual_stages": 2}, None),
    ("gpt", {"pp": 2, "schedule": "zbv"}, None),
    ("gpt", {"pp": 2, "schedule": "dualpipev"}, None),
    ("gpt", {"pp": 2, "stage_layers": [3, 1]}, None),
    ("gpt", {"tp": 2, "pp": 2, "dp": 2}, None),
    ("gpt", {"pp": 2, "dp": 2, "zero": 2, "schedule": "zero_bubble"}, None),
    ("gpt", {"pp": 2, "dp": 2, "zero": 3, "schedule": "zbv"}, None),
    ("llama", {"tp": 2, "dp": 2, "zero": 3} | SP, None),
    ("gpt", {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "schedule": "zero_bubble"} | SP, None),
    ("mixtral", {"dp": 2, "ep": 2}, None),
    ("mixtral", {"dp": 4, "ep": 2, "zero": 3}, None),
    ("mixtral", {"dp": 4, "ep": 4, "zero": 1, "zero_group": 2}, None),
    ("mixtral", {"tp": 2} | SP, 3),
    ("mixtral", {"cp": 2, "ep": 2}, None),
    ("mixtral", {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "zero": 2} | SP, None),
    ("mixtral", {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "schedule": "zbv"}, None),
    ("llama", {"tp": 2, "pp": 2, "cp": 2, "zero": 3, "schedule": "zbv"} | SP, 3),
]


def wanted(tokens: Path, model: str, layout: dict[str, Any], document_end: int | None) -> Recipe:
    return recipe(
        tokens,
        model=MODELS[model],
        parallel=layout,
        data={"path": str(tokens), "document_end": document_end},
        train={"steps": 5, "global_batch": 12, "micro_batch": 1, "lr": 1e-3, "clip_grad": 0.5},
        checkpoint={"every": 100},
    )


class Oracle:
    """One process's answers, computed once per model."""

    def __init__(self, tokens: Path, folder: Path) -> None:
        self.tokens, self._folder = tokens, folder
        self._known: dict[str, tuple[list[Gradients], list[tuple[float, float]]]] = {}

    def of(self, model: str, document_end: int | None) -> tuple[list[Gradients], list[tuple[float, float]]]:
        name = f"{model}-{document_end}"
        if name not in self._known:
            out = self._folder / name
            found = record(wanted(self.tokens, model, {}, document_end), 1, out)
            self._known[name] = found, losses(out)
        return self._known[name]


@pytest.fixture(scope="module")
def oracle(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tokens, tmp_path_factory.mktemp("oracle"))


FAULTS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "gradients scaled by 2^N with a data parallel group of one": ("plain", {"dp": 1, "zero": 3}, None),
    "expert gradients missing from the global norm": ("mixtral", {"dp": 4, "ep": 2, "zero": 3}, None),
    "gradients of copied key and value heads not summed": ("llama", {"tp": 4}, None),
    "a stage's own layer numbers load another stage's weights": ("plain", {"pp": 4}, None),
    "a loss averaged per micro-batch, not per valid token": ("gpt", {"dp": 2, "zero": 2}, 3),
    "the context parallel size missing, or twice, in the loss scale": ("plain", {"cp": 2}, 3),
    "tensor and expert shards counted several times, or never, in the norm": ("mixtral", {"tp": 2} | SP, 3),
    "a parameter that ranks see parts of, not marked so": ("llama", {"tp": 2} | SP, None),
}
"""Silent faults of mixed layouts that users met in the field, and the case that would show each."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_silent_fault_that_is_known_has_its_case(fault: str) -> None:
    assert FAULTS[fault] in CASES


@pytest.mark.parametrize(("model", "layout", "document_end"), CASES, ids=str)
def test_losses_and_gradients_are_those_of_one_process(
    oracle: Oracle, tmp_path: Path, model: str, layout: dict[str, Any], document_end: int | None
) -> None:
    """And the norm is that of the gradients that the optimizer gets, put together from all ranks."""
    out = tmp_path / "split"
    found = record(wanted(oracle.tokens, model, layout, document_end), world_of(layout), out)
    gradients, expected = oracle.of(model, document_end)
    assert furthest(found, gradients) < 1e-4
    for one, (loss, norm), (expected_loss, expected_norm) in zip(found, losses(out), expected, strict=True):
        assert norm == pytest.approx(norm_of(one), rel=1e-5)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert expected[0][1] > 0.5, "clipping must be at work"
