"""Model FLOPs of a step, and the share of the GPUs' peak that they make (MFU)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from launcher.planning.hardware import peak_flops
from launcher.train.rank import Rank
from launcher.train.rng import rng_state, set_rng_state
from launcher.train.task import Task

FORWARD_AND_BACKWARD = 3
"The backward pass has two matrix products for each of the forward pass (PaLM, arXiv 2204.02311, app. B)."


def count_flops(task: Task, batch: Any) -> int:
    """Forward and backward pass of one micro-batch, recomputation left out.

    A second model is built on the meta device and fed the shapes of `batch`: nothing is computed, no memory
    is taken, random states stay. Matrix products, convolutions and attention count, the last one in full
    where it is causal: 6 FLOPs per weight and token plus 12 x layers x dim x length per token in a
    transformer. Raises whatever code raises that looks at values.
    """
    task = copy.copy(task)  # what it counts for itself is not ours to change
    before = rng_state(torch.device("cpu"))
    try:
        with torch.device("meta"):
            model = task.model()
        with FlopCounterMode(display=False) as counter:
            task.loss(model, to_meta(batch))
    finally:
        set_rng_state(before, torch.device("cpu"))
    return FORWARD_AND_BACKWARD * int(counter.get_total_flops())


def to_meta(batch: Any) -> Any:
    """The shapes and types of every tensor in nested lists, tuples and dicts."""
    return tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), batch)


class Mfu:
    """Model FLOPs of the step / (its seconds x ranks x peak FLOP/s of a GPU).

    A step counts as that many micro-batches of the first one's shape.
    """

    def __init__(self, rank: Rank, task: Task, peak: float) -> None:
        self.rank, self.task, self.peak = rank, task, peak
        self._shapes: Any = None
        self._of = 0
        self._flops: int | None = None
        "Of one rank's step; 0 when they cannot be counted."

    def see(self, batch: Any, of: int) -> None:
        """Remember the shapes of the first micro-batch, of so many in a step; count later, outside of the
        step's time."""
        if self._shapes is None:
            self._shapes, self._of = to_meta(batch), of

    def of(self, seconds: float) -> float | None:
        if self._flops is None and self._shapes is not None:
            self._flops = self._count()
        return self._flops / (seconds * self.peak) if self._flops else None

    def _count(self) -> int:
        try:
            return self._of * count_flops(self.task, self._shapes)
        except Exception as error:  # the user's model, on a device its author may never have tried
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self.rank.say(f"no MFU: the model's FLOPs cannot be counted on the meta device ({reason})")
            return 0


def open_mfu(rank: Rank, task: Task) -> Mfu | None:
    """None where nobody asks, the GPU is not known, or the recipe's products are not 16-bit ones.

    float8 is held against the 16-bit peak, as everybody does who publishes such figures.
    """
    if not rank.first or rank.device.type != "cuda" or rank.recipe.precision == "fp32":
        return None
    peak = peak_flops(torch.cuda.get_device_name(rank.device))
    return None if peak is None else Mfu(rank, task, peak)
