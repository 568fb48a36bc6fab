"""Decide which steps may change the model. Every rank passes sums over all ranks, so all ranks agree."""

from __future__ import annotations

import math

from launcher.train.scaler import LossScaler
from launcher.train.task import TaskError

MOST_IN_A_ROW = 10
"Non-finite steps in a row that end the run. One bad batch is skipped; a diverged model does not recover."
NO_WEIGHT = "its weight is 0, so there is no gradient"


class Guard:
    """Skips steps that would put NaN into the weights and into every later checkpoint."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self._in_a_row = 0
        self._accepted = False
        self._refused = ""
        "Why the latest skipped step was skipped."

    def refuses(self, loss: float, weight: float, grad_norm: float) -> str | None:
        """Return the reason to skip the step, or None. `loss` and `weight` are sums over the step.

        Raises FloatingPointError if training has diverged, TaskError for a negative weight.
        """
        reason = self._refuses(loss, weight, grad_norm)
        if reason is None:
            self._accepted = True
        else:
            self._refused = reason
        return reason

    def check_trained(self) -> None:
        """Raise an error if every step was skipped, because the model would be saved as it began.

        It is a TaskError if the last one had no gradient, else a FloatingPointError.
        """
        if self._refused and not self._accepted:
            why = f"no step changed the model. The last one was left out: {self._refused}"
            raise TaskError(why) if self._refused == NO_WEIGHT else FloatingPointError(why)

    def _refuses(self, loss: float, weight: float, grad_norm: float) -> str | None:
        if weight < 0:
            raise TaskError(f"the weights that loss() returned add up to {weight:g}; they must be 0 or more")
        if weight == 0:
            return NO_WEIGHT
        if not self.scaler.accepts(grad_norm):
            return f"a gradient overflowed in fp16, the loss scale is now {self.scaler.factor:g}"
        if math.isfinite(loss) and math.isfinite(grad_norm) and math.isfinite(weight):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        if self._in_a_row == MOST_IN_A_ROW:
            raise FloatingPointError(
                f"loss or gradient was not finite in {MOST_IN_A_ROW} steps in a row: training has diverged, "
                "or the data are broken. The model is as before the first of these steps; check the learning "
                "rate, the warm-up, and the samples of these steps"
            )
        if not math.isfinite(weight):
            return f"not finite: the weight of the loss, {weight:g}"
        return f"not finite: loss {loss / weight:g}, gradient norm {grad_norm:g}"
