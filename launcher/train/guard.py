"""Which steps may change the model: every rank asks with sums over all ranks, so all give one answer."""

from __future__ import annotations

import math

from launcher.train.scaler import LossScaler
from launcher.train.task import TaskError

MOST_IN_A_ROW = 10
"Steps with a loss or gradient that is not finite. One bad batch is left out; a diverged model stays so."


class Guard:
    """A step that would put NaN into the weights would put it into every later checkpoint, too."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self._in_a_row = 0

    def refuses(self, loss: float, weight: float, grad_norm: float) -> str | None:
        """Why the step is left out; None when it counts. `loss` and `weight` are sums over the step.

        Raises FloatingPointError when the training has diverged, TaskError for a negative weight.
        """
        if weight < 0:
            raise TaskError(f"the weights that loss() returned add up to {weight:g}; a weight is 0 or more")
        if weight == 0:
            return "its weight is 0, there is nothing to learn"
        if not self.scaler.accepts(grad_norm):
            return f"a gradient overflowed in fp16, loss scale now {self.scaler.factor:g}"
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        if self._in_a_row == MOST_IN_A_ROW:
            raise FloatingPointError(
                f"loss or gradient was not finite in {MOST_IN_A_ROW} steps in a row: the training has "
                "diverged, or its data are broken. The model is as before the first of them; look at the "
                "learning rate, the warm-up, and the samples of these steps"
            )
        return f"loss {loss / weight:g}, norm of the gradient {grad_norm:g}: not finite"
