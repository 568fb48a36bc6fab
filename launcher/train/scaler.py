"""Loss scaling for fp16, in which gradients below 6e-8 become zero and those above 65504 infinite.

torch.amp.GradScaler looks for overflow in each rank's own gradients. Here the gradient norm, which clipping
needs anyway, covers all shards of all ranks: every rank skips the same steps under any sharding, at no cost.
"""

from __future__ import annotations

import math
from typing import Any

import torch

# The loss is a sum, so gradients are not divided by the number of tokens before the update. A scale of 16
# corresponds to GradScaler's 65536 for a mean over 4096 tokens. The factors are those of GradScaler.
START = 16.0
GROWTH, BACKOFF, GROWS_AFTER = 2.0, 0.5, 2000
LEAST = 2.0**-24


class LossScaler:
    """A loss scale: `factor` multiplies the loss before backward; the gradients are divided by it after."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = START if enabled else 1.0
        self.good_steps = 0
        "Consecutive steps without overflow at this factor."

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.factor if self.enabled else loss

    def accepts(self, grad_norm: float) -> bool:
        """Return True if a step with this norm may change the model, and update the factor.

        Every rank must call this with the norm over all ranks. Raises FloatingPointError if gradients
        overflow even with the smallest factor.
        """
        if not self.enabled:
            return True
        if not math.isfinite(grad_norm):
            self.factor *= BACKOFF
            self.good_steps = 0
            if self.factor < LEAST:
                raise FloatingPointError(
                    f"the gradients overflow in fp16 with a loss scale of {self.factor:.0e}: training "
                    "has diverged, or the model needs the range of bf16-mixed"
                )
            return False
        self.good_steps += 1
        if self.good_steps == GROWS_AFTER:
            self.factor *= GROWTH
            self.good_steps = 0
        return True

    def state(self) -> dict[str, Any] | None:
        """Return the state to store in a checkpoint as JSON, or None if scaling is off."""
        return {"factor": self.factor, "good_steps": self.good_steps} if self.enabled else None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Load a state. None, from a checkpoint in another precision, keeps the initial factor."""
        if self.enabled and state is not None:
            self.factor, self.good_steps = float(state["factor"]), int(state["good_steps"])
