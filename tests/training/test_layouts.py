"""What a layout must keep that gradients in fp32 do not show: noise, and computing in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.runs import curve, recipe, train_on


def world(layout: dict[str, Any]) -> int:
    return int(layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1))


def train(tokens: Path, out: Path, layout: dict[str, Any], **model: Any) -> list[tuple[int, float, float]]:
    wanted = recipe(tokens, parallel=layout, model=model, checkpoint={"every": 1000})
    assert run_ranks(world(layout), train_on, wanted, str(out)) == [0] * world(layout)
    return curve(out)


def assert_close(found: list[tuple[int, float, float]], expected: list[tuple[int, float, float]]) -> None:
    assert [step for step, *_ in found] == [1, 2, 3, 4]
    for (step, loss, norm), (_, expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        # Adam's first update is nearly the gradient's sign, which makes rounding of tiny gradients large.
        assert norm == pytest.approx(expected_norm, rel=1e-6 if step == 1 else 1e-4)


def test_the_same_layout_twice_is_equal_bit_for_bit_with_dropout(tokens: Path, tmp_path: Path) -> None:
    layout = {"tp": 2, "pp": 2}
    first = train(tokens, tmp_path / "first", layout, dropout=0.1)
    assert train(tokens, tmp_path / "second", layout, dropout=0.1) == first
    assert train(tokens, tmp_path / "without", layout) != first


def test_dropout_masks_are_the_same_on_all_tensor_parallel_ranks(tokens: Path, tmp_path: Path) -> None:
    expected = train(tokens, tmp_path / "one", {}, dropout=0.1)
    assert_close(train(tokens, tmp_path / "split", {"tp": 2}, dropout=0.1), expected)


def test_bf16_computes_and_learns(tokens: Path, tmp_path: Path) -> None:
    wanted = recipe(
        tokens, parallel={"tp": 2, "pp": 2}, train={"precision": "bf16"}, checkpoint={"every": 1000}
    )
    run_ranks(4, train_on, wanted, str(tmp_path / "run"))
    found = curve(tmp_path / "run")
    assert found[-1][1] < found[0][1]
