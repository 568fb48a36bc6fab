"""The recorder that the loop calls after each step: metrics, memory, snapshots, trackers, progress lines."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from launcher.rundir.files import append_json
from launcher.rundir.progress import progress_text
from launcher.rundir.time import now
from launcher.spec.events import Event
from launcher.spec.recipe import Recipe
from launcher.train.cpu_memory_budget import Budget
from launcher.train.metrics.flops import open_mfu
from launcher.train.metrics.memory import Reading, open_meter
from launcher.train.metrics.memory_log import MemoryLog
from launcher.train.metrics.notes import Notes
from launcher.train.metrics.peak_parts import PeakParts
from launcher.train.metrics.snapshot import Snapshots
from launcher.train.metrics.trackers import Trackers
from launcher.train.rank import Rank
from launcher.train.task import Task, check_metrics
from launcher.train.task_metrics import MEMORY

SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step over all ranks."""

    loss: float
    "Mean loss per unit of weight."
    weight: float
    grad_norm: float
    "Gradient norm before clipping."
    lr: float
    stop: bool
    "True if a stop was requested."
    lost: float = 0.0
    "Seconds spent on discarded passes of this step and between them."
    logged: Mapping[str, float] = field(default_factory=dict)
    "The task's own metrics."


class Recorder:
    """Records memory on every rank and everything else on rank 0. A full disk does not stop training."""

    def __init__(
        self,
        rank: Rank,
        steps: int,
        task: Task,
        budget: Budget,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Raises TaskError for a metric of the task with a name that launcher uses."""
        check_metrics(task)
        self.rank, self.steps, self.task = rank, steps, task
        self.notes = Notes(rank)
        meter = open_meter(rank.device, budget)
        self.parts = PeakParts(model, optimizer, meter)
        self.memory = MemoryLog(rank, meter, self.parts, self.notes)
        self.snapshots = Snapshots(rank, budget, self.notes)
        self.mfu = open_mfu(rank, task)
        self.trackers = Trackers(rank)
        self._last_line = float("-inf")

    def event(self, event: Event) -> None:
        """Write an event on rank 0; do nothing on other ranks."""
        if self.rank.first:
            self.notes.event(event)

    def micro_batch(self, batch: Any, micro_batches: int) -> None:
        """Record one of the `micro_batches` of a step, on the device, before its forward pass."""
        if self.mfu is not None:
            self.mfu.see(batch, micro_batches)

    def before_update(self, gradients: Iterable[torch.Tensor], recipe: Recipe) -> None:
        """Record the end of a step's last backward pass."""
        self.parts.before_update(gradients, recipe)

    def step(self, step: int, result: StepResult, seconds: float, evaluated: Mapping[str, float]) -> None:
        """Record a step. `seconds` excludes evaluation and lost time."""
        reading = self.memory.step(step, evaluated=bool(evaluated))
        self.snapshots.after_step(step)
        if not self.rank.first:
            return
        line = self._line(step, result, seconds, evaluated, reading)
        try:
            append_json(self.rank.run.metrics, line)
        except OSError as error:
            self.notes.complain(error)
        self.trackers.write(line)
        due = time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES
        if due or evaluated or step == self.steps:
            self._last_line = time.monotonic()
            self.rank.say(f"step {step}/{self.steps}  {progress_text(line)}")

    def _line(
        self, step: int, result: StepResult, seconds: float, evaluated: Mapping[str, float], reading: Reading
    ) -> dict[str, Any]:
        samples = self.rank.job.batch.global_
        line: dict[str, Any] = {
            "time": now(),
            "attempt": self.rank.attempt.number,
            "step": step,
            "loss": _finite(result.loss),
            "lr": result.lr,
            "grad_norm": _finite(result.grad_norm),
            "weight": result.weight,
            "samples": samples,
            "seconds": round(seconds, 6),
            "samples_per_second": round(samples / seconds, 3),
        }
        if result.lost >= 1e-3:
            line["seconds_lost"] = round(result.lost, 6)
        if self.task.counts == "tokens":
            line["tokens_per_second"] = round(result.weight / seconds, 3)
        if self.mfu is not None and (share := self.mfu.of(seconds)) is not None:
            line["mfu"] = round(share, 5)
        # Memory of rank 0 only; a maximum over the ranks would need a collective in every step. The files of
        # the other ranks have theirs.
        line.update({f"{MEMORY}{name}": value for name, value in reading.known().items()})
        line |= {name: _finite(value) for name, value in {**result.logged, **evaluated}.items()}
        return line

    def close(self, failed: bool = False) -> None:
        """Write the pending lines, and close the trackers."""
        self.memory.write()
        self.trackers.close(failed)


def _finite(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON cannot represent."""
    return value if math.isfinite(value) else None
