"""Parse YAML into mappings, lists and text, within limits and with line numbers. Scalars stay as written.

Only ruamel.yaml's node tree is used. Its constructors would create Python objects (dates, merged mappings,
objects of tags), each with its own kinds of errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from launcher.spec.errors import Problem, SpecError

KeyPath = tuple[str | int, ...]

# Far above any job, but read within a second (measured: 5 to 25 kB of dense YAML take 0.1 s).
MAX_BYTES = 200_000
MAX_DEPTH = 30
MAX_VALUES = 5_000
"Maximum values of a file. A value counts once for each alias that refers to it."

_CORE = "tag:yaml.org,2002:"
_SCALARS = {"int": int, "float": float, "bool": bool, "null": type(None), "timestamp": str}


class Scalar(str):
    """Unquoted text that YAML does not read as text: `3.10`, `yes`, `~`, `2026-11-21`."""

    __slots__ = ("kind",)
    kind: type

    def __new__(cls, text: str, kind: type) -> Scalar:
        scalar = super().__new__(cls, text)
        scalar.kind = kind
        return scalar

    def __deepcopy__(self, memo: object) -> Scalar:
        return self

    @property
    def value(self) -> Any:
        """The value that YAML reads; dates stay text. Raises ValueError for NaN, infinity or huge numbers."""
        text = self.replace("_", "").lower()
        if self.kind is int:
            return _in_range(_whole(text), self)
        if self.kind is float:
            return _in_range(float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text)), self)
        if self.kind is bool:
            return text in ("true", "yes", "on", "y")
        return None if self.kind is type(None) else str(self)


def _whole(text: str) -> int:
    digits = text.lstrip("+-")
    base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2], 10)
    if len(digits) > 80:
        raise ValueError(f"{short(text)} is too large for a number")
    return int(text, base)


def _in_range(number: int | float, text: str) -> int | float:
    if number != number:
        raise ValueError(f"{text} is not a number")
    if abs(number) >= 2**64 if isinstance(number, int) else number in (float("inf"), float("-inf")):
        raise ValueError(f"{short(text)} is too large for a number")
    return number


def short(text: str, most: int = 60) -> str:
    """Return the text, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


@dataclass
class Document:
    """Mappings, lists and text, with the line of each key path."""

    data: dict[str, Any]
    name: str
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Return where `path` or its nearest ancestor was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)


def read_bytes(file: Path) -> bytes:
    """Return the content of a user's file. Raises SpecError if it is too long, OSError."""
    # O_NONBLOCK: opening a named pipe without a writer would otherwise block.
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        os.set_blocking(opened.fileno(), True)
        text = opened.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise SpecError(
            [Problem(str(file), "", f"is longer than {MAX_BYTES // 1000} kB, too long for a launcher file")]
        )
    return text


def parse(text: bytes | str, name: str) -> Document:
    """Parse one mapping. `name` precedes the line number in errors. Raises SpecError."""
    document = Document({}, name)
    root = tree(text, name)
    if not isinstance(root, MappingNode):
        raise SpecError([Problem(name, "", "must be a mapping of fields, `name: value`")])
    document.data = _Reader(document).plain(root, ())
    return document


def parse_value(text: str, name: str) -> Any:
    """Parse a value from the command line. It is text unless it is a number, quoted, `[...]` or `{...}`.

    Raises SpecError for invalid `[...]` or `{...}`.
    """
    try:
        root = tree(text, name)
        collection = isinstance(root, MappingNode | SequenceNode) and bool(root.flow_style)
        plain = isinstance(root, ScalarNode) and (root.style in ("'", '"') or root.tag != f"{_CORE}str")
        if collection or plain:
            return _Reader(Document({}, name)).plain(root, ())
    except SpecError:
        if text.lstrip().startswith(("[", "{")):
            raise
    return text


def tree(text: bytes | str, name: str) -> Any:
    """Return the root node of the text, or None if it is empty. Raises SpecError."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    try:
        return yaml.compose(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise SpecError([Problem(f"{name}{line}", "", _message(error))]) from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise SpecError([Problem(name, "", f"not readable as YAML: {_one_line(error)}")]) from None
    except Exception as error:  # other errors of the parser, such as for \\UFFFFFFFF
        raise SpecError([Problem(name, "", f"not readable as YAML: {_one_line(error)}")]) from None


def _one_line(error: Exception) -> str:
    return short(" ".join(str(error).split()), 300) or type(error).__name__


def _message(error: MarkedYAMLError) -> str:
    problem = (error.problem or "not readable as YAML").splitlines()[0]
    if problem.startswith("but ") and error.context:  # the second half of a sentence
        problem = f"{error.context}, {problem}"
    if "\\t" in problem:
        return "a tab cannot indent YAML; use spaces"
    return short(problem, 300)


def _refused(problem: str, node: Any) -> MarkedYAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


class _Composer(Composer):
    """Checks the limits while the text is read, so that deep or long files are refused early."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.warn_double_anchors = False
        self.nested = self.values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nested += 1
        self.values += 1
        event = self.parser.peek_event()
        if self.nested > MAX_DEPTH:
            raise _refused(f"is nested more than {MAX_DEPTH} deep", event)
        if self.values > 2 * MAX_VALUES:  # keys are counted here too
            raise _refused(f"has more than {MAX_VALUES} values", event)
        node = super().compose_node(parent, index)
        self.nested -= 1
        return node


class _Reader:
    """Converts nodes to data and expands aliases."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.values = 0
        self.open: list[int] = []

    def plain(self, node: Node, path: KeyPath) -> Any:
        try:
            return self._plain(node, path)
        except MarkedYAMLError as error:
            line = error.problem_mark.line + 1
            raise SpecError([Problem(f"{self.document.name}:{line}", "", _message(error))]) from None

    def _plain(self, node: Any, path: KeyPath) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            raise _refused(f"aliases make more than {MAX_VALUES} values of this", node)
        if isinstance(node, ScalarNode):
            return _scalar(node)
        self._enter(node)
        if isinstance(node, SequenceNode):
            _check_tag(node, "seq")
            data: Any = [self._child((*path, index), item, item) for index, item in enumerate(node.value)]
        else:
            data = {
                key: self._child((*path, key), key_node, value) for key, key_node, value in self._pairs(node)
            }
        self.open.pop()
        return data

    def _enter(self, node: Any) -> None:
        if id(node) in self.open:
            raise _refused("an alias puts this into itself", node)
        if len(self.open) > MAX_DEPTH:
            raise _refused(f"aliases nest this more than {MAX_DEPTH} deep", node)
        self.open.append(id(node))

    def _child(self, path: KeyPath, key_node: Any, value: Any) -> Any:
        self.document.places[path] = f"{self.document.name}:{key_node.start_mark.line + 1}"
        return self._plain(value, path)

    def _pairs(self, node: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield (key, its node, the value's node). A mapping's own keys override those merged by `<<`."""
        _check_tag(node, "map")
        own: dict[str, tuple[Any, Any]] = {}
        merged: list[Any] = []
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise _refused("a key must be text", key)
            if key.value == "<<" and not key.style:
                merged += value.value if isinstance(value, SequenceNode) else [value]
            elif key.value in own:
                raise _refused(f'found duplicate key "{key.value}"', key)
            else:
                own[key.value] = (key, value)
        inherited = {name: pair for other in reversed(merged) for name, *pair in self._merged(other)}
        for name, (key, value) in {**inherited, **own}.items():
            yield name, key, value

    def _merged(self, node: Any) -> list[tuple[str, Any, Any]]:
        if not isinstance(node, MappingNode):
            raise _refused("`<<` merges mappings only", node)
        self._enter(node)
        pairs = list(self._pairs(node))
        self.open.pop()
        self.values += len(pairs)
        if self.values > MAX_VALUES:
            raise _refused(f"merges make more than {MAX_VALUES} values of this", node)
        return pairs


def _scalar(node: Any) -> str:
    tag = str(node.tag).removeprefix(_CORE)
    if tag in ("str", "value", "merge"):  # the last two are `=` and `<<` used as a value
        return str(node.value)
    kind = _SCALARS.get(tag)
    if kind is None:
        raise _unknown_tag(node)
    return Scalar(node.value, kind)


def _check_tag(node: Any, name: str) -> None:
    if str(node.tag) != f"{_CORE}{name}":
        raise _unknown_tag(node)


def _unknown_tag(node: Any) -> MarkedYAMLError:
    tag = str(node.tag).replace(_CORE, "!!")
    return _refused(f"the tag {short(tag)} is not supported in launcher's files: write plain YAML", node)
