"""The values of a sweep: every combination of lists, and values drawn at random."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launcher.spec.errors import UsageError
from launcher.spec.field_types import Override

_CALL = re.compile(r"\s*([A-Za-z][\w -]*?)\s*\((.*)\)\s*", re.DOTALL)
_QUOTED = re.compile(r"""(?s)\A(["'])((?:(?!\1).)*)\1\Z""")
DISTRIBUTIONS = ("uniform", "loguniform", "randint")
_DIGITS = 6
"Significant digits of a drawn number."


class Field(NamedTuple):
    """A swept field: the texts of its values, as after the `=` of `--set`, or how to draw them."""

    name: str
    values: tuple[str, ...]
    draw: Callable[[random.Random], str] | None = None

    def __str__(self) -> str:
        return f"{self.name}={','.join(self.values)}"


def field_of(text: str) -> Field:
    """Read `lr=1,2` or `lr=loguniform(1e-5,1e-3)`. Raises UsageError.

    A value in quotes is a text that may contain commas and brackets.
    """
    name, equals, values = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--sweep {text}: write --sweep field.name=value,value")
    try:
        listed = split(values)
    except ValueError as error:
        raise UsageError(f"--sweep {text}: {error}") from None
    calls = [call for value in listed if (call := _CALL.fullmatch(value)) is not None]
    if calls:
        if len(listed) > 1:
            raise UsageError(f"--sweep {text}: a distribution stands alone; quote a text with brackets")
        return Field(name, (values,), _distribution(text, calls[0][1], calls[0][2]))
    if not all(listed):
        raise UsageError(f"--sweep {text}: write --sweep field.name=value,value")
    if name.startswith("args."):  # parsed as YAML, in which quotes make a text of a number
        return Field(name, tuple(listed))
    return Field(name, tuple(_QUOTED.sub(r"\2", value) for value in listed))


def combinations(fields: Sequence[Field], samples: int | None = None, seed: int = 0) -> list[tuple[str, ...]]:
    """Return the `--set` texts of each run: `lr=1,2` and `seed=0,1` -> four tuples.

    A field that is drawn is drawn `samples` times, and each draw is combined with every combination of the
    lists. The draws of a field depend on `seed` and the field's name only.

    Raises UsageError.
    """
    if samples is not None and samples < 1:
        raise UsageError(f"--samples {samples}: at least one value must be drawn")
    lists: dict[str, list[str]] = {}
    drawn: dict[str, list[str]] = {}
    order = [field.name for field in fields]
    for field in fields:
        if order.count(field.name) > 1:
            raise UsageError(f"--sweep {field}: the field is given twice; list its values in one option")
        if not field.values:
            raise UsageError(f"--sweep {field.name}: there is no value")
        if field.draw is not None:
            if samples is None:
                raise UsageError(f"--sweep {field}: say how many values to draw with --samples N")
            numbers = random.Random(f"{seed} {field.name}")  # a text is hashed the same way in every Python
            drawn[field.name] = [_set(field, field.draw(numbers)) for _ in range(samples)]
            continue
        if len(set(field.values)) < len(field.values):
            raise UsageError(f"--sweep {field}: a value is listed twice")
        lists[field.name] = [_set(field, value) for value in field.values]
    if samples is not None and not drawn:
        raise UsageError(
            "--samples: no --sweep draws its values; write, for example, train.lr=loguniform(1e-5,1e-3)"
        )
    draws = list(zip(*drawn.values(), strict=True)) or [()]
    runs = []
    for combination, point in itertools.product(itertools.product(*lists.values()), draws):
        values_of = dict(zip((*lists, *drawn), (*combination, *point), strict=True))
        runs.append(tuple(values_of[name] for name in order))
    return runs


def _set(field: Field, value: str) -> str:
    text = f"{field.name}={value}"
    return Override(text, f"--sweep {text}")


def _distribution(text: str, name: str, arguments: str) -> Callable[[random.Random], str]:
    """Return a function that draws one value. Raises UsageError."""
    if name not in DISTRIBUTIONS:
        raise UsageError(
            f"--sweep {text}: unknown distribution {name}: use uniform(low,high), loguniform(low,high) or "
            "randint(low,high), or quote a text with brackets"
        )
    try:
        low, high = map(int if name == "randint" else float, arguments.split(","))
    except ValueError:
        kind = "two integers" if name == "randint" else "two numbers"
        raise UsageError(f"--sweep {text}: {name} takes {kind}, {name}(low,high)") from None
    if name == "randint":
        if low > high:
            raise UsageError(f"--sweep {text}: low must not be above high")
        return lambda numbers: str(numbers.randint(int(low), int(high)))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"--sweep {text}: low must be less than high, and both finite")
    if name == "uniform":
        return lambda numbers: _rounded(_between(low, high, numbers.random()), low, high)
    if low <= 0:
        raise UsageError(f"--sweep {text}: the logarithm needs numbers above 0")
    ends = math.log(low), math.log(high)
    return lambda numbers: _rounded(math.exp(_between(*ends, numbers.random())), low, high)


def _between(low: float, high: float, share: float) -> float:
    return low * (1 - share) + high * share  # high - low might be infinite


def _rounded(value: float, low: float, high: float) -> str:
    """Return the value with six significant digits, or in full if these are outside of the interval."""
    text = f"{value:.{_DIGITS}g}"
    return text if low <= float(text) <= high else repr(min(max(value, low), high))


def split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes. Raises ValueError if one of these is not closed."""
    parts, depth, quoted = [""], 0, ""
    for char in text:
        if char == "," and not depth and not quoted:
            parts.append("")
            continue
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "'\"":
            quoted = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        parts[-1] += char
        if depth < 0:
            break
    if depth or quoted:
        raise ValueError(f"{quoted or 'a bracket'} has no counterpart; put quotes around the value")
    return parts
