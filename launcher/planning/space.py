"""The valid recipes for a job on a cluster, in the order of what they give up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.planning.micro_batches import divisors, with_micro_batch
from launcher.spec.mesh import data_ranks, grad_sync_applies
from launcher.spec.optimizer_table import SEARCHED
from launcher.spec.recipe import RECOMPUTED, Recipe
from launcher.spec.recipe_rules import Setting, nearest_valid, obeys_rules
from launcher.spec.unsupported_recipes import unsupported

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
    recomputable: bool = True
    "The forward pass of each block can run again."
    closed: bool = False
    "Only the micro-batch is free: the planner does not know which fields of a recipe a user's command reads."
    stages: int = 0
    "Largest number of stages into which a pipeline can cut the model."
    works: Callable[[Recipe], bool] = lambda _: True
    "Whether the model trains with this recipe of `by_layers`. It may cost a trace."

    @functools.cached_property
    def axes(self) -> Mapping[str, tuple[Any, ...]]:
        """The free fields and their values."""
        not_free = set(self.fixed)
        if not self.chunks:
            not_free.add("loss_chunks")
        if not self.blocks:
            not_free.add("activations")
        if self.closed:
            not_free.update(AXES)
        if {"checkpoint_ratio", "activation_budget"} & not_free:
            not_free.add("activations")
        # Each value costs a separate trace, so the job has to ask for them.
        if not ("activations" in self.fixed and self.base.activations == "budget"):
            not_free.add("activation_budget")
        if self.base.pipeline == 1 or self.base.schedule != "1f1b" or "stages" in self.fixed:
            not_free.add("virtual_stages")
        if self.base.pipeline == 1:
            not_free.add("schedule")
        free = {name: values for name, values in AXES.items() if name not in not_free}
        pointless: dict[str, set[str]] = {}
        if self.setting.gpus_per_node == 0:  # there is no GPU to offload from
            pointless = {"offload": {*AXES["offload"]} - {"none"}, "activations": {"offload"}}
        if not self.recomputable:
            pointless.setdefault("activations", set()).update(RECOMPUTED)
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
    def combinations(self) -> tuple[Recipe, ...]:
        """Every valid combination of the axes, each with its largest valid micro-batch."""
        recipes: list[Recipe] = []
        for values in itertools.product(*self.axes.values()):
            largest = self._falling(self.base.model_copy(update=dict(zip(self.axes, values, strict=True))))
            recipes += itertools.islice(largest, 1)
        return tuple(recipes)

    def by_layers(self) -> Space | None:
        """Return the space with `fsdp-layers`; None if the sharding is fixed, if FSDP has nothing to gather,
        or if the model does not train so.

        It is not in AXES: each of its recipes costs another trace, and where `fsdp` fits without offload it
        was never faster (7B and 13B Llama on A100 and H100 nodes).
        """
        pointless = not self.blocks or data_ranks(self.base, self.setting.ranks) == 1
        if "sharding" not in self.axes or pointless:
            return None
        base = self.base.model_copy(update={"sharding": "fsdp-layers"})
        if obeys_rules(base, self.setting) and not self.works(base):
            return None
        return dataclasses.replace(self, base=base, fixed=self.fixed | {"sharding"})

    def layers_of(self, recipe: Recipe) -> list[Recipe]:
        """Return the recipe with `fsdp-layers` instead of `fsdp`; nothing if that is not possible."""
        here = dataclasses.replace(self, base=recipe)
        space = here.by_layers() if recipe.sharding == "fsdp" else None
        return [space.base] if space is not None and space.has(space.base) else []

    def sizes(self, recipe: Recipe) -> list[Recipe]:
        """Return the recipe with each valid micro-batch at the same global batch, the smallest first."""
        return [*self._falling(recipe)][::-1]

    def _falling(self, recipe: Recipe) -> Iterator[Recipe]:
        """Yield the recipe with each valid micro-batch at the same global batch, the largest first."""
        per_rank = recipe.micro_batch_size * recipe.grad_accum
        fixed = self.fixed & {"micro_batch_size", "grad_accum"}
        for micro in (recipe.micro_batch_size,) if fixed else reversed(divisors(per_rank)):
            sized = recipe
            if micro != recipe.micro_batch_size:
                sized = with_micro_batch(recipe, micro)
            if self.has(sized):
                yield sized

    def below(self, recipe: Recipe) -> list[Recipe]:
        """Return the valid recipes with a later value of one axis, which may need less memory.

        Other axes change if that value needs it: offload of parameters needs FSDP instead of DDP.
        """
        recipes = []
        for name, values in self.axes.items():
            if name == "virtual_stages":  # no rank could continue from the state of the last step
                continue
            now = getattr(recipe, name)
            if name == "grad_sync":
                later: tuple[Any, ...] = ("each",)
            else:
                later = values[values.index(now) + 1 :] if now in values else ()  # see by_layers
            for value in later:
                lower = nearest_valid(recipe.model_copy(update={name: value}), self.setting)
                if (
                    lower is not None
                    and lower != recipe
                    and getattr(lower, name) == value
                    and self.has(lower)
                ):
                    recipes.append(lower)
        return [lower for lower in recipes if lower.changes_from(recipe).keys() <= self.axes.keys()]

    def has(self, recipe: Recipe) -> bool:
        waits = recipe.gradients_wait and grad_sync_applies(recipe)
        if recipe.grad_sync == "last" and "grad_sync" in self.axes and not waits:
            return False  # the same as `each`
        if not obeys_rules(recipe, self.setting):
            return False
        return not (self.setting.entrypoint and unsupported(recipe))
