"""The valid recipes for a job on a cluster, in the order of what they give up."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.planning.batches import divisors, with_micro_batch
from launcher.spec.mesh import can_wait, data_ranks
from launcher.spec.optimizers import SEARCHED
from launcher.spec.recipe import Recipe
from launcher.spec.rules import Setting, nearest_valid, obeys_rules
from launcher.spec.supported import unsupported

# Field -> values to try, the one that gives up least first. Except for the optimizer, later values usually
# need less memory. A product varies the last field fastest. Not listed: the micro-batch, which is searched
# for each combination; precision and `activations: compress`, which change numbers; compile, which costs
# minutes at each start and fails on some models.
AXES: Mapping[str, tuple[Any, ...]] = {
    "virtual_stages": (4, 2, 1),
    "schedule": ("zero-bubble", "1f1b"),
    "optimizer": SEARCHED,
    "offload": ("none", "cpu-optimizer", "cpu", "nvme-optimizer"),
    "optimizer_step": ("after", "backward"),
    "activations": ("keep", "selective", "every-second", "checkpoint", "offload"),
    "activation_budget": (1.0, 0.7, 0.5, 0.3, 0.1),
    "loss_chunks": (1, 8),
    "sharding": ("none", "ddp", "zero1", "hybrid", "fsdp-keep", "fsdp"),
    "grad_sync": ("each", "last"),
}


@dataclass(frozen=True)
class Space:
    base: Recipe
    "The fields that the job fixes, and the planner's defaults for the rest."
    fixed: frozenset[str]
    "Fields that the job fixes."
    setting: Setting
    chunks: bool = False
    "The task can compute its loss in parts."
    blocks: bool = True
    "The task names blocks, which are the units of recomputation and of activation offload."
    closed: bool = False
    "Only the micro-batch is free: the planner does not know which fields of a recipe a user's command reads."
    stages: int = 0
    "Largest number of stages into which a pipeline can cut the model."

    @functools.cached_property
    def axes(self) -> Mapping[str, tuple[Any, ...]]:
        """The free fields and their values."""
        given = set(self.fixed)
        if not self.chunks:
            given.add("loss_chunks")
        if not self.blocks:
            given.add("activations")
        if self.closed:
            given.update(AXES)
        if {"checkpoint_ratio", "activation_budget"} & given:
            given.add("activations")
        # Each value costs a trace of its own, so the job has to ask for them.
        if not ("activations" in self.fixed and self.base.activations == "budget"):
            given.add("activation_budget")
        if self.base.pipeline == 1 or self.base.schedule != "1f1b" or "stages" in self.fixed:
            given.add("virtual_stages")
        if self.base.pipeline == 1:
            given.add("schedule")
        free = {name: values for name, values in AXES.items() if name not in given}
        pointless: dict[str, set[str]] = {}
        if self.setting.gpus_per_node == 0:  # there is no GPU to offload from
            pointless = {"offload": {*AXES["offload"]} - {"none"}, "activations": {"offload"}}
        if self.setting.clips:  # the norm of the whole gradient is known only after the backward pass
            pointless["optimizer_step"] = {"backward"}
        if data_ranks(self.base, self.setting.ranks) == 1:  # only FSDP can offload parameters
            pointless["sharding"] = {*AXES["sharding"]} - {"none", "fsdp"}
        too_many = (number for number in AXES["virtual_stages"] if number * self.base.pipeline > self.stages)
        pointless["virtual_stages"] = {*too_many} - {1}
        return {
            name: tuple(value for value in values if value not in pointless.get(name, ()))
            for name, values in free.items()
        }

    @functools.cached_property
    def rests(self) -> tuple[Recipe, ...]:
        """Every valid combination of the axes, each with its largest valid micro-batch."""
        made: list[Recipe] = []
        for values in itertools.product(*self.axes.values()):
            largest = self._falling(self.base.model_copy(update=dict(zip(self.axes, values, strict=True))))
            made += itertools.islice(largest, 1)
        return tuple(made)

    def sizes(self, recipe: Recipe) -> list[Recipe]:
        """Return the recipe with each valid micro-batch at the same global batch, the smallest first."""
        return [*self._falling(recipe)][::-1]

    def _falling(self, recipe: Recipe) -> Iterator[Recipe]:
        """Yield the recipe with each valid micro-batch at the same global batch, the largest first."""
        per_rank = recipe.micro_batch_size * recipe.grad_accum
        fixed = self.fixed & {"micro_batch_size", "grad_accum"}
        for micro in (recipe.micro_batch_size,) if fixed else reversed(divisors(per_rank)):
            one = recipe
            if micro != recipe.micro_batch_size:
                one = with_micro_batch(recipe, micro)
            if self.has(one):
                yield one

    def below(self, recipe: Recipe) -> list[Recipe]:
        """Return the valid recipes with a later value of one axis, which may need less memory.

        Other axes change if that value needs it: offload of parameters needs FSDP instead of DDP.
        """
        made = []
        for name, values in self.axes.items():
            if name == "virtual_stages":  # no rank could go on from the state of the last step
                continue
            later = values[values.index(getattr(recipe, name)) + 1 :] if name != "grad_sync" else ("each",)
            for value in later:
                one = nearest_valid(recipe.model_copy(update={name: value}), self.setting)
                if one is not None and one != recipe and getattr(one, name) == value and self.has(one):
                    made.append(one)
        return [one for one in made if one.changes_from(recipe).keys() <= self.axes.keys()]

    def has(self, recipe: Recipe) -> bool:
        waits = recipe.gradients_wait and can_wait(recipe)
        if recipe.grad_sync == "last" and "grad_sync" in self.axes and not waits:
            return False  # the same as `each`
        if not obeys_rules(recipe, self.setting):
            return False
        return not (self.setting.entrypoint and unsupported(recipe))
