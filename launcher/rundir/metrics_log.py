"""`launcher.log`: the steps of a program that is not launcher's own, as lines of metrics.jsonl."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.rundir.files import append_json
from launcher.rundir.layout import RunDir
from launcher.rundir.secret_masking import masked_text
from launcher.rundir.time import stamp
from launcher.spec import variables

RESERVED = frozenset({"time", "attempt", "step", "steps", "seconds", "seconds_lost"})
"Fields of a line that `log` writes itself."
_COUNTED = ("tokens", "samples")


class StepLines:
    """Turns what a program reports about its steps into the lines of one attempt.

    The secrets that `environ` names are masked in the names of metrics.
    """

    def __init__(self, attempt: int, environ: Mapping[str, str]) -> None:
        self._attempt, self._environ = attempt, environ
        self._names: dict[str, str] = {}
        "The names of metrics so far, as they are written."
        self._last: tuple[int, float] | None = None
        "The step of the last line, and its time in Unix seconds."

    def line(
        self,
        step: int,
        numbers: Mapping[str, float | None],
        at: float,
        *,
        steps: int | None = None,
        measured: bool = True,
    ) -> dict[str, Any]:
        """Return the line of what was reported at a time, in Unix seconds.

        Its seconds are those since the last line, and counts since then become speeds. A second report about
        a step, such as after an evaluation, adds no seconds; neither does one whose time is not `measured`.
        """
        last_step, last_at = self._last or (step, at)
        seconds = max(0.0, at - last_at) if step != last_step and measured else 0.0
        self._last = step, at
        for name in numbers.keys() - self._names.keys():
            self._names[name] = masked_text(name, self._environ)
        line = {
            "time": stamp(at),
            "attempt": self._attempt,
            "step": step,
            "seconds": round(seconds, 6),
            **{self._names[name]: number for name, number in numbers.items()},
        }
        if steps is not None:
            line["steps"] = steps
        for name in _COUNTED:
            if (count := numbers.get(name)) is not None and seconds > 0:
                line[f"{name}_per_second"] = round(count / seconds, 3)
        return line


_lines: StepLines | None = None
"The steps that `log` of this process has recorded; None before the first call."


def log(step: int, *, steps: int | None = None, rank: int | None = 0, **metrics: Any) -> None:
    """Record numbers of an optimizer step, for `launcher status`, `report` and `compare`.

    Does nothing outside a run of launcher, and on other ranks than `rank` (None: every rank records).

    `step` counts from 1. `steps` is the number of steps of the whole training, if the job does not set it.
    Of the metrics, `loss`, `lr`, `grad_norm` and names that begin with `eval_` have their place in a report;
    `tokens` and `samples` are those since the last call and become a speed. Tensors with one element are
    numbers too. None, NaN and infinity are recorded as null.

    Raises nothing, because a report must not end a training. What cannot be recorded is reported once on
    stderr: a metric that is not a number, a name that launcher writes itself, a step below 0, a full disk.
    """
    record(step, metrics, steps=steps, rank=rank)


def record(step: int, metrics: Mapping[str, Any], *, steps: int | None = None, rank: int | None = 0) -> None:
    """Do what `log` does, with metrics of any name: a framework may report one that is called `step`."""
    folder = os.environ.get(variables.RUN_DIR)
    if folder is None or rank not in (None, int(os.environ.get("RANK", "0"))):
        return
    global _lines
    try:
        at, total = _step_number(step), None if steps is None else _step_number(steps)
    except _NOT_A_NUMBER as error:
        _report_once(f"a step is not recorded: {error}")
        return
    numbers: dict[str, float | None] = {}
    for name, value in metrics.items():
        if name in RESERVED:
            _report_once(f"{name} is not recorded: launcher writes it itself")
            continue
        try:
            numbers[name] = _number(value)
        except _NOT_A_NUMBER as error:
            _report_once(f"{name} is not recorded: {error}", at)
    _lines = _lines or StepLines(int(os.environ.get(variables.ATTEMPT, "0")), os.environ)
    try:
        append_json(RunDir(Path(folder)).metrics, _lines.line(at, numbers, time.time(), steps=total))
    except OSError as error:
        _report_once(f"lines are lost: {error.strerror}", at)


_NOT_A_NUMBER = (TypeError, ValueError, OverflowError, RuntimeError)
"RuntimeError: of a tensor with several elements."


def _step_number(value: Any) -> int:
    if (number := int(value)) < 0:
        raise ValueError(f"{number} is below 0")
    return number


def _number(value: Any) -> float | int | None:
    if value is None:
        return None
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


_reported: set[str] = set()


def _report_once(problem: str, step: int | None = None) -> None:
    if problem not in _reported:
        _reported.add(problem)
        print(f"launcher.log: {problem}" + (f" (step {step})" if step is not None else ""), file=sys.stderr)
