"""Check the form of JSON values. Records of another form, from another rank, host or version, are ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

Form = Any
"""One of these:

- a type or a union of types (`int` accepts no bool, `float` accepts an int)
- a set of values, or a pattern that text must match
- `[form]`, a list of any length, or `(form, form)`, a list of that length
- a mapping of keys to forms: a key that ends with `?` may be missing or null; `*` stands for other keys
"""


def fits(value: object, form: Form) -> bool:
    """Return whether a JSON value has this form."""
    if isinstance(form, dict):
        return isinstance(value, dict) and _keys_fit(value, form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(fits, value, form))
    if isinstance(form, frozenset):
        return isinstance(value, str) and value in form
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and form.fullmatch(value) is not None
    if isinstance(value, bool):
        return form is object or bool in _types(form)
    return isinstance(value, form) or (isinstance(value, int) and float in _types(form))


def _keys_fit(value: Mapping[str, object], form: Mapping[str, Form]) -> bool:
    named = {key.removesuffix("?"): key for key in form if key != "*"}
    for name, key in named.items():
        inner = value.get(name)
        if not (inner is None and key.endswith("?")) and (name not in value or not fits(inner, form[key])):
            return False
    others = form.get("*", object)
    return others is object or all(fits(inner, others) for name, inner in value.items() if name not in named)


def _types(form: Form) -> tuple[type, ...]:
    return get_args(form) or (form,)


STAMP = re.compile(r"\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-6]\d(\.\d+)?Z?")
