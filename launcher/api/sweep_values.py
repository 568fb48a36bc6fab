"""The values of a sweep: every combination of lists, and values drawn at random."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence

from launcher.schedulers.base import SchedulerError

_CALL = re.compile(r"\s*([A-Za-z][\w -]*?)\s*\((.*)\)\s*", re.DOTALL)
DISTRIBUTIONS = ("uniform", "loguniform", "randint")
_DIGITS = 6
"Significant digits of a drawn number."


def combinations(sweeps: Sequence[str], samples: int | None = None, seed: int = 0) -> list[tuple[str, ...]]:
    """Return the `--set` texts of each run: `lr=1,2` and `seed=0,1` -> four tuples.

    A text such as `lr=loguniform(1e-5,1e-3)` is drawn `samples` times, and each draw is combined with every
    combination of the lists. The draws of a field depend on `seed` and the field's name only.

    Raises SchedulerError.
    """
    if samples is not None and samples < 1:
        raise SchedulerError(f"--samples {samples}: at least one value must be drawn")
    lists: dict[str, list[str]] = {}
    drawn: dict[str, list[str]] = {}
    order = [text.partition("=")[0] for text in sweeps]
    for text in sweeps:
        key, equals, values = text.partition("=")
        if order.count(key) > 1:
            raise SchedulerError(f"--sweep {text}: the field is given twice; list its values in one option")
        listed = split(values)
        calls = [call for value in listed if (call := _CALL.fullmatch(value)) is not None]
        if equals and key and calls:
            if len(listed) > 1:
                raise SchedulerError(
                    f"--sweep {text}: a distribution stands alone; quote a text with brackets"
                )
            draw = _distribution(text, calls[0][1], calls[0][2])
            if samples is None:
                raise SchedulerError(f"--sweep {text}: say how many values to draw with --samples N")
            numbers = random.Random(f"{seed} {key}")  # a text is hashed the same way in every Python
            drawn[key] = [f"{key}={draw(numbers)}" for _ in range(samples)]
            continue
        if not equals or not key or not all(listed):
            raise SchedulerError(f"--sweep {text}: write --sweep field.name=value,value")
        if len(set(listed)) < len(listed):
            raise SchedulerError(f"--sweep {text}: a value is listed twice")
        lists[key] = [f"{key}={value}" for value in listed]
    if samples is not None and not drawn:
        raise SchedulerError(
            "--samples: no --sweep draws its values; write, for example, train.lr=loguniform(1e-5,1e-3)"
        )
    draws = list(zip(*drawn.values(), strict=True)) or [()]
    runs = []
    for combination, point in itertools.product(itertools.product(*lists.values()), draws):
        values_of = dict(zip((*lists, *drawn), (*combination, *point), strict=True))
        runs.append(tuple(values_of[key] for key in order))
    return runs


def _distribution(text: str, name: str, arguments: str) -> Callable[[random.Random], str]:
    """Return a function that draws one value. Raises SchedulerError."""
    if name not in DISTRIBUTIONS:
        raise SchedulerError(
            f"--sweep {text}: unknown distribution {name}: use uniform(low,high), loguniform(low,high) or "
            "randint(low,high), or quote a text with brackets"
        )
    try:
        low, high = map(int if name == "randint" else float, arguments.split(","))
    except ValueError:
        kind = "two integers" if name == "randint" else "two numbers"
        raise SchedulerError(f"--sweep {text}: {name} takes {kind}, {name}(low,high)") from None
    if name == "randint":
        if low > high:
            raise SchedulerError(f"--sweep {text}: low must not be above high")
        return lambda numbers: str(numbers.randint(int(low), int(high)))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise SchedulerError(f"--sweep {text}: low must be less than high, and both finite")
    if name == "uniform":
        return lambda numbers: _rounded(_between(low, high, numbers.random()), low, high)
    if low <= 0:
        raise SchedulerError(f"--sweep {text}: the logarithm needs numbers above 0")
    ends = math.log(low), math.log(high)
    return lambda numbers: _rounded(math.exp(_between(*ends, numbers.random())), low, high)


def _between(low: float, high: float, share: float) -> float:
    return low * (1 - share) + high * share  # high - low might be infinite


def _rounded(value: float, low: float, high: float) -> str:
    """Return the value with six significant digits, or in full if these are outside of the interval."""
    text = f"{value:.{_DIGITS}g}"
    return text if low <= float(text) <= high else repr(min(max(value, low), high))


def split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
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
    return parts
