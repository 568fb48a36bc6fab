"""The steps of a run as columns of numbers, filled line by line: a long run has millions of lines."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from launcher.rundir.time import seconds_of

_NO_METRIC = frozenset({"time", "attempt", "step", "steps", "samples", "seconds", "seconds_lost"})
_MEMORY = ("memory_peak", "memory_rss")
_LARGEST = 2**53
"Larger integers are not exact as floats. No run has so many steps."


class Column:
    """The numbers of one metric, and the rows that have one. A value that is not a finite number is NaN."""

    def __init__(self) -> None:
        self._rows, self._values = array("q"), array("d")

    def put(self, row: int, value: float) -> None:
        if self._rows and self._rows[-1] == row:
            self._values[-1] = value
        else:
            self._rows.append(row)
            self._values.append(value)

    def cut(self, row: int) -> None:
        """Remove this row and those after it."""
        kept = bisect_left(self._rows, row)
        del self._rows[kept:], self._values[kept:]

    @property
    def last(self) -> float:
        return self._values[-1]

    def finite(self) -> Iterator[float]:
        return filter(math.isfinite, self._values)

    def over(self, rows: int) -> list[float | None]:
        """Return a value for each of the rows: None for a row without one."""
        values_by_row: list[float | None] = [None] * rows
        for row, value in zip(self._rows, self._values, strict=True):
            values_by_row[row] = value
        return values_by_row


class Steps:
    """The steps of a run, one row each, without those that a later attempt has repeated.

    Lines of the same step and attempt, such as of training and evaluation, are one row.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.step, self.time, self.seconds = array("d"), array("d"), array("d")
        "Number of the step, when it ended (Unix seconds, NaN if unknown), and how long it took."
        self.columns: dict[str, Column] = {}
        self.began: dict[int, float] = {}
        "Attempt -> when its first step began, in Unix seconds."
        self._attempt: int | None = None
        for line in lines:
            self.add(line)

    def __len__(self) -> int:
        return len(self.step)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        step, attempt = line["step"], line["attempt"]
        if not -_LARGEST < step < _LARGEST:
            return
        if not (self and self.step[-1] == step and self._attempt == attempt):
            if self and self.step[-1] >= step:
                self._cut(bisect_left(self.step, step))
            for numbers in (self.step, self.time, self.seconds):
                numbers.append(0.0)
        row, self._attempt = len(self) - 1, attempt
        ended, seconds = seconds_of(line["time"]), number(line["seconds"]) or 0.0
        if ended is not None and attempt not in self.began:
            self.began[attempt] = ended - seconds - (number(line.get("seconds_lost")) or 0.0)
        self.step[row], self.time[row] = step, math.nan if ended is None else ended
        self.seconds[row] += seconds
        for name, value in line.items():
            if (column := self.columns.get(name)) is None:
                if name in _NO_METRIC or (name.startswith("memory_") and name not in _MEMORY):
                    continue
                column = self.columns[name] = Column()
            if type(value) is float and math.isfinite(value):
                column.put(row, value)
            elif not isinstance(value, str | bool | list | dict):
                known = number(value)
                column.put(row, math.nan if known is None else known)

    def _cut(self, row: int) -> None:
        del self.step[row:], self.time[row:], self.seconds[row:]
        for column in self.columns.values():
            column.cut(row)

    def metrics(self) -> dict[str, Column]:
        """Return the columns that have a finite number, without memory and the sizes of a step."""
        return {
            name: column
            for name, column in self.columns.items()
            if name not in ("tokens", "weight", *_MEMORY) and next(column.finite(), None) is not None
        }

    def tokens(self) -> list[float] | None:
        """Return the cumulative tokens at each step. The built-in entrypoint logs tokens as `weight`."""
        tokens, weight, speed = (
            self.columns.get(name, Column()).over(len(self))
            for name in ("tokens", "weight", "tokens_per_second")
        )
        cumulative, total = [], 0.0
        for of_step, weighs, per_second in zip(tokens, weight, speed, strict=True):
            counted = of_step if of_step is not None or per_second is None else weighs
            total += number(counted) or 0.0
            cumulative.append(total)
        return cumulative if total else None

    def peak(self) -> float | None:
        """Return the highest memory of rank 0 in bytes: of its GPU, or else of the process."""
        highest = (max(self.columns[name].finite(), default=None) for name in _MEMORY if name in self.columns)
        return next((peak for peak in highest if peak), None)


def number(value: object) -> float | None:
    """Return a finite number as float, and None for everything else that a line may contain."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
