"""Read `trainer_state.json`, to which transformers' Trainer writes its whole log with each checkpoint."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from launcher.callbacks.names import is_summary
from launcher.rundir.files import read_json
from launcher.supervise.framework_logs.reading import Reading, number

NAMES = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class TrainerStateReader:
    """Reads the newest state below one output folder."""

    def __init__(self, path: Path, since: float) -> None:
        self._folder = output_folder(path)
        self._since = since
        self._newest: tuple[float, Path] = (0.0, path)
        older = [file for file, time in self._times().items() if time < since]
        self._resumed = max((steps for file in older if (steps := _steps(file)) is not None), default=0)
        "Steps of the newest checkpoint before the start, which the Trainer may delete later."
        self._entries_read = 0
        "Number of entries that were read."

    def read(self) -> list[Reading]:
        written = [(time, path) for path, time in self._times().items() if time >= self._since]
        if not written or max(written) == self._newest:
            return []
        state = read_json(max(written)[1])
        if not isinstance(state, dict) or not isinstance(history := state.get("log_history"), list):
            return []  # not yet written completely
        if not self._entries_read:
            self._entries_read = _of_earlier_attempts(history, max(written)[1], self._resumed)
        new, self._entries_read = history[self._entries_read :], max(self._entries_read, len(history))
        self._newest = max(written)
        readings = [_reading(entry, state.get("max_steps"), max(written)[0]) for entry in new]
        return [reading for reading in readings if reading is not None]

    def _times(self) -> dict[Path, float]:
        """Return when each state was written, in Unix seconds."""
        times = {}
        for path in (self._folder / NAMES, *self._folder.glob(f"checkpoint-*/{NAMES}")):
            with contextlib.suppress(FileNotFoundError):
                times[path] = path.stat().st_mtime
        return times


def output_folder(path: Path) -> Path:
    """Return the Trainer's `output_dir`."""
    return path.parent.parent if _CHECKPOINT.fullmatch(path.parent.name) else path.parent


def _of_earlier_attempts(history: list[Any], newest: Path, resumed: int) -> int:
    """Return how many entries an earlier attempt logged. `resumed` is the steps of its newest checkpoint.

    The Trainer keeps these entries when it resumes from a checkpoint. If the newest state has at most
    `resumed` steps, the Trainer started from scratch.
    """
    reached = _steps(newest)
    if reached is not None and reached <= resumed:
        return 0
    return sum(
        isinstance(entry, dict) and number(entry.get("step")) in range(resumed + 1) for entry in history
    )


def _steps(path: Path) -> int | None:
    """Return the steps in the name of a checkpoint's folder, or None for the state at the end."""
    named = _CHECKPOINT.fullmatch(path.parent.name)
    return None if named is None else int(named[1])


def _reading(entry: Any, steps: Any, written: float) -> Reading | None:
    """Return an entry as a Reading, or None if it is not a step, such as the summary at the end."""
    if not isinstance(entry, dict) or is_summary(entry) or type(step := entry.get("step")) is not int:
        return None
    metrics = {name: value for name, value in entry.items() if name != "step"}
    total_steps = steps if type(steps) is int and steps > 0 else None
    return Reading(step, metrics, written=written, steps=total_steps, first=1)
