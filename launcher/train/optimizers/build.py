"""Creation of the recipe's optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from launcher.spec.job import Training
from launcher.spec.optimizer_table import OPTIMIZERS
from launcher.spec.quantities import format_bytes
from launcher.train.cpu_memory_budget import Budget
from launcher.train.local_shards import local
from launcher.train.optimizers.host_gradients import HostGradients
from launcher.train.optimizers.offload import HostOptimizer, Keep, ScratchFiles, in_host_memory
from launcher.train.optimizers.proxy_optimizer import Groups, Make
from launcher.train.optimizers.sharded_states import ShardedStates
from launcher.train.optimizers.state import step_mesh_by_mesh
from launcher.train.rank import Rank, SetupError

NONE_TRAINED = "has no trainable parameter: all of them have requires_grad=False"


def build_optimizer(
    model: nn.Module, rank: Rank, budget: Budget, mesh: DeviceMesh | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of the recipe. `mesh`: the data-parallel ranks, which `zero1` needs.

    Raises: SetupError if a library or the NVMe directory is missing, or if a stage trains no parameter.
    """
    groups = parameter_groups(model, rank.job.train)
    wide = embeddings(model) if rank.recipe.embedding_states == "32-bit" else []
    if not groups:
        raise SetupError(f"stage {rank.coordinates.pipeline} of the pipeline {NONE_TRAINED}")
    if rank.recipe.sharding != "zero1":
        return _placed(groups, wide, rank, budget)
    assert mesh is not None
    return ShardedStates(groups, wide, partial(_placed, rank=rank, budget=budget), mesh)


def _placed(
    groups: Groups, wide: Collection[torch.Tensor], rank: Rank, budget: Budget
) -> torch.optim.Optimizer:
    """Return the optimizer, with its states where `recipe.offload` puts them."""
    recipe, training = rank.recipe, rank.job.train
    make = builder(recipe.optimizer, training.lr)
    if recipe.offload in ("none", "cpu"):
        optimizer = make(groups, wide)
        step_mesh_by_mesh(optimizer)
        if recipe.offload == "cpu":  # the step creates the states
            optimizer.step = partial(_on_host, budget, optimizer.step)  # type: ignore[method-assign]
        return optimizer
    keep: Keep = in_host_memory
    if recipe.offload == "nvme-optimizer":
        keep = ScratchFiles(training.nvme_dir, f"launcher-{rank.run.id}-rank{rank.number:05d}")
    trained = [p for group in groups for p in group["params"]]
    gradients = HostGradients(trained, budget.host_side) if recipe.gradients_leave else None
    on_host = HostOptimizer(groups, wide, make, keep, budget.host_side, gradients)
    rank.say(f"offload: {recipe.offload}: on each rank {_host_cost(on_host, keep)}")
    return on_host


def _on_host(budget: Budget, step: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    with budget.host_side():
        return step(*args, **keywords)


def builder(name: str, lr: float) -> Make:
    """Return a function that creates this optimizer. Its arguments are parameter groups and the parameters
    whose states stay in 32 bit."""
    row = OPTIMIZERS[name]
    module, _, attribute = row.builder.partition(":")
    make = partial(getattr(importlib.import_module(module), attribute), lr=lr, **row.arguments)
    return lambda groups, wide: make(groups, wide=wide) if row.eight_bit else make(groups)


def embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Return the embedding weights. 32-bit states are advised for them (Dettmers et al. 2021, arXiv
    2110.02861, section 2.3): their gradients differ much from token to token, which makes 8-bit states
    unstable."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    weights = [module.weight for module in model.modules() if isinstance(module, tables)]
    return [weight for weight in weights if isinstance(weight, nn.Parameter)]


def parameter_groups(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """Return the parameter groups. Weight decay applies to matrices, not to gains, biases and norms."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _host_cost(optimizer: HostOptimizer, keep: Keep) -> str:
    proxies = sum(local(p).nbytes for group in optimizer.param_groups for p in group["params"])
    states = sum(local(value).nbytes for state in optimizer.state.values() for value in state.values())
    where = keep.folder if isinstance(keep, ScratchFiles) else "host memory"
    of_parameters = f"{format_bytes(proxies)} of parameters"
    if optimizer.gradients is not None:
        of_parameters += f" and {format_bytes(proxies)} of gradients"
    return f"{of_parameters} in host memory and {format_bytes(states)} of states in {where}"
