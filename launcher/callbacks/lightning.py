"""A logger for Lightning: `Trainer(logger=LogLogger())`, alone or in a list with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger

from launcher.callbacks.names import counts_batches, numbers_of
from launcher.rundir.metrics_log import record


class LogLogger(Logger):
    """Records what a LightningModule logs with `self.log`, every `log_every_n_steps`."""

    def __init__(self) -> None:
        super().__init__()
        self._step = 0

    @property
    def name(self) -> str:
        return "launcher"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: the job of the run says what it was told."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record one line. Lightning counts steps from 0."""
        numbers = numbers_of(metrics)
        if step is None or not numbers:
            return
        if not counts_batches(metrics):
            self._step = step + 1
        record(self._step, numbers)
