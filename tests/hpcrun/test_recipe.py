"""The recipe: what is accepted, what is refused, and the schema that editors read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hpcrun.config import parse_yaml
from hpcrun.datafiles import data_folder
from hpcrun.errors import UserError
from hpcrun.recipe import Recipe, load_recipe, recipe_from

SCHEMA = Recipe.model_json_schema()


def recipe(text: str, *overrides: str) -> Recipe:
    return recipe_from(parse_yaml(text, "r.yaml"), overrides, Path("/data"))


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        recipe(text, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_numbers_arrive_as_the_schema_wants_them() -> None:
    """Field report: yaml-exponent-is-string."""
    train = recipe("train: {lr: 1e-4, eps: 1e-08, weight_decay: 0, steps: 1e4, warmup_steps: 1e+2}").train
    assert (train.lr, train.eps, train.weight_decay) == (1e-4, 1e-8, 0.0)
    assert (train.steps, train.warmup_steps) == (10000, 100)
    assert type(train.steps) is int


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("train.steps", "1.5"),
        ("train.steps", "1_000"),
        ("train.steps", "true"),
        ("train.steps", "0"),
        ("train.lr", "'1e-4'"),
        ("train.lr", "inf"),
        ("train.lr", "nan"),
        ("train.lr", ".inf"),
        ("train.lr", "1e999"),
        ("train.lr", "-1"),
        ("model.tie_embeddings", "no"),
        ("resources.time", "-5"),
        ("resources.time", "1:60:00"),
        ("resources.memory", "lots"),
        ("recovery.node_timeout", "0"),
        ("parallel.tp", "0"),
        ("parallel.tp", "-1"),
        ("parallel.tp", '"2"'),
        ("checkpoint.keep", "0"),
        ("name", "a/b"),
        ("name", "..."),
        ("name", "x" * 64),
    ],
)
def test_other_values_are_refused_in_file_and_override_alike(key: str, written: str) -> None:
    """Field reports: yaml-exponent-is-string, world-product (tp 0, -1, "2"), retention (keep 0)."""
    *section, last = key.split(".")
    text = f"{section[0]}:\n  {last}: {written}\n" if section else f"\n{last}: {written}\n"
    in_file = refusal(text)
    assert in_file.startswith(f"r.yaml:2: {key}: ")
    in_override = refusal("", f"{key}={written}")
    assert in_override.startswith(f"--set {key}={written}: {key}: ")
    assert in_override.split(f"{key}: ", 1)[1] == in_file.split(f"{key}: ", 1)[1]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("paralellism: {tp: 2}", "parallel"),
        ("train: {weigth_decay: 0.1}", "train.weight_decay"),
        ("train: {global-batch: 8}", "train.global_batch"),
        ("lr: 1e-4", "train.lr"),
        ("model: {tp: 2}", "parallel.tp"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(text: str, hint: str) -> None:
    """Field report: unknown-key."""
    assert f"did you mean {hint!r}?" in refusal(text)


def test_an_unknown_key_in_an_override_is_refused() -> None:
    """Field report: unknown-key."""
    assert "'train.lrr'; did you mean 'train.lr'?" in refusal("", "train.lrr=1")
    assert "unknown key 'trainer'" in refusal("", "trainer.lr=1")


def test_an_override_wins_over_the_file() -> None:
    got = recipe(
        "train: {lr: 1}\nresources: {time: 60}", "train.lr=2e-4", "resources.time=1:30:00", "model.layers=8"
    )
    assert got.train.lr == 2e-4
    assert got.resources.time is not None
    assert got.resources.time.minutes == 90
    assert got.model.layers == 8


def test_environment_arrives_as_written_or_not_at_all() -> None:
    assert recipe("environment: {A: 1, B: 'x y', C: '0.10', D: ''}").environment == {
        "A": "1",
        "B": "x y",
        "C": "0.10",
        "D": "",
    }
    for value in ("0.10", "true", "null", "[a]"):
        assert "put quotes around" in refusal(f"environment: {{A: {value}}}")
    assert "leading zero" in refusal("environment: {A: 010}")
    assert "NUL" in refusal('environment: {A: "a\\0b"}')


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "A=B", "'A;B'", "''", "É"])
def test_variable_names_that_the_shell_refuses(name: str) -> None:
    assert "not a name that the shell accepts" in refusal(f"environment: {{{name}: x}}")
    assert "not a name that the shell accepts" in refusal(f"secrets: [{name}]")


def test_a_secret_may_not_stand_in_the_environment_too() -> None:
    assert "TOKEN stands in both" in refusal("environment: {TOKEN: x}\nsecrets: [TOKEN]")


def test_a_relative_data_path_belongs_to_the_recipes_folder(tmp_path: Path) -> None:
    file = tmp_path / "with blank" / "r.yaml"
    file.parent.mkdir()
    file.write_text("data: {path: tokens/a.bin}")
    assert load_recipe(file).data.path == str(file.parent / "tokens" / "a.bin")
    assert load_recipe(file, ("data.path=/abs/b.bin",)).data.path == "/abs/b.bin"
    assert load_recipe(file, ("data.path=",)).data.path is None


def test_a_command_of_your_own_is_not_repeated_unasked() -> None:
    """Field reports: hidden-default-requeue, non-restartable-restarted."""
    default = recipe("").recovery
    assert (default.restarts_for([]), default.requeues_for([])) == (10, 20)
    assert (default.restarts_for(["x"]), default.requeues_for(["x"])) == (0, 0)
    asked = recipe("recovery: {max_restarts: 3, max_requeues: 0}").recovery
    assert (asked.restarts_for(["x"]), asked.requeues_for([])) == (3, 0)


def test_derived_sizes_of_the_model() -> None:
    model = recipe("model: {hidden: 768, heads: 12}").model
    assert (model.kv, model.ffn, model.head_size) == (12, 2048, 64)
    assert recipe("model: {kv_heads: 2, ffn_hidden: 100}").model.ffn == 100


def test_shipped_recipes_are_valid() -> None:
    files = sorted(data_folder("recipes").glob("*.yaml"))
    assert files
    for file in files:
        load_recipe(file)


ACCEPTED = [
    "{}",
    "train: {lr: 1e-4, steps: 1e4, weight_decay: 0}",
    "resources: {time: 60, memory: 64G, gpus_per_node: 0, nodes: 2.0}",
    "resources: {time: 2-12:00:00, memory: 0, partition: null}",
    "recovery: {node_timeout: 30s, save_margin: 120}",
    "environment: {A: 1, B: text}\nsecrets: [TOKEN]\ncommand: [python, -c, 'print(1)']",
    "name: a.b-c_1\ncheckpoint: {keep: null}",
    "parallel: {tp: 2, dp: null, schedule: gpipe}",
]
REFUSED = [
    "frob: 1",
    "train: {frob: 1}",
    "train: {steps: 1.5}",
    "train: {steps: 0}",
    "train: {lr: '1'}",
    "train: {precision: fp8}",
    "train: null",
    "resources: {time: 1.5}",
    "resources: {time: true}",
    "recovery: {node_timeout: 0}",
    "recovery: {max_restarts: -1}",
    "environment: {A-B: x}",
    "environment: {A: true}",
    "secrets: [1A]",
    "name: a/b",
    "command: python x.py",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_schema_accepts_what_the_model_accepts(text: str) -> None:
    recipe(text)
    assert list(Draft202012Validator(SCHEMA).iter_errors(parse_yaml(text, "r.yaml").data)) == []


@pytest.mark.parametrize("text", REFUSED)
def test_schema_refuses_what_the_model_refuses(text: str) -> None:
    refusal(text)
    assert not Draft202012Validator(SCHEMA).is_valid(parse_yaml(text, "r.yaml").data)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def keys(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> pydantic's field, of every value that a recipe may hold."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        section = next(
            (one for one in (info.annotation, *get_args(info.annotation)) if is_section(one)), None
        )
        if section is not info.annotation:
            found[f"{prefix}{name}"] = info
        if section:
            found |= keys(section, f"{prefix}{name}.")
    return found


def test_the_schema_is_valid_and_describes_every_key() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    undescribed = [name for name, info in keys(Recipe).items() if not info.description]
    assert undescribed == []
    assert all("description" in section for section in SCHEMA["$defs"].values())


def test_docs_list_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text()
    for name, info in keys(Recipe).items():
        default = info.get_default(call_default_factory=True)
        text = str(default).lower() if isinstance(default, bool) else str(default)
        shown = "" if default in (None, [], {}, PydanticUndefined) else f"`{text}` "
        assert f"\n| `{name}` | {shown}|" in page, name
