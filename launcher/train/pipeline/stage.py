"""The forward and backward passes of this rank's stage, and what it exchanges with its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from launcher.train.model import check_loss, computing
from launcher.train.pipeline.channel import open_channels, why_not_sent
from launcher.train.pipeline.cut import Batch
from launcher.train.rank import Rank
from launcher.train.sharding import accumulate, reshard_units
from launcher.train.task import Task, TaskError
from launcher.train.tensor_parallel import mesh_of, placed_like

SumAndWeight = tuple[torch.Tensor, torch.Tensor | float]


class Held(NamedTuple):
    """What a stage keeps of a micro-batch until its backward pass."""

    received: torch.Tensor | None
    "The output of the stage before; None in the first stage."
    output: torch.Tensor
    "What the next stage gets; the sum of the losses in the last stage."


class Stage:
    """Runs a model that launcher.train.pipeline.cut has cut."""

    def __init__(self, model: nn.Module, task: Task, rank: Rank) -> None:
        """Connects the stages: every rank must call this."""
        self.model, self.rank = model, rank
        self.number = rank.coordinates.pipeline
        self.first, self.last = self.number == 0, self.number == rank.mesh.pipeline - 1
        self._group, self._down, self._up = open_channels(rank, mesh_of(model))
        self._name = f"pipeline() of {type(task).__name__}"
        self._held: list[Held] = []
        "Micro-batches without their backward pass, which comes in the same order."

    def forward(self, batch: Any) -> SumAndWeight | None:
        """Run the forward pass of a micro-batch. Return sum and weight in the last stage, None in others.

        Every stage must call this with the same micro-batches. A backward pass must follow, except under
        torch.no_grad().
        """
        trains = torch.is_grad_enabled()
        received = None if self.first else self._down.receive_with_shape().requires_grad_(trains)
        with computing(self._name, self.rank):
            result = self.model(batch if received is None else received, Batch(batch))
        if self.last:
            check_loss(f"end of {self._name}", result)
            output, weight = result
        else:
            if (problem := why_not_sent(result)) is not None:
                raise TaskError(f"{self._name}: middle returned {problem}")
            output = result
            self._down.send_with_shape(output)
        if trains:
            self._held.append(Held(received, output))
        else:
            self._down.settle()
            reshard_units(self.model, self.rank.recipe)
        return (output.detach(), weight) if self.last else None

    def backward(self, scaled: Callable[[torch.Tensor], torch.Tensor], *, last: bool) -> None:
        """Run the backward pass of the oldest micro-batch without one; `last`: it is the step's last one.

        `scaled` is applied to the sum of the losses.
        """
        received, output = self._held.pop(0)
        with accumulate(self.model, self.rank.recipe, last=last):
            if isinstance(self.model, FSDPModule):
                # FSDP otherwise forgets what it has noted about forward passes of later micro-batches.
                self.model.set_is_last_backward(last)
            if self.last:
                scaled(output).backward()  # type: ignore[no-untyped-call]
            else:
                gradient = self._up.receive_like(output)
                if output.requires_grad:
                    torch.autograd.backward(output, gradient)
        if received is not None:
            assert received.grad is not None
            self._up.send(placed_like(received, received.grad))

    def settle(self) -> None:
        """Wait until the neighbours have received everything, at the end of a step."""
        self._down.settle()
        self._up.settle()

    def add_up(self, value: float) -> float:
        """Return the sum of `value` over the stages."""
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return float(total)
