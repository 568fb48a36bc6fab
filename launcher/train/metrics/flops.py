"""Model FLOPs of a step, and the model FLOPs utilisation (MFU): their share of the GPUs' peak."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from launcher.planning.hardware import peak_flops
from launcher.spec.errors import first_line
from launcher.spec.mesh import model_parallel
from launcher.train.on_meta import model_on_meta
from launcher.train.rank import Rank
from launcher.train.task import Task
from launcher.train.tracing.kernels import FakeKernels
from launcher.train.undo.undo import Undo

FORWARD_AND_BACKWARD = 3
"The backward pass has two matrix products for each of the forward pass (PaLM, arXiv 2204.02311, app. B)."
WITH_FROZEN_WEIGHTS = 2
"Under an adapter the backward pass has one: frozen weights get no gradient. The adapter is not counted."


def count_flops(task: Task, batch: Any) -> int:
    """Return the FLOPs of forward and backward of one micro-batch, without recomputation.

    A second model is built on the meta device and run with the shapes of `batch`: this computes nothing,
    allocates nothing and leaves the random state and the task as they were. Matrix products, convolutions and
    attention are counted; causal attention counts in full. A transformer has 6 FLOPs per weight and token
    plus 12 x layers x dim x length per token. Code that needs values of tensors raises.
    """
    undo = Undo(nn.Module(), torch.device("cpu"), task)  # for what the task changes in model() and loss()
    counter, kernels = FlopCounterMode(display=False), FakeKernels()  # type: ignore[no-untyped-call]
    try:
        model = model_on_meta(task)
        with torch.compiler.set_stance("force_eager"), kernels, counter:
            task.loss(model, to_meta(batch))
    finally:
        undo.restore()
    passes = FORWARD_AND_BACKWARD if task.adapter is None else WITH_FROZEN_WEIGHTS
    return passes * int(counter.get_total_flops())


def to_meta(batch: Any) -> Any:
    """Return the batch with every tensor in nested lists, tuples and dicts on the meta device."""
    return tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), batch)


class Mfu:
    """Computes the MFU: model FLOPs of a step / (seconds x ranks x peak FLOP/s of a GPU).

    All micro-batches of a step are assumed to have the shape of the first one.
    """

    def __init__(self, rank: Rank, task: Task, peak: float) -> None:
        self.rank, self.task, self.peak = rank, task, peak
        self._shapes: Any = None
        self._micro_batches = 0
        self._flops: float | None = None
        "FLOPs of a step on one rank; 0 if they cannot be counted."

    def see(self, batch: Any, micro_batches: int) -> None:
        """Store the shapes of the first of `micro_batches` micro-batches; FLOPs are counted later, outside
        the step."""
        if self._shapes is None:
            self._shapes, self._micro_batches = to_meta(batch), micro_batches

    def of(self, seconds: float) -> float | None:
        """Return the MFU of a step that took `seconds`, or None if it cannot be computed."""
        if self._flops is None and self._shapes is not None:
            self._flops = self._count()
        return self._flops / (seconds * self.peak) if self._flops else None

    def _count(self) -> float:
        try:  # the ranks that share a copy of the model share the work on its micro-batches
            return (
                self._micro_batches * count_flops(self.task, self._shapes) / model_parallel(self.rank.recipe)
            )
        except Exception as error:  # the user's model may not support the meta device
            self.rank.say(
                f"no MFU: the model's FLOPs cannot be counted on the meta device ({first_line(error)})"
            )
            return 0


def open_mfu(rank: Rank, task: Task) -> Mfu | None:
    """Return the MFU counter of rank 0; None on other ranks, on a CPU or an unknown GPU, and with fp32.

    float8 is compared with the 16-bit peak, as in published figures.
    """
    if not rank.first or rank.device.type != "cuda" or rank.recipe.precision == "fp32":
        return None
    peak = peak_flops(torch.cuda.get_device_name(rank.device))
    return None if peak is None else Mfu(rank, task, peak)
