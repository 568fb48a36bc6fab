"""The peaks of a recipe: its states, and what the traced step allocates on top of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from launcher.memory.estimate import Peak, When
from launcher.memory.profile import Profile
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import BF16, FP32, Held, Ranks, States, states_of
from launcher.memory.trace import BATCH, GRADIENTS, TEMPORARIES, Moment
from launcher.memory.update import update_temporaries
from launcher.spec import optimizers
from launcher.spec.recipe import SHARDED, Recipe

Like = Literal["cuda", "cpu"]


def traced_as(recipe: Recipe) -> Recipe:
    """What has to be traced for it: recipes that differ in nothing that a pass shows have one trace.

    The optimizer and what waits on the host are counted in closed form; DDP is one device with buckets;
    gradients that wait for other micro-batches are added by `peaks_of`.
    """
    return recipe.model_copy(
        update={
            "precision": "bf16-mixed" if recipe.precision == "float8" else recipe.precision,
            "optimizer": optimizers.DEFAULT,
            "sharding": "none" if recipe.sharding == "ddp" else recipe.sharding,
            "offload": "none",
            "micro_batch_size": 1,
            "grad_accum": 1,
            "grad_sync": "each",
            "compile": False,
            "grad_scaler": False,
            "expandable_segments": True,
        }
    )


def completely_traced_as(recipe: Recipe) -> Recipe:
    """The same for a complete trace, of the recipe's own micro-batch and with gradients that wait."""
    accumulates = recipe.grad_accum > 1
    waits = accumulates and recipe.sharding in SHARDED
    return traced_as(recipe).model_copy(
        update={
            "micro_batch_size": recipe.micro_batch_size,
            "grad_accum": 2 if accumulates else 1,
            "grad_sync": recipe.grad_sync if waits else "each",
        }
    )


def peaks_of(model: ModelShapes, profile: Profile, recipe: Recipe, ranks: Ranks) -> tuple[Peak, ...]:
    """Sizes as asked for, without the allocator's rounding. `model`: in the recipe's precision; `profile`: of
    its trace.

    First step and steady state, forward, backward and in the optimizer's update; evaluation; resume; save.
    """
    states, micro = states_of(model, recipe, ranks), recipe.micro_batch_size
    found = []

    def add(
        when: When, phase: str, moments: Sequence[Moment], known: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`known`: categories that are not the trace's."""
        moment = max(moments, key=lambda one: one.at(micro), default=None)
        if moment is None:
            return
        # States of the optimizer come to be in the first update, those on the host before the first step.
        parts = standing(states, recipe, with_optimizer=when != "first step")
        for category, law in profile.parts(moment.event).items():
            if category not in known:
                parts[category] = parts.get(category, 0) + int(law.at(micro))
        for category, size in known.items():
            parts[category] = parts.get(category, 0) + size
        found.append(_peak(when, phase, parts, profile.module(moment.event)))

    highest, accumulates = profile.highest, recipe.grad_accum > 1
    for name in ("forward", "backward"):
        add("first step", name, highest[name])
        add("steady state", name, highest[name])
        if not accumulates or profile.adds_to_buckets:
            continue
        # Every micro-batch but the first finds the gradients of those before, in the first step, too.
        for when in ("first step", "steady state"):
            if f"{name} again" in highest:
                add(when, name, highest[f"{name} again"])
            else:
                add(when, name, profile.highest_but_gradients[name], {GRADIENTS: _waiting(states, recipe)})
    add("evaluation", "forward", highest.get("evaluation", ()))
    update = _update(model, states, recipe, ranks, profile)
    found += [update, update.model_copy(update={"when": "steady state"})]
    held = standing(states, recipe, with_optimizer=True)
    # To load the optimizer's states, DCP makes them by an update with gradients of zeros: new ones, beside
    # DDP's buckets. Those of an optimizer on the host are there already.
    zeros = _reduced(model, recipe, ranks) if recipe.offload == "none" else 0
    temporaries, largest = update_temporaries(model, recipe, ranks)
    loading = {**held, GRADIENTS: held.get(GRADIENTS, 0) + zeros, TEMPORARIES: temporaries}
    found.append(_peak("resume", "load", loading, largest if temporaries else ""))
    # Between two steps; what is saved is copied to the host piece by piece.
    found.append(_peak("checkpoint", "save", held))
    return _worst(found)


def _worst(found: Sequence[Peak]) -> tuple[Peak, ...]:
    """One for each moment and phase, in their order."""
    worst: dict[tuple[str, str], Peak] = {}
    for peak in found:
        key = (peak.when, peak.phase)
        worst[key] = max(worst.get(key, peak), peak, key=lambda one: one.allocated)
    return tuple(worst.values())


def _peak(when: When, phase: str, parts: Mapping[str, int], module: str = "") -> Peak:
    there = {name: size for name, size in parts.items() if size}
    return Peak(when=when, phase=phase, module=module, allocated=sum(there.values()), parts=there)


def standing(states: States, recipe: Recipe, *, with_optimizer: bool) -> dict[str, int]:
    """What a rank's GPU holds through a whole step, by category."""
    gpu = states.gpu
    held = {"parameters": gpu.parameters, "buffers": gpu.buffers}
    if with_optimizer:
        held["optimizer states"] = gpu.optimizer
    if recipe.sharding == "ddp":
        # Its buckets, which the gradients are views of, exist from the beginning.
        held[GRADIENTS] = _buckets(gpu, recipe)
    return {name: size for name, size in held.items() if size}


def _waiting(states: States, recipe: Recipe) -> int:
    """Gradients of the micro-batches before, on the GPU, beside DDP's buckets."""
    if recipe.offload == "cpu":
        return 0
    return states.gpu.gradients - (_buckets(states.gpu, recipe) if recipe.sharding == "ddp" else 0)


def _buckets(gpu: Held, recipe: Recipe) -> int:
    waits = recipe.grad_sync == "last" and recipe.grad_accum > 1
    return gpu.gradients // 2 if waits else gpu.gradients


def _reduced(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> int:
    """Gradients on the GPU when the last micro-batch is done: FSDP has reduced them, whatever it kept."""
    each = recipe.model_copy(update={"grad_sync": "each"})
    return states_of(model, each, ranks).gpu.gradients


def at_least(model: ModelShapes, recipe: Recipe, ranks: Ranks, kept: float) -> int:
    """Bytes that the steady state needs on a GPU whatever else its trace would show: when the forward pass
    ends, all that it has `kept` for the backward pass is there, and with `fsdp-keep` the whole model."""
    states = states_of(model, recipe, ranks)
    held = sum(standing(states, recipe, with_optimizer=True).values())
    if recipe.grad_accum > 1:
        held += _waiting(states, recipe)
    if recipe.sharding == "fsdp-keep" and ranks.world > 1:
        computed_in = FP32 if recipe.precision == "fp32" else BF16
        held += sum(count * p.numel * min(p.itemsize, computed_in) for p, count in model.distinct)
    return held + int(kept)


def _update(model: ModelShapes, states: States, recipe: Recipe, ranks: Ranks, profile: Profile) -> Peak:
    parts = standing(states, recipe, with_optimizer=True)
    if recipe.sharding == "ddp":
        parts[GRADIENTS] = states.gpu.gradients
    else:
        parts[GRADIENTS] = _reduced(model, recipe, ranks)
    parts[TEMPORARIES], largest = update_temporaries(model, recipe, ranks)
    parts[BATCH] = int(profile.batch.at(recipe.micro_batch_size))
    return _peak("first step", "optimizer", parts, largest if parts[TEMPORARIES] else "")
