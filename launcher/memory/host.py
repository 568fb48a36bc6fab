"""Host memory of a node: the tensors and the processes of its ranks."""

from __future__ import annotations

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import FP32, Ranks, shard_of, states_of
from launcher.spec.base import GIB
from launcher.spec.recipe import Recipe

PROCESS = 2 * GIB
"""Bytes of a rank without its model: Python, torch, the libraries of CUDA and NCCL, and the host part of the
CUDA context. On the CPU it is 0.3 GiB (import torch: 218 MiB); not measured with a GPU yet."""
WORKER = GIB // 4
"Bytes of a forked DataLoader process that it does not share with its rank, without its samples."


def host_of(
    model: ModelShapes, recipe: Recipe, ranks: Ranks, *, workers: int, on_meta: bool, copies: bool
) -> dict[str, int]:
    """Return the bytes on the node that holds the most, by category.

    The result is for the worse of two moments: while every rank builds its model, or in training. `on_meta`:
    the task builds the model without weights. `copies`: checkpoints are written from a copy on the host.
    """
    processes = {"processes": ranks.per_node * (PROCESS + workers * WORKER)}
    training = {**_training(model, recipe, ranks, copies=copies), **processes}
    building = {**processes}
    if not on_meta:
        building["whole model, in each rank at its start"] = ranks.per_node * model.numel * FP32
    worse = max(building, training, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in worse.items() if size}


def _training(model: ModelShapes, recipe: Recipe, ranks: Ranks, *, copies: bool) -> dict[str, int]:
    held = [states_of(model, recipe, ranks, rank) for rank in range(ranks.per_node)]
    parts = {
        "parameters": sum(one.host.parameters for one in held),
        "buffers": sum(one.host.buffers for one in held),
        "gradients": sum(one.host.gradients for one in held),
        "optimizer states": sum(one.host.optimizer for one in held),
        "parameters again, for the optimizer": sum(one.host.copies for one in held),
    }
    if recipe.offload == "cpu" and ranks.on_gpu:
        parts["pinned memory, rounded up"] = _rounded_up(model, recipe, ranks)
    if copies:
        parts["copy for the checkpoint"] = sum(
            one.gpu.parameters + one.gpu.optimizer + one.host.parameters + one.host.optimizer for one in held
        )
    return parts


def _rounded_up(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> int:
    """Return the bytes lost because torch allocates pinned memory in powers of two.

    Each parameter's shard and each gradient has its own allocation. Source: ATen/core/CachingHostAllocator.h.
    """
    shards = ranks.shards(recipe)
    more = 0
    for rank in range(ranks.per_node):
        for p, count in model.distinct:
            size = shard_of(p, shards, rank % shards).padded * p.itemsize
            if size:
                over = (1 << (size - 1).bit_length()) - size
                more += count * over * (2 if p.requires_grad else 1)
    return more
