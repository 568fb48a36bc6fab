"""The forward and backward passes of this rank's stages, and what it exchanges with its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from launcher.train.activations.in_place import changeable
from launcher.train.forward import check_loss, computing
from launcher.train.pipeline.channel import Channel, Channels, open_channels, why_not_sent
from launcher.train.pipeline.cut import Batch, Chunk
from launcher.train.pipeline.deferred_weight_gradients import LaterWeights
from launcher.train.pipeline_parts import chunks_of
from launcher.train.rank import Rank
from launcher.train.sharding.sharding import accumulate, reduces_gradients, reshard_units
from launcher.train.task import Task, TaskError
from launcher.train.tensor_parallel import placed_like

SumAndWeight = tuple[torch.Tensor, torch.Tensor | float]


class Held(NamedTuple):
    """What a stage keeps of a micro-batch until its backward pass."""

    received: torch.Tensor | None
    "The output of the previous stage; None in the first stage."
    output: torch.Tensor
    "The input of the next stage; in the last stage, the sum of the losses."


class Links(NamedTuple):
    """The channels of one stage; None where there is no neighbour."""

    activations_from: Channel | None
    activations_to: Channel | None
    gradients_from: Channel | None
    gradients_to: Channel | None


class Stages:
    """The stages that launcher.train.pipeline.cut has left to this rank."""

    def __init__(self, model: nn.Module, task: Task, rank: Rank, mesh: DeviceMesh | None) -> None:
        """`mesh`: the tensor-parallel ranks. Connects the ranks: every rank must call this."""
        self.rank, self.at = rank, rank.coordinates.pipeline
        self._channels = open_channels(rank, mesh)
        name, chunks = f"pipeline() of {type(task).__name__}", chunks_of(model)
        self.own = [
            Stage(chunk, links_of(number, len(chunks), rank, self._channels), name, rank)
            for number, chunk in enumerate(chunks)
        ]
        "The stages of this rank, in order."

    def settle(self) -> None:
        """Wait until the neighbours have received everything, at the end of a step."""
        self._channels.settle()

    def first_problem(self, problem: str | None) -> str | None:
        """Return the problem of the first stage that has one, on every rank of the pipeline."""
        if not self.add_up(problem is not None):
            return None
        problems: list[str | None] = self.rank.all_values(problem, self._channels.group)
        return next(filter(None, problems))

    def add_up(self, value: float) -> float:
        """Return the sum of `value` over the ranks of the pipeline."""
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self._channels.group)
        return float(total)


def links_of(number: int, chunks: int, rank: Rank, channels: Channels) -> Links:
    """Return the channels of the rank's stage `number` of `chunks`. The last rank sends to the next stage of
    the first one."""
    at, last = rank.coordinates.pipeline, rank.mesh.pipeline - 1
    down, up, around, back = channels[1:]
    before = (down, up) if at > 0 else (around, back) if number > 0 else (None, None)
    after = (down, up) if at < last else (around, back) if number < chunks - 1 else (None, None)
    return Links(before[0], after[0], after[1], before[1])


class Stage:
    """Runs one stage of the model."""

    def __init__(self, chunk: Chunk, links: Links, name: str, rank: Rank) -> None:
        self._chunk, self._links, self._name, self._rank = chunk, links, name, rank
        self._held: list[Held] = []
        "Micro-batches without their backward pass, which comes in the same order."
        self._later = LaterWeights(chunk, name) if rank.recipe.schedule == "zero-bubble" else None

    def forward(self, batch: Any) -> SumAndWeight | None:
        """Run the forward pass of a micro-batch. Return sum and weight in the last stage of the model, None
        in others.

        Every rank must call this in the order of the schedule. A backward pass must follow, except under
        torch.no_grad().
        """
        links, trains, received = self._links, torch.is_grad_enabled(), None
        if links.activations_from is not None:
            received = links.activations_from.receive_with_shape().requires_grad_(trains)
        with computing(self._name, self._rank):
            result = self._chunk(batch if received is None else changeable(received), Batch(batch))
        if links.activations_to is None:
            check_loss(f"end of {self._name}", result)
            output, weight = result
        else:
            if (problem := why_not_sent(result)) is not None:
                raise TaskError(f"{self._name}: middle returned {problem}")
            output = result
            links.activations_to.send_with_shape(output)
        if trains:
            self._held.append(Held(received, output))
        else:
            reshard_units(self._chunk)
        return (output.detach(), weight) if links.activations_to is None else None

    def backward(self, scaled: Callable[[torch.Tensor], torch.Tensor], *, last: bool) -> None:
        """Run the backward pass of the oldest micro-batch without one; `last`: it is the step's last one.

        `scaled` is applied to the sum of the losses.
        """
        links, (received, output) = self._links, self._held.pop(0)
        postponed = self._later.postponing() if self._later is not None else nullcontext()
        with accumulate(self._chunk, self._rank.recipe, last=last), postponed:
            if links.gradients_from is None:
                scaled(output).backward()  # type: ignore[no-untyped-call]
            else:
                gradient = links.gradients_from.receive_like(output)
                if output.requires_grad:
                    torch.autograd.backward(output, gradient)
        if received is not None:
            assert links.gradients_to is not None
            if received.grad is None:
                raise TaskError(
                    f"{self._name}: the loss does not depend on the output of the previous stage, "
                    "whose parameters would have no gradient: a block cuts the graph, such as with detach(). "
                    "Use pipeline: 1"
                )
            links.gradients_to.send(placed_like(received, received.grad))

    def weights(self, *, last: bool) -> None:
        """Compute the weight gradients that the oldest backward pass has postponed; `last`: they are the
        step's last ones."""
        assert self._later is not None
        self._later.compute(reduce=reduces_gradients(self._rank.recipe, last=last))
