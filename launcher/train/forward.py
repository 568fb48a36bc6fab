"""The forward pass of a task: its loss in the recipe's precision, checked before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.spec.recipe import SHARDED
from launcher.train.ddp import forwards
from launcher.train.dtensor_pitfalls import check_whole, refused_pitfalls
from launcher.train.mesh import SHARD
from launcher.train.precision import compute_in
from launcher.train.rank import Rank
from launcher.train.sharding.sharding import in_forward, reshard_units
from launcher.train.task import LossError, Task, TaskError


def loss_of(
    task: Task, model: nn.Module, batch: Any, rank: Rank
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return (sum, weight) of one micro-batch. Raises TaskError if the task returns anything else."""
    name = f"loss() of {type(task).__name__}"
    before, recorded = forwards(model), torch.is_grad_enabled()
    with computing(name, rank), in_forward(model):
        result = task.loss(model, batch)
    if recorded:
        check_gradients_on(name)
    check_loss(name, result)
    if not torch.is_grad_enabled():
        reshard_units(model)
    elif before is not None and forwards(model) == before:
        raise TaskError(
            f"{name} did not call model(...): DDP reduces the gradients of that call alone, so each rank "
            "would train a model of its own. Let the model's forward call its other methods"
        )
    return result


def check_gradients_on(name: str) -> None:
    """Raise TaskError if the code called `name` has switched gradients off."""
    if not torch.is_grad_enabled():
        raise TaskError(
            f"{name} has switched gradients off, so nothing can be trained: instead of "
            "torch.set_grad_enabled(False), use `with torch.no_grad():` around the code that needs none"
        )


@contextmanager
def computing(name: str, rank: Rank) -> Iterator[None]:
    """Run a forward pass of the task's function `name` in the recipe's precision. Raises TaskError for a
    weight that is used where FSDP has not gathered it, or in a way that torch gets wrong for a part of it."""
    try:
        with compute_in(rank.recipe, rank.device), refused_pitfalls():
            yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        if rank.recipe.tensor > 1 and rank.recipe.sharding not in SHARDED:
            raise TaskError(
                f"{name}, or the model, uses a weight outside of its module's forward, and with tensor: "
                f"{rank.recipe.tensor} each rank has a part of it: call the module, compute with "
                "whole(weight) of launcher.train.tensor_parallel, or use tensor: 1"
            ) from error
        raise TaskError(
            f"{name}, or the model, uses a weight outside of its module's forward, where FSDP has not "
            "gathered it: call the module. A weight outside of all blocks can be used anywhere in the "
            "model's forward if outer_units() of the task does not return its module"
        ) from error


def check_loss(name: str, result: Any) -> None:
    """Raise LossError if the task's function `name` did not return (sum, weight), and TaskError if the recipe
    cannot use what it returned."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor)):
        raise LossError(f"{name} must return (sum, weight), where sum is a tensor")
    if result[0].ndim:
        raise LossError(
            f"{name} returned a sum of shape {tuple(result[0].shape)}; it must be a scalar: call .sum()"
        )
    weight = result[1]
    if not (isinstance(weight, Real) or (isinstance(weight, torch.Tensor) and weight.numel() == 1)):
        raise LossError(
            f"{name} returned the weight {weight!r:.80}; it must be a number or a tensor of one element: the "
            "sum over its batch"
        )
    if isinstance(result[0], DTensor) and SHARD in (result[0].device_mesh.mesh_dim_names or ()):
        raise TaskError(
            f"{name} returned a sum that contains parameters which FSDP has divided, such as a penalty over "
            "model.parameters(). Compute it in the forward of the modules that have the parameters, use "
            "train.weight_decay, or sharding: ddp"
        )
    for value, what, inputs in ((result[0], "a sum", "the loss"), (weight, "a weight", "its sum")):
        if isinstance(value, torch.Tensor):
            check_whole(value, f"{name} returned {what}")
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            raise TaskError(
                f"{name} returned {what} in {value.dtype}, which keeps two or three digits: call .float() on "
                f"the inputs of {inputs}"
            )
    if torch.is_grad_enabled() and not result[0].requires_grad:
        raise TaskError(
            f"{name} returned a sum that does not depend on the parameters (it has no grad_fn): every rank "
            "takes part in each backward pass; for a batch without a target return model(x).sum() * 0, 0"
        )
