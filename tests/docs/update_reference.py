"""`python -m tests.docs.update_reference`: write docs/reference/{job,cluster,recipe}.md from the models."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic

from launcher.spec.cluster import Cluster, Host
from launcher.spec.job import Job
from launcher.spec.quantities import Bytes, Memory, Rate, Seconds, Threshold
from launcher.spec.recipe import Recipe, RecipeChoice
from launcher.spec.scheduler_section import At, Section
from launcher.spec.schema import descriptions
from launcher.spec.value import Env, EnvName, Value
from tests.docs.field_examples import EXAMPLES, INTRODUCTIONS

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES: dict[str, type[Value]] = {"job": Job, "cluster": Cluster, "recipe": Recipe}
NAMES = (
    (Bytes, "size"),
    (Memory, "size"),
    (Seconds, "duration"),
    (Rate, "rate"),
    (Threshold, "size or percentage"),
    (Env, "mapping of names to text"),
    (EnvName, "name of a variable"),
    (Host, "host"),
    (pydantic.PositiveInt, "integer > 0"),
    (pydantic.NonNegativeInt, "integer ≥ 0"),
    (pydantic.PositiveFloat, "number > 0"),
    (pydantic.NonNegativeFloat, "number ≥ 0"),
    (str, "text"),
    (bool, "`true` or `false`"),
    (int, "integer"),
    (float, "number"),
    (pydantic.JsonValue, "any value"),
)


def type_name(annotation: Any) -> str:
    """The type of a field in words."""
    for known, name in NAMES:
        if annotation == known:
            return name
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(type_name(one) for one in arguments if one is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin is tuple:
        return f"list: {type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {type_name(arguments[0])} to {type_name(arguments[1])}"
    if annotation is RecipeChoice:
        return "`auto` or [recipe](recipe.md)"
    if inspect.isclass(annotation) and issubclass(annotation, Value):
        return "section"
    raise TypeError(f"{annotation} has no name in the reference")


def default_of(info: Any) -> str:
    """What a file gets that leaves the field out."""
    value = info.get_default(call_default_factory=True)
    if info.is_required():
        return "required"
    if value is None or isinstance(value, Value):
        return "–"
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value or json.dumps(value)}`"


def models_in(model: type[Value]) -> Iterator[tuple[str, type[Value]]]:
    """Each model below `model` with the path of the field that holds it."""
    hints = typing.get_type_hints(model, include_extras=True)
    for name, info in model.model_fields.items():
        for one in _classes(hints[name]):
            if one is not RecipeChoice:
                yield info.alias or name, one
                yield from ((f"{info.alias or name}.{path}", below) for path, below in models_in(one))


def _classes(annotation: Any) -> Iterator[type[Value]]:
    if isinstance(annotation, At):
        yield annotation.section_class
    if inspect.isclass(annotation) and issubclass(annotation, Value) and annotation is not Section:
        yield annotation
    for argument in get_args(annotation):
        yield from _classes(argument)


def fields(model: type[Value]) -> Iterator[tuple[str, Any, Any]]:
    """Name in a file, annotation and pydantic's record of each field."""
    hints = typing.get_type_hints(model, include_extras=True)
    for name, info in model.model_fields.items():
        yield info.alias or name, hints[name], info


def _table(model: type[Value], path: str = "") -> str:
    texts = descriptions(model)
    rows = ["| field | type | default | description | example |", "|---|---|---|---|---|"]
    for name, annotation, info in fields(model):
        example = EXAMPLES[model.__name__][name]
        section = f"[section](#{path.replace('.', '')}{name})"
        kind = type_name(annotation).replace("section", section)
        cells = (f"`{name}`", kind, default_of(info), texts[name], f"`{name}: {example}`")
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def page(name: str) -> str:
    model = PAGES[name]
    parts = [INTRODUCTIONS[name].strip(), "## Top level" if name != "recipe" else "## Fields", _table(model)]
    for path, one in models_in(model):
        parts += [f"## {path}", inspect.getdoc(one) or "", _table(one, path)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(page(name))
    print(f"wrote {len(PAGES)} pages to {FOLDER}")


if __name__ == "__main__":
    main()
