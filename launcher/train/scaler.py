"""Loss scaling for fp16, whose gradients below 6e-8 become zero and above 65504 infinite.

torch.amp.GradScaler looks for overflow in each rank's own gradients. Here the norm that clipping needs anyway
is over all shards of all ranks: every rank leaves out the same steps, under any sharding, at no cost.
"""

from __future__ import annotations

import math
from typing import Any

import torch

# The loss is a sum: no token's gradient is divided by the number of tokens. 16 does for it what
# GradScaler's 65536 does for a mean over 4096 tokens. The factors are GradScaler's own.
START = 16.0
GROWTH, BACKOFF, GROWS_AFTER = 2.0, 0.5, 2000
LEAST = 2.0**-24


class LossScaler:
    """`factor` multiplies the loss before the backward pass and is divided out of the gradients after it."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = START if enabled else 1.0
        self.good_steps = 0
        "In a row, with this factor."

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.factor if self.enabled else loss

    def accepts(self, grad_norm: float) -> bool:
        """Whether a step with this norm may change the model; the factor follows. Every rank must ask
        with the norm over all ranks. Raises FloatingPointError when no factor helps."""
        if not self.enabled:
            return True
        if not math.isfinite(grad_norm):
            self.factor *= BACKOFF
            self.good_steps = 0
            if self.factor < LEAST:
                raise FloatingPointError(
                    f"the gradients overflow in fp16 with a loss scale of {self.factor:.0e}: the training "
                    "has diverged, or the model needs the range of bf16-mixed"
                )
            return False
        self.good_steps += 1
        if self.good_steps == GROWS_AFTER:
            self.factor *= GROWTH
            self.good_steps = 0
        return True

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint, as JSON."""
        return {"factor": self.factor, "good_steps": self.good_steps} if self.enabled else None

    def restore(self, state: dict[str, Any] | None) -> None:
        """None: of a checkpoint written in another precision. The factor starts anew."""
        if self.enabled and state is not None:
            self.factor, self.good_steps = float(state["factor"]), int(state["good_steps"])
