"""The progress of a run, from the end of its metrics.jsonl."""

from __future__ import annotations

from collections import deque
from typing import Any

from launcher.logs.new_lines import NewLines
from launcher.report.steps import number
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import TAIL_BYTES
from launcher.rundir.time import seconds_of

LOSSES = 256
"Number of losses to keep for the sparkline."
STEPS = 20
"Number of lines over which the time per step is measured."


class Progress:
    """The newest steps of a run."""

    def __init__(self, run: RunDir) -> None:
        self._lines = NewLines(run.metrics, TAIL_BYTES)
        self._times: deque[tuple[int, float]] = deque(maxlen=STEPS)
        "(step, Unix seconds) of lines of one attempt."
        self._attempt: object = None
        self.losses: deque[float] = deque(maxlen=LOSSES)
        "The newest finite losses, for the sparkline."
        self.last: dict[str, Any] = {}
        "The newest step and the newest value of each metric."

    def read(self) -> None:
        """Read what was written since the last call."""
        for line in self._lines.read():
            step, time = line.get("step"), line.get("time")
            if type(step) is not int:
                continue
            self.last = {**self.last, **line}
            if (loss := number(line.get("loss"))) is not None:
                self.losses.append(loss)
            if line.get("attempt") != self._attempt or (self._times and step < self._times[-1][0]):
                self._attempt = line.get("attempt")
                self._times.clear()
            if isinstance(time, str) and (moment := seconds_of(time)) is not None:
                self._times.append((step, moment))

    @property
    def step(self) -> int | None:
        return self.last.get("step")

    @property
    def seconds_per_step(self) -> float | None:
        """Wall-clock time per step over the newest steps, including evaluations and checkpoints."""
        if not self._times:
            return None
        steps = self._times[-1][0] - self._times[0][0]
        seconds = self._times[-1][1] - self._times[0][1]
        return seconds / steps if steps > 0 and seconds > 0 else None

    def left(self, steps: int | None) -> float | None:
        """Return the seconds until step `steps`, or None if unknown."""
        pace = self.seconds_per_step
        if pace is None or steps is None or self.step is None:
            return None
        return max(0, steps - self.step) * pace

    @property
    def speed(self) -> str:
        """Tokens, samples or steps per second in a few characters, such as `8.5k tok`."""
        for name, unit in (("tokens_per_second", "tok"), ("samples_per_second", "smp")):
            if (value := number(self.last.get(name))) is not None:
                return f"{_short(value)} {unit}"
        return f"{_short(1 / self.seconds_per_step)} st" if self.seconds_per_step else ""


def _short(value: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"
