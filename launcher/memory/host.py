"""Host memory of a node: the tensors and the processes of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import FP32, Ranks, ranks_on_node, shard_of, states_of, updated_by
from launcher.spec.cluster import Gpu
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Recipe

PROCESS = 2 * GIB
"""Bytes of a rank without its model: Python, torch, the libraries of CUDA and NCCL, and the host part of the
CUDA context. On the CPU it is 0.3 GiB (import torch: 218 MiB); not measured with a GPU yet."""
WORKER = GIB // 4
"Bytes of a forked DataLoader process that it does not share with its rank, without its samples."
STAGED = GIB
"""Bytes of gradients per rank that wait in pinned memory to be added up, in
launcher.train.optimizers.host_gradients."""


class Surroundings(NamedTuple):
    """The inputs of an estimate other than model, recipe and ranks."""

    gpu: Gpu | None = None
    workers: int = 0
    "DataLoader processes per rank."
    on_meta: bool = True
    "The task builds its model without weights."
    copies: bool = True
    "Checkpoints are written from a copy on the host."


def host_of(model: ModelShapes, recipe: Recipe, ranks: Ranks, surroundings: Surroundings) -> dict[str, int]:
    """Return the bytes on the node that holds the most, by category.

    The result is for the worse of two moments: while every rank builds its model, or in training.
    """
    processes = {"processes": ranks.per_node * (PROCESS + surroundings.workers * WORKER)}
    training = {**_training(model, recipe, ranks, copies=surroundings.copies), **processes}
    building = {**processes}
    if not surroundings.on_meta:
        building["whole model, in each rank at its start"] = ranks.per_node * model.numel * FP32
    worse = max(building, training, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in worse.items() if size}


def _training(model: ModelShapes, recipe: Recipe, ranks: Ranks, *, copies: bool) -> dict[str, int]:
    held = ranks_on_node(model, recipe, ranks)
    states = [(states_of(model, recipe, ranks, rank), number) for rank, number in held]
    parts = {
        "parameters": sum(number * each.host.parameters for each, number in states),
        "buffers": sum(number * each.host.buffers for each, number in states),
        "gradients": sum(number * each.host.gradients for each, number in states),
        "optimizer states": sum(number * each.host.optimizer for each, number in states),
        "parameters again, for the optimizer": sum(number * each.host.copies for each, number in states),
    }
    if ranks.on_gpu:
        parts["pinned memory, rounded up"] = sum(
            number * count * ((1 << (size - 1).bit_length()) - size)
            for rank, number in held
            for size, count in _pinned(model, recipe, ranks, rank)
            if size
        )
    if recipe.gradients_leave and ranks.on_gpu:
        parts["gradients on their way from the GPU"] = sum(
            number * _staged(model, recipe, ranks, rank) for rank, number in held
        )
    if copies:
        parts["copy for the checkpoint"] = sum(
            number * (each.gpu.parameters + each.gpu.optimizer + each.host.parameters + each.host.optimizer)
            for each, number in states
        )
    return parts


def _pinned(model: ModelShapes, recipe: Recipe, ranks: Ranks, rank: int) -> Iterator[tuple[int, int]]:
    """Yield (bytes, number) of a rank's pinned allocations that stay.

    With `offload: cpu` they are each parameter's shard and each gradient, and for an optimizer on the host
    its copies of the parameters. torch allocates pinned memory in powers of two. Source:
    ATen/core/CachingHostAllocator.h.
    """
    shards = ranks.shards(recipe)
    for p, count in model.distinct:
        if recipe.offload == "cpu":
            padded = shard_of(p, shards, rank // recipe.tensor % shards).padded
            yield padded * p.itemsize, count * (2 if p.updated else 1)
        elif recipe.offload != "none" and p.requires_grad:
            yield updated_by(p, recipe, ranks, rank // recipe.tensor).numel * p.itemsize, count


def _staged(model: ModelShapes, recipe: Recipe, ranks: Ranks, rank: int) -> int:
    """Return the bytes of pinned memory in which gradients of one rank wait, if rounding doubles each.

    launcher.train.optimizers.host_gradients bounds the gradients that wait by STAGED, or to one larger
    gradient.
    """
    sizes = [
        (updated_by(p, recipe, ranks, rank // recipe.tensor).numel * p.itemsize, count)
        for p, count in model.distinct
        if p.updated
    ]
    largest = max((size for size, _ in sizes), default=0)
    return 2 * min(sum(size * count for size, count in sizes), max(STAGED, largest))
