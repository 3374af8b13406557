"""Loading YAML: what the user wrote is what arrives, and every mistake has a place."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from hpcrun.config import apply_override, dump_yaml, load_yaml, parse_yaml, validate
from hpcrun.errors import UserError


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    width: int = 1
    names: list[str] = []


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    inner: Inner = Inner()
    title: str = ""


def value(text: str) -> Any:
    return parse_yaml(f"key: {text}", "r.yaml").data["key"]


def error(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "r.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("written", "read"),
    {
        "1e-4": 1e-4,
        "1e-08": 1e-8,
        "1E5": 1e5,
        "1e+4": 1e4,
        "3.e-4": 3e-4,
        ".5e-3": 5e-4,
        "-2.5": -2.5,
        "12": 12,
        "-3": -3,
        "0": 0,
    }.items(),
)
def test_numbers_are_numbers(written: str, read: float) -> None:
    """Field report: yaml-exponent-is-string."""
    assert value(written) == read
    assert type(value(written)) is type(read)


@pytest.mark.parametrize(
    "written", ["1_000", "inf", "nan", ".inf", "no", "yes", "on", "True", "0x10", "0b1", "=", "<<"]
)
def test_what_yaml_1_1_would_convert_stays_text(written: str) -> None:
    """Field report: yaml-exponent-is-string."""
    assert value(written) == written


@pytest.mark.parametrize("written", ["1:30:00", "190:20:30", "2-12:00:00", "2024-01-31", "12:30:45.5"])
def test_times_and_dates_are_read_as_written(written: str) -> None:
    """YAML 1.1 reads 1:30:00 in base 60, as 5400."""
    assert value(written) == written


@pytest.mark.parametrize("written", ["010", "-07", "00", "08"])
def test_a_leading_zero_is_refused(written: str) -> None:
    """Field report: yaml-exponent-is-string. YAML 1.1 reads 010 as 8."""
    message = error(f"a:\n  b: {written}")
    assert message.startswith("r.yaml:2: a.b: ")
    assert "octal" in message
    assert value(f"'{written}'") == written


@pytest.mark.parametrize(
    ("written", "read"), {"": None, "~": None, "null": None, "true": True, "false": False}.items()
)
def test_words_with_a_meaning(written: str, read: object) -> None:
    assert value(written) is read


def test_quoted_scalars_are_text() -> None:
    assert [value(text) for text in ("'1e-4'", '"5"', "'null'", "|\n  5\n")] == ["1e-4", "5", "null", "5\n"]


def test_a_key_twice_names_both_lines() -> None:
    message = error("train:\n  lr: 1\n  steps: 2\n  lr: 3\n")
    assert message == "r.yaml:4: key 'lr' stands twice (first at r.yaml:2); keep one"


def test_aliases_and_tags_are_refused() -> None:
    assert "r.yaml:2: " in error("a: &x 1\nb: *x")
    assert "alias *x" in error("a: &x 1\nb: *x")
    assert "alias *x" in error("a: &x {b: 1}\nc:\n  <<: *x")
    assert "python/object" in error("a: !!python/object/apply:os.system [ls]")
    assert "yaml.org,2002:int" in error('a: !!int "5"')


def test_broken_files_name_the_place(tmp_path: Path) -> None:
    assert error("a: [1, 2").startswith("r.yaml:1: not valid YAML")
    assert error("a: 1\n\tb: 2").startswith("r.yaml:2: not valid YAML")
    assert "top level must be a mapping" in error("- a\n- b")
    assert "another document" in error("a: 1\n---\nb: 2")
    assert "nested too deeply" in error("a: " + "[" * 5000)
    assert "key must be a plain word" in error("{[1]: 2}")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9")
    for path, reason in ((latin, "UTF-8"), (tmp_path / "none.yaml", "No such file"), (tmp_path, "directory")):
        with pytest.raises(UserError, match=reason):
            load_yaml(path)


def test_an_empty_file_is_an_empty_mapping() -> None:
    assert parse_yaml("# nothing\n", "r.yaml").data == {}


def test_dump_reads_back_the_same() -> None:
    rng = random.Random(7)
    alphabet = "01e-+.:#'\"\\ \n\tno~{}[]&*!|>%@`aé√"
    texts = ["".join(rng.choices(alphabet, k=rng.randint(0, 12))) for _ in range(2000)]
    data = {
        "texts": texts,
        "numbers": [1, 1.5, 1e-5, 1e16, -0.0],
        "others": [None, True, False, "true", "010", "1e-4", "-.5", ""],
    }
    assert parse_yaml(dump_yaml(data), "r.yaml").data == data


@pytest.mark.parametrize(
    ("override", "expected"),
    {
        "inner.width=1": 1,
        "inner.width=1e3": 1e3,
        "inner.width=": None,
        "inner.width=[1, a]": [1, "a"],
        "inner.width=a=b": "a=b",
        "inner.width='#1'": "#1",
        "inner.width=a#b": "a#b",
        " inner.width = 1:30:00": "1:30:00",
    }.items(),
)
def test_overrides_are_yaml_values(override: str, expected: object) -> None:
    document = parse_yaml("inner:\n  width: 7\n", "r.yaml")
    apply_override(document, override)
    assert document.data["inner"]["width"] == expected


def test_an_override_makes_the_section_it_needs() -> None:
    for text in ("", "inner:\n"):
        document = parse_yaml(text, "r.yaml")
        apply_override(document, "inner.width=2")
        assert validate(document, Outer).inner.width == 2


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "inner.width": "section.key=value",
        "=1": "section.key=value",
        "inner..width=1": "section.key=value",
        "title.x=1": "title holds a value, not a section",
        "inner.width=010": "octal",
        "inner.width=[1": "not valid YAML",
        "inner.width=1\ntitle: x": "one YAML value",
        "title=a #b": "comment",
        "inner.width=*x": "alias *x",
    }.items(),
)
def test_bad_overrides_are_refused(override: str, message: str) -> None:
    document = parse_yaml("inner: {width: 7}\ntitle: t\n", "r.yaml")
    with pytest.raises(UserError) as caught:
        apply_override(document, override)
        validate(document, Outer)
    assert message in str(caught.value)


def refusal(text: str, *overrides: str) -> str:
    document = parse_yaml(text, "r.yaml")
    for override in overrides:
        apply_override(document, override)
    with pytest.raises(UserError) as caught:
        validate(document, Outer)
    return str(caught.value)


def test_an_unknown_key_names_the_nearest_and_its_section() -> None:
    """Field report: unknown-key."""
    assert refusal("title: t\ninner:\n  widht: 1") == (
        "r.yaml:3: unknown key 'inner.widht'; did you mean 'inner.width'?"
    )
    assert refusal("width: 1") == "r.yaml:1: unknown key 'width'; did you mean 'inner.width'?"
    assert refusal("iner: {width: 1}") == "r.yaml:1: unknown key 'iner'; did you mean 'inner'?"
    assert refusal("zzz: 1") == "r.yaml:1: unknown key 'zzz'; known keys: inner, title"
    assert refusal("", "inner.widht=1").startswith("--set inner.widht=1: unknown key")


def test_a_wrong_type_says_what_was_found() -> None:
    assert refusal("inner: {width: wide}") == "r.yaml:1: inner.width: must be a whole number (found 'wide')"
    assert refusal("inner:\n") == "r.yaml:1: inner: must be a section with key: value lines (found None)"
    assert refusal("title: 5") == "r.yaml:1: title: must be text; put quotes around it (found 5)"
    assert "r.yaml:3: inner.names.1" in refusal("inner:\n  names: [a,\n    5]")


def test_all_mistakes_are_told_at_once() -> None:
    message = refusal("title: 5\ninner:\n  width: x")
    assert "r.yaml:1: title" in message
    assert "r.yaml:3: inner.width" in message
