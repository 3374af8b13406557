"""YAML as the user meant it: strict, with the line of every mistake.

PyYAML follows YAML 1.1, where ``1e-4`` is a string, ``1:30:00`` is 5400, ``no`` is
false and ``010`` is 8. Here plain scalars are resolved by the few rules below, a
key that stands twice is an error, and every error names file, line and key.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from hpcrun.errors import UserError, one_line

M = TypeVar("M", bound=BaseModel)
KeyPath = tuple[str | int, ...]

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?", re.ASCII)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+", re.ASCII)


@dataclass
class Document:
    """A parsed YAML mapping and where each of its keys stands."""

    source: str
    data: dict[str, Any]
    lines: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """``file:line`` of a key, or of its nearest parent that is in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, self.source)


def load_yaml(path: Path) -> Document:
    """Read one YAML file whose top level is a mapping.

    Raises:
        UserError: unreadable, not YAML, an alias or a tag, a key twice, ``010``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    return parse_yaml(text, str(path))


class _Refused(Exception):
    """Line (from 0) and reason."""


class _Loader(yaml.SafeLoader):
    """Refuses aliases, which can grow a small file without bound, and tags, which rename types."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(mark.line, f"alias *{event.anchor} is refused; write the value out")
        if getattr(event, "tag", None) is not None:
            raise _Refused(mark.line, f"tag {event.tag} is refused; leave it out")
        return super().compose_node(parent, index)


def parse_yaml(text: str, source: str) -> Document:
    """Like :func:`load_yaml`, for text already in hand; ``source`` names it in errors."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except _Refused as error:
        line, reason = error.args
        raise UserError(f"{source}:{line + 1}: {reason}") from error
    except RecursionError as error:
        raise UserError(f"{source}: nested too deeply") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(f"{place}: not valid YAML: {one_line(problem)}") from error
    document = Document(source, {})
    if node is None:
        return document
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{source}: the top level must be a mapping of keys to values")
    document.data = _construct(node, (), document)
    return document


def parse_scalar(text: str) -> Any:
    """The value of one plain YAML scalar by our rules.

    Raises:
        ValueError: a leading zero, which YAML 1.1 would read as octal.
    """
    if text in ("", "~", "null"):
        return None
    if text in ("true", "false"):
        return text == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _LEADING_ZERO.fullmatch(text):
        raise ValueError(f"{text} has a leading zero, which some readers take for octal; drop it or quote it")
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _construct(node: yaml.Node, path: KeyPath, document: Document) -> Any:
    place = f"{document.source}:{node.start_mark.line + 1}"
    document.lines.setdefault(path, place)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_place = f"{document.source}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(f"{key_place}: a key must be a plain word")
            key = key_node.value
            if key in result:
                first = document.lines[(*path, key)]
                raise UserError(f"{key_place}: key {key!r} stands twice (first at {first}); keep one")
            document.lines[(*path, key)] = key_place
            result[key] = _construct(value_node, (*path, key), document)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, (*path, i), document) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    if node.style is not None:
        return node.value
    try:
        return parse_scalar(node.value)
    except ValueError as error:
        raise UserError(f"{place}: {_dotted(path)}: {error}") from error


class _Dumper(yaml.SafeDumper):
    """Quotes what :func:`parse_scalar` would not read back as the same text."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    try:
        same = parse_scalar(text) == text
    except ValueError:
        same = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if same else "'")


_Dumper.add_representer(str, _represent_text)


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML text that :func:`parse_yaml` reads back as ``data``."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def apply_override(document: Document, override: str) -> None:
    """Apply one ``a.b=value`` of ``--set``; the value is read as a YAML value.

    Raises:
        UserError: no ``=``, a comment in the value, or a path through something that
            is not a mapping.
    """
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"--set {override}: write it as section.key=value")
    source = f"--set {override}"
    if re.search(r"(^|\s)#", text):
        raise UserError(f"{source}: YAML takes the text after # for a comment; put quotes around the value")
    wrapped = parse_yaml(f"value: {text}" if text.strip() else "value:", source)
    if set(wrapped.data) != {"value"}:
        raise UserError(f"{source}: the value must be one YAML value")
    parent = document.data
    for depth, key in enumerate(keys[:-1]):
        child = parent.setdefault(key, {})
        if child is None:
            child = parent[key] = {}
        if not isinstance(child, dict):
            raise UserError(f"{source}: {'.'.join(keys[: depth + 1])} holds a value, not a section")
        parent = child
    parent[keys[-1]] = wrapped.data["value"]
    document.lines[tuple(keys)] = source


def validate(document: Document, model: type[M]) -> M:
    """Check a document against a pydantic model that forbids unknown keys.

    Raises:
        UserError: naming place, key, what was found and, for an unknown key, the
            nearest known one. Several mistakes are joined with ``; ``.
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise UserError("; ".join(_explain(item, document, model) for item in error.errors())) from error


def _explain(item: Any, document: Document, model: type[BaseModel]) -> str:
    path: KeyPath = tuple(item["loc"])
    place = document.where(path)
    name = _dotted(path)
    if item["type"] == "extra_forbidden":
        return f"{place}: unknown key {name!r}; {_hint(path, model)}"
    if item["type"] == "missing":
        return f"{place}: key {name!r} is missing"
    if item["type"] in ("value_error", "assertion_error"):
        message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    else:
        message = f"{_MESSAGES.get(item['type'], item['msg'])} (found {item['input']!r})"
    return f"{place}: {name}: {message}" if name else f"{place}: {message}"


_MESSAGES = {
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "model_type": "must be a section with key: value lines",
    "string_type": "must be text; put quotes around it",
}


def _hint(path: KeyPath, model: type[BaseModel]) -> str:
    """The known key nearest to an unknown one: spelt much alike here, or nearly the same elsewhere."""
    *section, key = (str(part) for part in path)
    known = _known_keys(model)
    everywhere = {keys[-1]: keys for keys in reversed(known)}
    siblings = {keys[-1]: keys for keys in known if list(keys[:-1]) == section}
    for names, cutoff in ((siblings, 0.6), (everywhere, 0.8)):
        near = difflib.get_close_matches(key, names, n=1, cutoff=cutoff)
        if near:
            return f"did you mean {_dotted(names[near[0]])!r}?"
    return f"known keys: {', '.join(sorted(siblings))}"


def _known_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys = []
    for name, info in model.model_fields.items():
        path = (*prefix, info.alias or name)
        keys.append(path)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += _known_keys(info.annotation, path)
    return keys


def _dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)
