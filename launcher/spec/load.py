"""YAML file + overrides -> validated value, or every error with its line."""

from __future__ import annotations

import copy
import difflib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from launcher.spec.cluster import Cluster
from launcher.spec.errors import Problem, SpecError
from launcher.spec.job import Job, cross_problems

Model = TypeVar("Model", bound=BaseModel)
KeyPath = tuple[str | int, ...]


@dataclass
class Document:
    """Plain data, and for each key path the place it was written at."""

    data: dict[str, Any]
    name: str
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where `path` or its nearest ancestor was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)


def load_job(file: Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file. `overrides` are `a.b=c` texts of `--set`. Raises SpecError, OSError."""
    return validate(Job, read(file, overrides))


def load_cluster(file: Path) -> Cluster:
    """Read a cluster profile. Raises SpecError, OSError."""
    return validate(Cluster, read(file))


def from_record(model: type[Model], data: dict[str, Any], name: str, overrides: Sequence[str] = ()) -> Model:
    """A value as a run keeps it, with overrides as `load_job` takes them. `name` stands in errors.

    Raises SpecError.
    """
    document = Document(copy.deepcopy(data), name)
    for override in overrides:
        _override(document, override)
    return validate(model, document)


def read(file: Path, overrides: Sequence[str] = ()) -> Document:
    """Parse one YAML mapping and apply overrides. Raises SpecError for text that is not one."""
    document = parse(file.read_bytes(), str(file))
    for override in overrides:
        _override(document, override)
    return document


def parse(text: bytes | str, name: str) -> Document:
    """Parse one YAML mapping. `name` stands in front of the line number in errors."""
    parsed = _parsed(text, name)
    return Document(copy.deepcopy(parsed.data), name, dict(parsed.places))


# A sweep reads the same job and profile for each of its runs.
@functools.lru_cache(maxsize=8)
def _parsed(text: bytes | str, name: str) -> Document:
    try:
        root = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise SpecError([Problem(f"{name}{line}", "", _yaml_message(error))]) from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise SpecError([Problem(name, "", f"not readable as YAML: {error}")]) from None
    if not isinstance(root, CommentedMap):
        raise SpecError([Problem(name, "", "must be a mapping of fields, `name: value`")])
    document = Document({}, name)
    document.data = _plain(root, (), document)
    return document


def validate(model: type[Model], document: Document) -> Model:
    """Check every field. Raises SpecError with all problems in the order of the file."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        # pydantic reports cross-field rules only when every field is right: a user wants all at once.
        details = [d for d in error.errors(include_url=False) if d["loc"] or model is not Job]
        wrong = {d["loc"][:depth] for d in details for depth in range(len(d["loc"]))}
        # A list is "too short" as well when one of its items is wrong: pydantic does not count that one.
        details = [d for d in details if d["type"] != "too_short" or d["loc"] not in wrong]
        problems = [_problem(model, document, detail) for detail in details]
        if model is Job:
            problems += [
                Problem(document.place(path), ".".join(path), message)
                for path, message in cross_problems(document.data)
            ]
        raise SpecError(sorted(dict.fromkeys(problems), key=lambda p: _line(p.where))) from None


def _line(where: str) -> int:
    tail = where.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0


def _yaml_message(error: MarkedYAMLError) -> str:
    problem = (error.problem or "not readable as YAML").splitlines()[0]
    if "\\t" in problem:
        return "a tab cannot indent YAML; use spaces"
    return problem


def _plain(node: Any, path: KeyPath, document: Document) -> Any:
    """ruamel's tree -> plain Python, recording the line of each key."""
    if isinstance(node, CommentedMap):
        result = {}
        for key, value in node.items():
            line = node.lc.data[key][0] + 1 if key in (node.lc.data or {}) else node.lc.line + 1
            name = str(key)
            here: KeyPath = (*path, name)
            document.places[here] = f"{document.name}:{line}"
            result[name] = _plain(value, here, document)
        return result
    if isinstance(node, CommentedSeq):
        items = []
        for index, value in enumerate(node):
            spot: KeyPath = (*path, index)
            document.places[spot] = f"{document.name}:{node.lc.item(index)[0] + 1}"
            items.append(_plain(value, spot, document))
        return items
    return _scalar(node)


def _scalar(node: Any) -> Any:
    if isinstance(node, bool) or node is None:
        return node
    for plain in (int, float, str):
        if isinstance(node, plain):
            return plain(node)
    return str(node)  # a date such as 2026-11-21: the user meant the text


def _override(document: Document, text: str) -> None:
    """Apply `a.b=value`; the value is read as YAML, so `4`, `true`, `[1, 2]` and text all work."""
    where = f"--set {text}"
    dotted, equals, raw = text.partition("=")
    path = tuple(dotted.split("."))
    if not equals or not all(path):
        raise SpecError([Problem(where, "", "write --set field.name=value")])
    try:
        value = _plain(YAML(typ="rt").load(raw), (), Document({}, where)) if raw else ""
    except YAMLError:
        value = raw
    target: Any = document.data
    for depth, key in enumerate(path[:-1], start=1):
        if not isinstance(target.get(key), dict):
            target[key] = {}  # `recipe: auto` gives way to `--set recipe.precision=bf16`
            document.places[path[:depth]] = where
        target = target[key]
    target[path[-1]] = value
    for known in [p for p in document.places if p[: len(path)] == path]:
        del document.places[known]
    document.places[path] = where


def _problem(model: type[BaseModel], document: Document, details: ErrorDetails) -> Problem:
    path = tuple(details["loc"])
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        known = _field_names(_model_at(model, path[:-1]))
        near = difflib.get_close_matches(str(path[-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        message = f"unknown field; {hint}"
    elif details["type"] == "missing":
        message = "is missing"
    elif details["type"] == "literal_error" and isinstance(details["input"], str):
        known = _literals(details)
        near = difflib.get_close_matches(details["input"], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
        message = f"{details['input']!r} is not known; {hint}"
    elif details["type"] != "value_error":
        wanted = _WANTED.get(details["type"], f"{message[0].lower()}{message[1:]}")
        message = f"{wanted}, not {_short(details['input'])}"
    return Problem(document.place(path), ".".join(map(str, path)), message)


# pydantic's words for what a user writes in YAML.
_WANTED = {
    "model_type": "must be a mapping of fields",
    "dict_type": "must be a mapping of names to values",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _literals(details: ErrorDetails) -> list[str]:
    expected: str = details["ctx"]["expected"]
    return expected.replace(" or ", ", ").replace("'", "").split(", ")


def _field_names(model: type[BaseModel] | None) -> list[str]:
    if model is None:
        return []
    return [info.alias or name for name, info in model.model_fields.items()]


def _model_at(model: type[BaseModel] | None, path: KeyPath) -> type[BaseModel] | None:
    """The model that validates the mapping at `path`."""
    for key in path:
        if model is None:
            return None
        if isinstance(key, int):
            continue
        infos = {info.alias or name: info for name, info in model.model_fields.items()}
        model = next(_models_in(infos[key].annotation), None) if key in infos else None
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
