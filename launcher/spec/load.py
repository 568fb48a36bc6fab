"""Load a YAML file with overrides into a validated value, or report every error with its line."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.spec.cluster import Cluster, ContradictionsError
from launcher.spec.errors import Problem, SpecError
from launcher.spec.field_types import Raw, Typed, given_as
from launcher.spec.job import Job, cross_problems
from launcher.spec.program import not_a_job
from launcher.spec.scheduler_section import fields_in
from launcher.spec.similar import did_you_mean
from launcher.spec.yaml import Document, KeyPath, parse, parse_value, read_bytes, short

Model = TypeVar("Model", bound=BaseModel)
CLUSTER_PREFIX = "cluster."
"Prefix of an override that changes the cluster profile instead of the job."


def load_job(file: Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file. `overrides` are the `a.b=c` texts of `--set`.

    Overrides that begin with `cluster.` are ignored. Raises SpecError, OSError.
    """
    text = read_bytes(file)
    if (instead := not_a_job(file, text)) is not None:
        raise SpecError([Problem(str(file), "", instead)])
    return validate(Job, with_overrides(_document(text, str(file)), overrides))


def load_cluster(file: Path, overrides: Sequence[str] = ()) -> Cluster:
    """Read a cluster profile. An override `cluster.a.b=c` sets its field a.b; others are ignored.

    Raises SpecError, OSError.
    """
    document = _document(read_bytes(file), str(file))
    return validate(Cluster, with_overrides(document, overrides, of_cluster=True))


def from_record(model: type[Model], data: dict[str, Any], name: str, overrides: Sequence[str] = ()) -> Model:
    """Validate a value stored with a run. Overrides apply as in `load_job` and `load_cluster`.

    `name` stands for the file in errors. Raises SpecError.
    """
    document = Document(copy.deepcopy(data), name)
    return validate(model, with_overrides(document, overrides, of_cluster=model is Cluster))


def read(file: Path, overrides: Sequence[str] = ()) -> Document:
    """Parse one YAML mapping and apply overrides. Raises SpecError if it is not a mapping, OSError."""
    return with_overrides(_document(read_bytes(file), str(file)), overrides)


def _document(text: bytes | str, name: str) -> Document:
    parsed = _parsed(text, name)
    return Document(copy.deepcopy(parsed.data), name, dict(parsed.places))


def with_overrides(document: Document, overrides: Sequence[str], of_cluster: bool = False) -> Document:
    """Apply the overrides meant for this document to it, and return it. Raises SpecError."""
    for override in overrides:
        if override.startswith(CLUSTER_PREFIX) == of_cluster:
            _override(document, override)
    return document


def read_plain(file: Path) -> dict[str, Any]:
    """Return a YAML mapping without a model, with numbers as numbers. Raises SpecError, OSError."""
    typed, document = Typed(), parse(read_bytes(file), str(file))
    data: dict[str, Any] = typed.of(Any, document.data)
    if typed.wrong:
        raise SpecError(_problems(document, typed.wrong))
    return data


# A sweep reads the same job and profile for each of its runs.
_parsed = functools.lru_cache(maxsize=8)(parse)


def validate(model: type[Model], document: Document) -> Model:
    """Return the validated value. Raises SpecError with all problems in the order of the file."""
    if model is Cluster:
        from launcher.spec.plugins import cluster_model

        model = cast("type[Model]", cluster_model(document.data.get("scheduler")))
    typed = Typed()
    data = typed.of(model, document.data)
    problems = _problems(document, typed.wrong)
    try:
        value = model.model_validate(data)
    except ValidationError as error:
        # pydantic reports cross-field rules only if every field is valid. A user wants all errors at once.
        details = [d for d in error.errors(include_url=False) if d["loc"] or model is not Job]
        wrong = {d["loc"][:depth] for d in details for depth in range(len(d["loc"]))}
        # pydantic does not count an invalid item, so a list with one may also be reported as "too short".
        details = [d for d in details if d["type"] != "too_short" or d["loc"] not in wrong]
        reported = {path for path, _ in typed.wrong}
        for detail in details:
            if isinstance(cause := detail.get("ctx", {}).get("error"), ContradictionsError):
                problems += _problems(document, cause.problems)
            elif detail["loc"] not in reported:
                problems.append(_problem(document, typed, detail))
        if model is Job:
            problems += _problems(document, cross_problems(data))
        elif issubclass(model, Cluster):
            problems += _problems(document, model.sections_problems(data))
    if problems:
        raise SpecError(sorted(dict.fromkeys(problems), key=lambda p: _line(p.where)))
    return value


def _problems(document: Document, messages: Iterable[tuple[KeyPath, str]]) -> list[Problem]:
    """Return a problem for each (key path, message)."""
    return [Problem(document.place(path), ".".join(map(str, path)), message) for path, message in messages]


def _line(where: str) -> int:
    tail = where.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0


def _override(document: Document, text: str) -> None:
    """Apply `a.b=value`. A text field takes the value unchanged; other fields parse it as YAML, like `[1,
    2]`."""
    where = given_as(text)
    dotted, equals, raw = text.removeprefix(CLUSTER_PREFIX).partition("=")
    path = tuple(dotted.split("."))
    if not equals or not all(path):
        raise SpecError([Problem(where, "", "write a field and its value, such as train.lr=1e-4")])
    target: Any = document.data
    for depth, key in enumerate(path[:-1], start=1):
        if isinstance(earlier := target.get(key), Raw):  # `--set recipe={...}`, followed by one of its fields
            target[key] = parse_value(earlier, earlier.given)
        if not isinstance(target.get(key), dict):
            target[key] = {}  # `recipe: auto` is replaced by `--set recipe.precision=bf16`
            document.places[path[:depth]] = where
        target = target[key]
    target[path[-1]] = Raw(raw, where)
    for inner in [p for p in document.places if p[: len(path)] == path]:
        del document.places[inner]
    document.places[path] = where


def _problem(document: Document, typed: Typed, details: ErrorDetails) -> Problem:
    path = tuple(part for part in details["loc"] if part != "[key]")  # the mapping's key itself is wrong
    message = details["msg"].removeprefix("Value error, ")
    models = typed.models.get(path[:-1], [])
    if details["type"] == "extra_forbidden":
        known = list(dict.fromkeys(name for model in models for name in fields_in(model)))
        hint = did_you_mean(str(path[-1]), known) or f"known here: {', '.join(known)}"
        message = f"unknown field; {hint}"
    elif details["type"] == "missing":
        message = "is missing"
    elif details["type"] == "literal_error" and isinstance(details["input"], str):
        known = _literals(details)
        hint = did_you_mean(details["input"], known) or f"one of {', '.join(known)}"
        message = f"{details['input']!r} is not known; {hint}"
    elif details["type"] == "string_pattern_mismatch" and (
        description := _description(models, str(path[-1]))
    ):
        message = f"{short(repr(details['input']))} does not have the form of this field: {description}"
    elif details["type"] != "value_error":
        must = re.sub(r"^\w+ should ", "must ", message)
        wanted = _WANTED.get(details["type"], f"{must[0].lower()}{must[1:]}")
        message = f"{wanted}, not {short(repr(details['input']))}"
    return Problem(document.place(path), ".".join(map(str, path)), message)


# What a user should write in YAML, by pydantic's error type.
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


def _description(models: Sequence[type[BaseModel]], field: str) -> str | None:
    from launcher.spec.schema import descriptions

    texts = (descriptions(model).get(field) for model in models)
    return next((text for text in texts if text is not None), None)


def _literals(details: ErrorDetails) -> list[str]:
    expected: str = details["ctx"]["expected"]
    return expected.replace(" or ", ", ").replace("'", "").split(", ")
