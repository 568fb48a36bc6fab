"""The peaks of a recipe: its states, and what the traced step allocates on top of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from launcher.memory.estimate import Peak, When
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Held, Ranks, States, states_of
from launcher.memory.trace import BATCH, GRADIENTS, TEMPORARIES, Moment, Storage, Trace
from launcher.memory.update import update_temporaries
from launcher.spec.recipe import Recipe

Like = Literal["cuda", "cpu"]
Counts = Callable[[Storage], bool]

PHASES: Mapping[str, tuple[When, str]] = {
    "forward": ("first step", "forward"),
    "backward": ("first step", "backward"),
    "forward again": ("steady state", "forward"),
    "backward again": ("steady state", "backward"),
    "evaluation": ("evaluation", "forward"),
}
"Of a trace -> of the run."


def traced_as(recipe: Recipe) -> Recipe:
    """What has to be traced for it: recipes that differ in nothing that a traced step shows have one trace.

    The optimizer and what waits on the host are counted in closed form; DDP is one device with buckets.
    """
    accumulates = recipe.grad_accum > 1
    whole = recipe.sharding in ("none", "ddp")
    return recipe.model_copy(
        update={
            "precision": "bf16-mixed" if recipe.precision == "float8" else recipe.precision,
            "optimizer": "adamw",
            "sharding": "none" if whole else recipe.sharding,
            "offload": "none",
            "micro_batch_size": 1,
            "grad_accum": 2 if accumulates else 1,
            "grad_sync": recipe.grad_sync if accumulates and not whole else "each",
            "compile": False,
            "grad_scaler": False,
            "expandable_segments": True,
        }
    )


def peaks_of(model: ModelShapes, trace: Trace, recipe: Recipe, ranks: Ranks) -> tuple[Peak, ...]:
    """Sizes as asked for, without the allocator's rounding. `model` and `trace`: in the recipe's precision.

    First step and steady state forward, backward and in the optimizer's update; evaluation; resume.
    """
    states = states_of(model, recipe, ranks)
    micro = recipe.micro_batch_size
    counts = _on_gpu(recipe)
    trace = settled(trace, recipe)
    highest = trace.highest(counts)
    found = []
    for name, moments in highest.items():
        when, phase = PHASES[name]
        if not moments:
            continue
        moment = max(moments, key=lambda one: one.at(micro))
        # States of the optimizer come to be in the first update, those on the host before the first step.
        early = when == "first step"
        held = standing(states, recipe, with_optimizer=not early)
        found.append(_peak(when, phase, trace, moment, micro, held, counts))
    update = _update(model, states, recipe, ranks, trace)
    found += [update, update.model_copy(update={"when": "steady state"})]
    found.append(_resume(states))
    found.append(_between(states))
    return tuple(found)


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


def settled(trace: Trace, recipe: Recipe) -> Trace:
    """The trace of one device as DDP changes it: a gradient is added to its bucket at once and dies.

    With `grad_sync: last` the gradients wait beside the buckets for the last micro-batch.
    """
    if recipe.sharding != "ddp" or (recipe.grad_sync == "last" and recipe.grad_accum > 1):
        return trace
    events: list[int] = []
    starts = {start for _, start in trace.phases}
    moved: dict[int, int] = {}
    dying: list[int] = []
    for index, event in enumerate(trace.events):
        if index in starts:
            moved[index] = len(events)
        number = event if event >= 0 else ~event
        gradient = trace.storages[number].category == GRADIENTS
        if event >= 0:
            events.append(event)
            if dying:
                events += [~one for one in dying]
                dying = []
            if gradient:
                dying.append(event)
        elif not gradient:
            events.append(event)
    events += [~one for one in dying]
    phases = tuple((name, moved.get(start, len(events))) for name, start in trace.phases)
    return Trace(trace.storages, tuple(events), phases, trace.work)


def _buckets(gpu: Held, recipe: Recipe) -> int:
    waits = recipe.grad_sync == "last" and recipe.grad_accum > 1
    return gpu.gradients // 2 if waits else gpu.gradients


def _on_gpu(recipe: Recipe) -> Counts:
    """Reduced gradients go to the host at once with `offload: cpu`."""
    if recipe.offload == "cpu":
        return lambda storage: storage.category != GRADIENTS
    return lambda storage: True


def _peak(
    when: When,
    phase: str,
    trace: Trace,
    moment: Moment,
    micro: int,
    held: dict[str, int],
    counts: Counts,
) -> Peak:
    parts = dict(held)
    for number in trace.live_at(moment.event):
        storage = trace.storages[number]
        if counts(storage):
            parts[storage.category] = parts.get(storage.category, 0) + storage.at(micro)
    module = trace.storages[trace.events[moment.event]].module
    return Peak(when=when, phase=phase, module=module, allocated=sum(parts.values()), parts=parts)


def _update(
    model: ModelShapes,
    states: States,
    recipe: Recipe,
    ranks: Ranks,
    trace: Trace,
) -> Peak:
    parts = standing(states, recipe, with_optimizer=True)
    if recipe.sharding == "ddp" or recipe.offload != "cpu":
        parts[GRADIENTS] = states.gpu.gradients
        if recipe.sharding != "ddp":
            parts[GRADIENTS] = _gradients_at_the_end(states, recipe, model, ranks)
    temporaries, largest = update_temporaries(model, recipe, ranks)
    parts[TEMPORARIES] = temporaries
    batch = sum(one.at(recipe.micro_batch_size) for one in trace.storages if one.category == BATCH)
    parts[BATCH] = batch // 2  # each pass has its own
    parts = {name: size for name, size in parts.items() if size}
    return Peak(
        when="first step",
        phase="optimizer",
        module=largest if temporaries else "",
        allocated=sum(parts.values()),
        parts=parts,
    )


def _gradients_at_the_end(states: States, recipe: Recipe, model: ModelShapes, ranks: Ranks) -> int:
    """When the last micro-batch is done, FSDP has reduced them, whatever it kept before."""
    each = recipe.model_copy(update={"grad_sync": "each"})
    return states_of(model, each, ranks).gpu.gradients


def _resume(states: States) -> Peak:
    """To load the optimizer's states, DCP makes them by an update with gradients of zeros."""
    gpu = states.gpu
    parts = {
        "parameters": gpu.parameters,
        "buffers": gpu.buffers,
        "optimizer states": gpu.optimizer,
        GRADIENTS: gpu.parameters,
    }
    parts = {name: size for name, size in parts.items() if size}
    return Peak(when="resume", phase="load", module="", allocated=sum(parts.values()), parts=parts)


def _between(states: States) -> Peak:
    """Between two steps there are no gradients; what is saved is copied to the host piece by piece."""
    gpu = states.gpu
    parts = {"parameters": gpu.parameters, "buffers": gpu.buffers, "optimizer states": gpu.optimizer}
    parts = {name: size for name, size in parts.items() if size}
    return Peak(when="checkpoint", phase="save", module="", allocated=sum(parts.values()), parts=parts)
