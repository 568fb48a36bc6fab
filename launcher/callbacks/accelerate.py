"""A tracker for accelerate: `Accelerator(log_with=LogTracker())`, then `accelerator.init_trackers("run")`."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

from launcher.callbacks.names import numbers_of
from launcher.rundir.metrics_log import record


class LogTracker(GeneralTracker):  # type: ignore[misc]
    """Records what a script gives to `accelerator.log(values, step=...)`."""

    name = "launcher"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self._step = 0

    @property
    def tracker(self) -> None:
        """There is nothing behind it."""
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing: the job of the run says what it was told."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Record one line. Without `step`, the calls are counted, in each attempt from 1."""
        self._step = self._step + 1 if step is None else step
        if numbers := numbers_of(values):
            record(self._step, numbers)
