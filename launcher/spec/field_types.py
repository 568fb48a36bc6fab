"""Convert a file's data to the types of a model's fields. Text stays as written, `3.10` for example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator

from launcher.spec.scheduler_section import annotation_of, fields_in
from launcher.spec.yaml import KeyPath, Scalar, parse_value

_Override = TypeVar("_Override", bound="Override")
_NUMBERS = (int, float)


class Override(str):
    """An override `a.b=c` that was not given by `--set`."""

    given: str
    "How the user gave it, for errors, such as `--sweep lr=1e-3`."

    def __new__(cls: type[_Override], text: str, given: str) -> _Override:
        override = super().__new__(cls, text)
        override.given = given
        return override


def given_as(override: str) -> str:
    """Return how the user gave an override, for errors."""
    return override.given if isinstance(override, Override) else f"--set {override}"


class Raw(Override):
    """The text after the `=` of an override. The field decides its type."""


@dataclass
class Typed:
    """Converts a document's data to plain Python values for one model."""

    wrong: list[tuple[KeyPath, str]] = field(default_factory=list)
    "Key path and message of each invalid value."
    models: dict[KeyPath, list[type[BaseModel]]] = field(default_factory=dict)
    "Key path of each mapping of fields -> the models that it can be."

    def of(self, annotation: Any, data: Any, path: KeyPath = (), metadata: Sequence[Any] = ()) -> Any:
        base, accepted = list(_members(annotation)), list(_as_written(annotation, metadata))
        if isinstance(data, Raw):
            return self._raw(annotation, base, data, path, metadata)
        if isinstance(data, Scalar):
            return self._scalar(base if _takes_scalars(base) else [*base, *accepted], data, path)
        members = [*base, *accepted]
        if isinstance(data, dict):
            return self._mapping(members, data, path)
        if isinstance(data, list):
            return [self._item(members, index, item, (*path, index)) for index, item in enumerate(data)]
        return self._check_boolean(data, members, path) if isinstance(data, bool) else data

    def _mapping(self, members: list[Any], data: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        self.models[path] = list(_models(members))
        fields = {name: info for model in self.models[path] for name, info in fields_in(model).items()}
        value_type = next((get_args(member)[1] for member in members if get_origin(member) is dict), Any)
        converted = {}
        for key, value in data.items():
            wanted = (annotation_of(fields[key]), fields[key].metadata) if key in fields else (value_type, ())
            converted[key] = self.of(wanted[0], value, (*path, key), wanted[1])
        return converted

    def _item(self, members: list[Any], index: int, item: Any, path: KeyPath) -> Any:
        for member in members:
            if get_origin(member) in (tuple, list):
                types = [each for each in get_args(member) if each is not Ellipsis]
                return self.of(types[min(index, len(types) - 1)], item, path)
        return self.of(Any, item, path)

    def _scalar(self, members: list[Any], scalar: Scalar, path: KeyPath) -> Any:
        if str in members:
            wanted = {type(None): type(None) in members, bool: bool in members}
            wanted |= dict.fromkeys(_NUMBERS, _has_number(members))
            if not wanted.get(scalar.kind, False):
                if scalar.kind is type(None) and not scalar:
                    self.wrong.append((path, "is empty; write '' for an empty text"))
                return str(scalar)
        try:
            value = scalar.value
            if isinstance(value, float) and float not in members and int in members and abs(value) >= 2**64:
                raise ValueError(f"{scalar} is too large for a number")
            return self._check_boolean(value, members, path) if isinstance(value, bool) else value
        except ValueError as error:
            self.wrong.append((path, str(error)))
            return None

    def _check_boolean(self, value: bool, members: list[Any], path: KeyPath) -> bool:
        """Report a boolean in place of a number. pydantic would read it as 0 or 1."""
        if _has_number(members) and bool not in members:
            wanted = "a number" if float in members else "a whole number"
            self.wrong.append((path, f"must be {wanted}, not {str(value).lower()}"))
        return value

    def _raw(self, annotation: Any, base: list[Any], raw: Raw, path: KeyPath, metadata: Sequence[Any]) -> Any:
        text = str(raw)
        if str in base and not _has_number(base):
            return None if text == "null" and type(None) in base else text
        value = parse_value(text, raw.given)
        if isinstance(value, bool | int | float) and not _takes_scalars(base):
            accepted = list(_as_written(annotation, metadata))
            if str in accepted and not _has_number(accepted):
                return text
        return value if type(value) is str else self.of(annotation, value, path, metadata)


def _has_number(members: list[Any]) -> bool:
    return any(number in members for number in _NUMBERS)


def _takes_scalars(members: list[Any]) -> bool:
    """Return whether a field accepts text, a number or a boolean, not only a collection."""
    return any(not _is_collection(member) and member is not type(None) for member in members)


def _is_collection(member: Any) -> bool:
    return get_origin(member) in (dict, tuple, list) or bool(_models([member]))


def _models(members: list[Any]) -> list[type[BaseModel]]:
    return [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, or the one type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _as_written(annotation: Any, metadata: Sequence[Any]) -> Iterator[Any]:
    """Yield the types that a user may write in addition to the field's own type."""
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _as_written(member, ())
    annotations = [*metadata, *(get_args(annotation)[1:] if get_origin(annotation) is Annotated else ())]
    for each in annotations:
        if isinstance(each, BeforeValidator) and each.json_schema_input_type is not Any:
            input_type = each.json_schema_input_type
            if isinstance(input_type, type) or get_origin(input_type) is not None:
                yield from _members(input_type)
