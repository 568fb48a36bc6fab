"""A JSON object as a value: its known fields are attributes. Unknown ones are kept."""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from launcher.spec.json_forms import Form, fits

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # part of typing from Python 3.11; only type checkers need it

    def dataclass_transform(**_):
        return lambda cls: cls


R = TypeVar("R", bound="Record")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record(ABC):
    """A JSON object. A subclass annotates its fields; those with a default may be missing or null.

    `Annotated[type, form]` narrows a field to a form. If a field's name is a Python keyword, an underscore is
    appended: `from_` is `from` in the file.
    """

    _data: Mapping[str, Any]

    def __init__(self, **fields: Any) -> None:
        self._set_data(_as_data(fields))

    @classmethod
    def read(cls: type[R], value: object) -> R | None:
        """Return the record, or None if a field has another type or is missing without a default."""
        return cls.of(value) if isinstance(value, dict) and fits(value, form_of(cls)) else None

    @classmethod
    def of(cls: type[R], data: Mapping[str, Any]) -> R:
        """Return a record of this object without checking it."""
        record = cls.__new__(cls)
        record._set_data(data)
        return record

    def _set_data(self, data: Mapping[str, Any]) -> None:
        self.__dict__["_data"] = data
        for name, disk, read in _fields(type(self)):
            if (value := data.get(disk)) is not None:
                self.__dict__[name] = read(value)

    def as_json(self) -> dict[str, Any]:
        """Return the whole object, as it is in the file."""
        return dict(self._data)

    def replace(self: R, **fields: Any) -> R:
        """Return the object with other values of these fields."""
        return self.of({**self._data, **_as_data(fields)})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is a value: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and type(other) is type(self) and self._data == other._data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self._data)})"


def _on_disk(name: str) -> str:
    return name.removesuffix("_")


def _as_data(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _on_disk(name): value.as_json() if isinstance(value, Record) else value
        for name, value in fields.items()
    }


@functools.cache
def _fields(cls: type[Record]) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    """Return (attribute, name in the file, function that reads a value) for each field."""
    return tuple((name, _on_disk(name), _reader(hint)) for name, hint in _hints(cls).items())


def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return a function that replaces a JSON object by its record, also in a list."""
    for member in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if get_origin(member) is list and (read := _reader(get_args(member)[0])) is not _unchanged:
            return lambda items: [read(item) for item in items]
        # In Python 3.10, list[int] is an instance of type.
        if get_origin(member) is None and isinstance(member, type) and issubclass(member, Record):
            return member.of
    return _unchanged


def _unchanged(value: Any) -> Any:
    return value


@functools.cache
def form_of(cls: type[Record]) -> Form:
    """Return the form that a JSON object must have to be read as this record."""
    return {
        _on_disk(name) + ("?" if hasattr(cls, name) else ""): _as_form(hint)
        for name, hint in _hints(cls).items()
    }


def _hints(cls: type[Record]) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint for name, hint in hints.items() if not name.startswith("_")}


def _as_form(hint: Any) -> Form:
    """Return the form of a type's values in JSON."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return object
    if origin in (Union, UnionType):
        members = [_as_form(member) for member in args if member is not type(None)]
        return members[0] if len(members) == 1 else functools.reduce(lambda a, b: a | b, members)
    if origin is list:
        return [_as_form(args[0])]
    if origin is tuple:
        return tuple(map(_as_form, args))
    if origin in (dict, Mapping):
        return {"*": _as_form(args[1])}
    if isinstance(hint, type) and issubclass(hint, Record):
        return form_of(hint)
    return _as_form(args[1]) if hasattr(hint, "__metadata__") else hint
