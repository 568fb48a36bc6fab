"""The stages of ZeRO (arXiv 1910.02054) for one recipe: the model states that each leaves on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from launcher.memory.peaks import gathered_for_the_pass
from launcher.memory.states import Ranks, states_of
from launcher.planning.fastest_recipe import Candidate
from launcher.planning.recipe_and_ladder import Decider
from launcher.spec.recipe import SHARDED, Recipe, Sharding
from launcher.spec.recipe_rules import broken_rules
from launcher.spec.value import Value

STAGES: tuple[tuple[str, Sharding], ...] = (
    ("none", "ddp"),
    ("ZeRO-1", "zero1"),
    ("ZeRO-2", "fsdp-keep"),
    ("ZeRO-3", "fsdp"),
)
"Name of a stage, and the sharding that is closest to it."


class Stage(Value):
    """One stage, in bytes on rank 0's GPU. No rank holds more."""

    name: str
    sharding: Sharding
    parameters: int
    "The parameters that the optimizer updates: whole, or this rank's shard."
    gathered: int
    "Whole parameters that FSDP2 keeps besides the shard from a unit's forward pass to its backward pass."
    gradients: int
    optimizer: int
    candidate: Candidate | None
    "The estimate with activations, communication, the allocator and CUDA. None if FSDP refuses the model."
    fits: bool | None
    "None if the memory of a GPU is unknown."
    why_not: str | None = None
    "Why the recipe does not fit or is refused."

    @property
    def total(self) -> int:
        return self.parameters + self.gathered + self.gradients + self.optimizer

    @property
    def in_the_paper(self) -> int:
        """The total as the ZeRO paper counts it: without the shard of parameters that are whole."""
        return self.total - (self.parameters if self.gathered else 0)


class PerParameter(NamedTuple):
    """Bytes per parameter without sharding, averaged over the model."""

    parameters: float
    gradients: float
    optimizer: float


class Stages(Value):
    """The stages of one recipe. They differ in sharding only."""

    recipe: Recipe
    """Nothing is offloaded, the update follows the backward pass, and gradients are reduced in each
    micro-batch."""
    stages: tuple[Stage, ...]
    per_parameter: PerParameter
    "With frozen parameters, gradients and states are averaged over all parameters."


def stages_of(decider: Decider, recipe: Recipe) -> Stages:
    """Return the stages for a recipe of any sharding. Each is estimated from a complete trace, unless FSDP
    refuses the model."""
    plain = recipe.model_copy(update={"offload": "none", "optimizer_step": "after", "grad_sync": "each"})
    traces = decider.evaluate.traces
    ranks = Ranks(decider.evaluate.ranks.world, decider.evaluate.ranks.per_node, on_gpu=True)
    setting = decider.layout.setting(decider.job)
    stages = []
    for name, sharding in STAGES:
        sharded = plain.model_copy(update={"sharding": sharding})
        candidate = None
        why_not = decider.about.unshardable if sharding in SHARDED else None
        if why_not is None:
            candidate = decider.evaluate.confirm(sharded)
            broken = broken_rules(sharded, setting)
            why_not = broken[0].rule.reason if broken else decider.capacity.misfit(candidate.estimate)
        model = traces.model(sharded) if candidate is None else traces.model_with_gradients(sharded)
        states = states_of(model, sharded, ranks)
        fits = None if why_not is None and decider.capacity.card is None else why_not is None
        stages.append(
            Stage(
                name=name,
                sharding=sharding,
                parameters=states.gpu.parameters,
                gathered=gathered_for_the_pass(model, sharded, ranks),
                gradients=states.gpu.gradients,
                optimizer=states.gpu.optimizer + states.managed,
                candidate=candidate,
                fits=fits,
                why_not=why_not,
            )
        )
    whole = stages[0]
    per_parameter = PerParameter(
        *(size / traces.model(plain).numel for size in (whole.parameters, whole.gradients, whole.optimizer))
    )
    return Stages(recipe=plain, stages=tuple(stages), per_parameter=per_parameter)
