"""Convert what a framework has logged to lines of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.callbacks.names import counts_batches, numbers_of, of_evaluation
from launcher.rundir.metrics_log import RESERVED, StepLines
from launcher.supervise.framework_logs.reading import Reading, number

FROM = "from"
"Field of a copied line that names the kind of log. `launcher.log` does not write it."
MAX_METRICS = 100
"Maximum metrics of a run. If there are more, the first names are kept."
_WRITTEN = RESERVED | {FROM, "samples", "tokens"}
"Fields that are not copied."
_TOKENS_SO_FAR = ("num_input_tokens_seen", "num_tokens")
"Names under which transformers and TRL log the tokens of all steps so far."


class FrameworkLines:
    """Creates the lines of one attempt."""

    def __init__(
        self,
        attempt: int,
        samples_per_step: int | None,
        since: float,
        environ: Mapping[str, str],
        first_steps: Mapping[str, int],
    ) -> None:
        """`since` is when the rank was started, in Unix seconds.

        `first_steps` maps kinds of logs to the number of the first step in an earlier attempt. The log of a
        resumed training begins with a later step.
        """
        self._lines, self._samples_per_step = StepLines(attempt, environ), samples_per_step
        self._since, self._read_at, self._batches = since, since, 0
        self._first_steps = first_steps
        self._first: int | None = None
        self._step: int | None = None
        self._trained: int | None = None
        "The step of the last training metrics."
        self._evaluated: set[str] = set()
        "Metrics of held-out data since then."
        self._other_steps: set[str] = set()
        "Metrics of held-out data whose steps count something other than training steps, such as batches."
        self._last_logged: dict[str, int] = {}
        "Metric -> the step under which it was last logged."
        self._lightning = False
        "Whether a training step was logged together with its `epoch`, as Lightning does."
        self._tokens: float | None = None
        self._names: set[str] = set()

    @property
    def first(self) -> int | None:
        """Number of the first step of a training in its log, 0 or 1; None if it is not known yet."""
        return self._first

    def lines(self, kind: str, readings: Sequence[Reading], now: float) -> list[dict[str, Any]]:
        """Return the lines for readings that were read at the time `now`, in Unix seconds.

        If the log has no times, they are spread evenly between the last call and the time the file was
        written. Steps of the first call have no `seconds`, because they include the program's start.
        """
        lines = []
        self._first = self._first_steps.get(kind) if self._first is None else self._first
        self._first = next((reading.first for reading in readings if reading.first is not None), self._first)
        written = next((reading.written for reading in readings if reading.written is not None), now)
        end = min(max(written, self._read_at), now)
        spread = (end - self._read_at) / max(len({reading.step for reading in readings}), 1)
        at, before = self._read_at, None
        for reading in readings:
            at += spread if reading.step != before else 0.0
            before = reading.step
            time, measured = at, self._batches > 0
            if reading.time is not None and self._since <= reading.time <= now:
                time, measured = reading.time, True
            line = self._line(reading, time, measured=measured)
            lines += [] if line is None else [{**line, FROM: kind}]
        self._read_at, self._batches = end, self._batches + 1
        return lines

    def _line(self, reading: Reading, at: float, *, measured: bool) -> dict[str, Any] | None:
        """Return a line, or None if the reading belongs to no step that launcher counts."""
        numbers = self._numbers(reading.metrics)
        self._lightning |= "epoch" in reading.metrics and not of_evaluation(numbers)
        if self._lightning and counts_batches(reading.metrics):
            step = self._step or 0
        else:
            step = self._counted(reading.step + 1 - self._first_of(reading, numbers), numbers)
        if step < 1 or not numbers:
            return None
        before, self._step = self._step, step
        if before is not None and step > before and self._samples_per_step is not None:
            numbers["samples"] = (step - before) * self._samples_per_step
        if (so_far := _tokens_so_far(reading.metrics)) is not None:
            if self._tokens is not None and so_far > self._tokens:
                numbers["tokens"] = so_far - self._tokens
            self._tokens = so_far
        return self._lines.line(step, numbers, at, steps=reading.steps, measured=measured)

    def _counted(self, step: int, numbers: Mapping[str, float | None]) -> int:
        """Return the optimizer step of metrics that were logged under `step`.

        A step may be lower than the previous one although no metric has gone back in its own steps. Then
        some metrics count something else than steps: held-out metrics that were ahead of the training, such
        as batches, or else these metrics, such as epochs. They belong to the last step. If a metric goes
        back in its own steps, training has restarted.
        """
        before, held_out = self._step, of_evaluation(numbers)
        if self._trained is not None and held_out and self._other_steps.issuperset(numbers):
            return self._trained
        counts_something_else = before is not None and step < before
        counts_something_else &= all(step >= self._last_logged.get(name, step) for name in numbers)
        self._last_logged.update(dict.fromkeys(numbers, step))
        if counts_something_else and not held_out and self._trained is not None and step >= self._trained:
            self._other_steps |= self._evaluated
            counts_something_else = False
        counted = before if before is not None and counts_something_else else step
        if held_out:
            self._evaluated |= numbers.keys()
        else:
            self._trained, self._evaluated = counted, set()
        return counted

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        numbers = numbers_of({name: value for name, value in metrics.items() if type(value) in (int, float)})
        for name in numbers:
            if name not in _WRITTEN and len(self._names) < MAX_METRICS:
                self._names.add(name)
        return {name: number(value) for name, value in numbers.items() if name in self._names}

    def _first_of(self, reading: Reading, numbers: Mapping[str, float | None]) -> int:
        """Return the number of the first step: as logged, or else 0 if the first training step is 0."""
        if reading.first is not None:
            return reading.first
        if self._first is None and not of_evaluation(numbers):
            self._first = 0 if reading.step == 0 else 1
        return 1 if self._first is None else self._first


def _tokens_so_far(metrics: Mapping[str, Any]) -> float | None:
    """Return the number of tokens in all steps so far, or None if it is not logged."""
    for name, value in metrics.items():
        if name.removeprefix("train/") in _TOKENS_SO_FAR and (tokens := number(value)) is not None:
            return tokens
    return None
