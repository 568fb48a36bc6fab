"""What the peak of a step consists of: the rank's own tensors by category, and the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.cpu_memory_budget import plain_tensors
from launcher.train.metrics.memory import Meter, Reading
from launcher.train.optimizers.proxy_optimizer import ProxyOptimizer

GRADIENTS, REST = "gradients", "activations and other"
WITH_GRADIENTS = f"{GRADIENTS}, {REST}"
"One category for both, if it is unknown which gradients existed at the peak."


class PeakParts:
    """Measures the second step of each recipe, in which all optimizer states exist.

    It needs one more reading of the counters in that step, no synchronisation, and no hooks. Parameters,
    buffers and optimizer states exist at any moment. All gradients exist if the peak is in the update, if
    they are accumulated over micro-batches, or if they stay between steps as DDP's buckets do. Otherwise they
    and the rest are one category.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, meter: Meter) -> None:
        self._model, self._optimizer, self._meter = model, optimizer, meter
        self._last_recipe: Recipe | None = None
        self._measured: Recipe | None = None
        self._backward: Reading | None = None
        "The reading before the update of a step that is measured."
        self._gradients = 0

    def before_update(self, gradients: Iterable[torch.Tensor], recipe: Recipe) -> None:
        """Call this after the last backward pass of a step."""
        repeated, self._last_recipe = self._last_recipe is recipe, recipe
        self._backward = None
        if self._meter.counts and repeated and self._measured != recipe:
            self._backward = self._meter.read()
            self._gradients = self._bytes(gradients)

    def after_step(self, reading: Reading, *, evaluated: bool) -> tuple[Reading, dict[str, int]]:
        """Return the reading with the peak of the whole step, and its bytes by category.

        There are no categories for a step that is not measured, or that an evaluation followed: its peak may
        be the evaluation's.
        """
        before, self._backward = self._backward, None
        if before is None or before.peak is None or reading.peak is None or reading.allocated is None:
            return reading, {}
        peak = max(before.peak, reading.peak)
        whole = replace(reading, peak=peak)
        if evaluated:
            return whole, {}
        self._measured = self._last_recipe
        parameters = self._bytes(self._model.parameters())
        held = {
            "parameters": parameters,
            "buffers": self._bytes(self._model.buffers()),
            # A proxy may be a view of its parameter.
            "optimizer states": self._bytes([*self._model.parameters(), *self._states()]) - parameters,
        }
        stays = reading.allocated - sum(held.values()) >= self._gradients
        accumulated = self._last_recipe is not None and _accumulates(self._last_recipe)
        if self._gradients and (reading.peak == peak or accumulated or stays):
            held[GRADIENTS] = self._gradients
        rest = REST if GRADIENTS in held else WITH_GRADIENTS
        known = {name: size for name, size in held.items() if size}
        return whole, {**known, rest: max(0, peak - sum(known.values()))}

    def _states(self) -> list[Any]:
        """Return the optimizer's states, and the copies of parameters that it updates instead of them."""
        states = tree_leaves([*self._optimizer.state.values()])
        if isinstance(self._optimizer, ProxyOptimizer):
            states += self._optimizer.proxies.values()
        return states

    @torch.no_grad()
    def _bytes(self, tensors: Iterable[Any]) -> int:
        """Return the bytes that tensors hold on this rank's device, each storage once."""
        sizes: dict[int, int] = {}
        for tensor in tensors:
            for part in plain_tensors(tensor):
                with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse: it has no storage
                    storage = part.untyped_storage()
                    if self._meter.holds(storage):
                        sizes[storage._cdata] = storage.nbytes()
        return sum(sizes.values())


def _accumulates(recipe: Recipe) -> bool:
    """Return whether the sharded gradients exist from the first micro-batch on. With `grad_sync: last`, FSDP
    accumulates whole gradients, and shards them in the last micro-batch."""
    return recipe.grad_accum > 1 and not (recipe.sharding in SHARDED and recipe.grad_sync == "last")
