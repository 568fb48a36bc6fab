"""What rank 0 tells the world: metrics.jsonl, events.jsonl and one line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.runs.files import append_json
from launcher.runs.time import now
from launcher.train.rank import Rank

SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class StepResult:
    """One optimizer step over all ranks."""

    loss: float
    "Mean per unit of weight."
    weight: float
    grad_norm: float
    "Before clipping."
    lr: float
    stop: bool
    "Some rank saw the request to stop."


class Recorder:
    """Silent on every rank but 0. A full disk costs lines, not the training."""

    def __init__(self, rank: Rank, steps: int) -> None:
        self.rank, self.steps = rank, steps
        self._last_line = float("-inf")
        self._warned = False

    def event(self, kind: str, **fields: Any) -> None:
        self._write(lambda: self.rank.run.event(kind, **fields))

    def step(self, step: int, result: StepResult, seconds: float, eval_loss: float | None) -> None:
        """One line of metrics; `seconds` is the optimizer step's own time, without evaluation."""
        samples = self.rank.job.batch.global_
        line: dict[str, Any] = {
            "time": now(),
            "attempt": self.rank.attempt.number,
            "step": step,
            "loss": result.loss,
            "lr": result.lr,
            # Infinite when fp16 overflowed, which JSON cannot say.
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "weight": result.weight,
            "samples": samples,
            "seconds": round(seconds, 6),
        }
        if eval_loss is not None:
            line["eval_loss"] = eval_loss
        self._write(lambda: append_json(self.rank.run.metrics, line))
        due = time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES
        if due or eval_loss is not None or step == self.steps:
            self._last_line = time.monotonic()
            held_out = f"  held-out {eval_loss:.4f}" if eval_loss is not None else ""
            speed = f"{samples / seconds:.1f} samples/s"
            self.rank.say(f"step {step}/{self.steps}  loss {result.loss:.4f}{held_out}  {speed}")

    def _write(self, write: Callable[[], None]) -> None:
        if not self.rank.first:
            return
        try:
            write()
        except OSError as error:
            if not self._warned:
                self._warned = True
                self.rank.say(f"metrics or events could not be written, the training goes on: {error}")
