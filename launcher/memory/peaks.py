"""The memory peaks of a recipe: its model states plus the allocations of the traced step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from launcher.memory.estimate import Peak, When
from launcher.memory.optimizer_temporaries import temporaries_of, update_temporaries
from launcher.memory.recipe_trace import Profile, leave_the_gpu
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import (
    Ranks,
    States,
    buckets_of,
    computes_in,
    paged_bytes,
    state_bytes,
    states_of,
    updated_by,
)
from launcher.memory.trace import ACTIVATIONS, BATCH, COMMUNICATION, GRADIENTS, LATER, TEMPORARIES
from launcher.spec import optimizer_table
from launcher.spec.mesh import in_buckets
from launcher.spec.recipe import REPLICATED, SHARDED, Recipe

Like = Literal["cuda", "cpu"]
COPIES_OF_BUFFERS = 2 * 250 * 2**20
"""Most bytes of buffers that DDP copies at a time: two broadcasts (broadcast_coalesced in
torch/csrc/distributed/c10d/comm.cpp) of 250 MiB (broadcast_bucket_size)."""


def traced_as(recipe: Recipe) -> Recipe:
    """Return the recipe to trace in place of `recipe`, so that recipes with equal passes share one trace.

    The optimizer and offloaded tensors are computed in closed form. DDP is traced as one device with buckets.
    `peaks_of` adds the gradients that wait for other micro-batches.
    """
    return recipe.model_copy(
        update={
            "precision": "bf16-mixed" if recipe.precision == "float8" else recipe.precision,
            "optimizer": optimizer_table.DEFAULT,
            "sharding": "none" if recipe.sharding in REPLICATED else recipe.sharding,
            "offload": "none",
            "optimizer_step": "after",
            "micro_batch_size": 1,
            "grad_accum": 1,
            "grad_sync": "each",
            "schedule": recipe.schedule if recipe.schedule == "zero-bubble" else "1f1b",
            "grad_scaler": False,
            "expandable_segments": True,
        }
    )


def completely_traced_as(recipe: Recipe) -> Recipe:
    """Like `traced_as` for a complete trace, which keeps the micro-batch and the gradients that wait."""
    accumulates = recipe.grad_accum > 1
    waits = accumulates and recipe.sharding in SHARDED
    if leave_the_gpu(recipe) and not (waits and recipe.grad_sync == "last"):
        accumulates = False  # every micro-batch is like the first
    return traced_as(recipe).model_copy(
        update={
            "micro_batch_size": recipe.micro_batch_size,
            "grad_accum": 2 if accumulates else 1,
            "grad_sync": recipe.grad_sync if waits else "each",
        }
    )


def peaks_of(profile: Profile, recipe: Recipe, ranks: Ranks) -> tuple[Peak, ...]:
    """Return the peaks of a recipe, with sizes as requested, without the allocator's rounding.

    Moments: forward, backward and update of the first step and of steady state; evaluation; resume; save.
    `profile`: of the recipe's trace.
    """
    model = profile.model
    states, micro = states_of(model, recipe, ranks), recipe.micro_batch_size
    left = int(profile.left.at(micro))
    peaks = []

    def add(
        when: When, phase: str, profile: Profile, name: str, extra: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`name`: the phase in the trace. `extra`: bytes by category that are not in the trace."""
        moment = max(profile.highest.get(name, ()), key=lambda moment: moment.at(micro), default=None)
        if moment is None:
            return
        # Optimizer states are created in the first update; on the host, before the first step.
        has_states = when != "first step" or recipe.optimizer_step == "backward"
        parts = standing(model, states, recipe, with_optimizer=has_states)
        traced = {category: int(amount.at(micro)) for category, amount in profile.parts(moment.event).items()}
        # A run keeps what the model held before the step, so that it can restore that.
        before = {ACTIVATIONS: left if when == "steady state" else 0}
        for category, size in (*traced.items(), *extra.items(), *before.items()):
            parts[category] = parts.get(category, 0) + size
        peaks.append(_peak(when, phase, parts, profile.module(moment.event)))

    for name in ("forward", "backward", LATER):
        for when in ("first step", "steady state"):
            phase = name.split()[0]
            add(when, phase, profile, name)
            if recipe.grad_accum == 1 or profile.adds_to_buckets:
                continue
            # Every micro-batch except the first runs while earlier gradients exist, in the first step too.
            if f"{name} again" in profile.highest:
                add(when, phase, profile, f"{name} again")
            else:
                add(when, phase, profile.again, name, {GRADIENTS: _waiting(model, states, recipe)})
    if in_buckets(recipe) and recipe.grad_accum > 1 and not recipe.gradients_wait:
        # In its second forward pass DDP makes its buckets anew, while the gradients of the first micro-batch
        # are still in the old ones. An attempt that resumes has optimizer states by then.
        moments: tuple[tuple[When, bool], ...] = (("first step", False), ("resume", True))
        for when, resumed in moments:
            parts = standing(model, states, recipe, with_optimizer=resumed)
            parts[GRADIENTS] = 2 * parts.get(GRADIENTS, 0)
            parts[BATCH] = int(profile.batch.at(micro))
            peaks.append(_peak(when, "forward", parts))
    if in_buckets(recipe) and model.buffers:
        # A forward pass of DDP begins by sending copies of rank 0's buffers.
        copies = {BATCH: int(profile.batch.at(micro)), COMMUNICATION: min(model.buffers, COPIES_OF_BUFFERS)}
        whens: tuple[When, ...] = ("first step", "steady state", "evaluation")
        for when in whens:
            held = standing(model, states, recipe, with_optimizer=when != "first step")
            peaks.append(_peak(when, "forward", {**held, **copies}))
    add("evaluation", "forward", profile, "evaluation")
    update = _update(states, recipe, ranks, profile)
    peaks += [update, update.model_copy(update={"when": "steady state"})]
    held = standing(model, states, recipe, with_optimizer=True)
    peaks.append(_peak("resume", "load", held))
    if recipe.offload == "none" and recipe.optimizer_step == "after":
        peaks.append(_made_states(model, states, recipe, ranks))
    # A checkpoint is saved between two steps, and copied to the host tensor by tensor.
    peaks.append(_peak("checkpoint", "save", held))
    return _worst(peaks)


def _worst(peaks: Sequence[Peak]) -> tuple[Peak, ...]:
    """Return the highest peak of each moment and phase, in their order."""
    worst: dict[tuple[str, str], Peak] = {}
    for peak in peaks:
        key = (peak.when, peak.phase)
        worst[key] = max(worst.get(key, peak), peak, key=lambda peak: peak.allocated)
    return tuple(worst.values())


def _peak(when: When, phase: str, parts: Mapping[str, int], module: str = "") -> Peak:
    nonzero = {name: size for name, size in parts.items() if size}
    return Peak(when=when, phase=phase, module=module, allocated=sum(nonzero.values()), parts=nonzero)


def standing(model: ModelShapes, states: States, recipe: Recipe, *, with_optimizer: bool) -> dict[str, int]:
    """Return the bytes that stay on a rank's GPU through a whole step, by category."""
    gpu = states.gpu
    held = {"parameters": gpu.parameters, "buffers": gpu.buffers}
    if with_optimizer:
        held["optimizer states"] = gpu.optimizer
    held[GRADIENTS] = buckets_of(model, recipe)
    return {name: size for name, size in held.items() if size}


def _waiting(model: ModelShapes, states: States, recipe: Recipe) -> int:
    """Return the bytes of earlier micro-batches' gradients on the GPU, without DDP's buckets."""
    return states.gpu.gradients - buckets_of(model, recipe)


def _made_states(model: ModelShapes, states: States, recipe: Recipe, ranks: Ranks) -> Peak:
    """Return the peak while launcher.train.optimizers.state.make_states creates states to load.

    It creates the states of one trained parameter after the other, also of those without a gradient, matrices
    first, each with a gradient of zeros in addition to DDP's buckets. States on the host exist already. The
    states of `optimizer_step: backward` exist too: they are created without activations, and need less than a
    step.
    """
    made, highest = 0, ("", 0, 0, 0)
    for p, count in sorted(model.distinct, key=lambda pair: pair[0].vector):
        if not p.requires_grad:
            continue
        shard = updated_by(p, recipe, ranks)
        made += count * (state_bytes(recipe, p, shard) - paged_bytes(recipe, p, shard))
        now = (p.name, made, shard.numel * p.itemsize, temporaries_of(recipe, p, shard))
        highest = max(highest, now, key=lambda row: sum(row[1:]))
    name, made, zeros, temporaries = highest
    held = standing(model, states, recipe, with_optimizer=False)
    gradients = held.get(GRADIENTS, 0) + zeros
    parts = {**held, "optimizer states": made, GRADIENTS: gradients, TEMPORARIES: temporaries}
    return _peak("resume", "load", parts, name)


def _reduced(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> int:
    """Return the bytes of gradients on the GPU after the last micro-batch, when FSDP has reduced them all."""
    each = recipe.model_copy(update={"grad_sync": "each"})
    return states_of(model, each, ranks).gpu.gradients


def at_least(model: ModelShapes, recipe: Recipe, ranks: Ranks, kept: float) -> int:
    """Return a lower bound of the bytes that the steady state needs on a GPU, without a trace.

    The bound is the end of the forward pass: the states, the `kept` bytes for the backward pass, and with
    `fsdp-keep` the whole model.
    """
    states = states_of(model, recipe, ranks)
    held = sum(standing(model, states, recipe, with_optimizer=True).values())
    if recipe.grad_accum > 1:
        held += _waiting(model, states, recipe)
    return held + gathered_for_the_pass(model, recipe, ranks) + int(kept)


def gathered_for_the_pass(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> int:
    """Return the bytes of whole parameters that `fsdp-keep` holds besides its shards after a forward pass."""
    if recipe.sharding != "fsdp-keep" or ranks.shards(recipe) == 1:
        return 0
    return sum(count * p.numel * min(p.itemsize, computes_in(recipe)) for p, count in model.distinct)


def _update(states: States, recipe: Recipe, ranks: Ranks, profile: Profile) -> Peak:
    model = profile.model
    parts = standing(model, states, recipe, with_optimizer=True)
    if not in_buckets(recipe):
        parts[GRADIENTS] = _reduced(model, recipe, ranks)
    parts[TEMPORARIES], largest = update_temporaries(model, recipe, ranks)
    if recipe.tensor > 1 and recipe.sharding not in SHARDED:
        # torch computes the whole gradients of cut embeddings. The update cuts them.
        held = max(parts[GRADIENTS], profile.gradients)
        parts[TEMPORARIES] = max(parts[TEMPORARIES], held - parts[GRADIENTS])
        parts[GRADIENTS] = held
    parts[BATCH] = int(profile.batch.at(recipe.micro_batch_size))
    parts[ACTIVATIONS] = int(profile.left.at(recipe.micro_batch_size))
    return _peak("first step", "optimizer", parts, largest if parts[TEMPORARIES] else "")
