"""The allocations of a run's first two steps in order, for the model of the allocator."""

from __future__ import annotations

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks, paged_bytes, shard_of, state_bytes
from launcher.memory.trace import GRADIENTS, Trace
from launcher.spec.recipe import Recipe


def timeline(
    model: ModelShapes, trace: Trace, recipe: Recipe, ranks: Ranks
) -> tuple[list[int], list[int], list[int]]:
    """(bytes that are there from the start, bytes of each storage, events), of a complete trace.

    First step, the update that makes the optimizer's states, second step, evaluation.
    """
    micro = recipe.micro_batch_size
    sizes = [storage.at(micro) for storage in trace.storages]
    if recipe.offload == "cpu":
        sizes = [
            0 if storage.category == GRADIENTS else size
            for storage, size in zip(trace.storages, sizes, strict=True)
        ]
    made = _states(model, recipe, ranks)
    evaluation = dict(trace.phases)["evaluation"]
    step, evaluated = list(trace.events[:evaluation]), list(trace.events[evaluation:])
    freed_last = len(step)
    while freed_last and step[freed_last - 1] < 0:
        freed_last -= 1
    count = len(sizes)
    # The update comes before the gradients are freed.
    first = [*step[:freed_last], *range(2 * count, 2 * count + len(made)), *step[freed_last:]]
    second = [event + count if event >= 0 else event - count for event in step]
    left = [~one for one in _alive(step)]
    born = {event for event in evaluated if event >= 0}
    events = [*first, *left, *second, *(event for event in evaluated if event in born or ~event in born)]
    sizes = [*sizes, *sizes, *made]
    return _standing(model, recipe, ranks), sizes, [event for event in events if _counts(event, sizes)]


def _counts(event: int, sizes: list[int]) -> bool:
    return sizes[event if event >= 0 else ~event] > 0


def _alive(events: list[int]) -> list[int]:
    alive: dict[int, None] = {}
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    return list(alive)


def _standing(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> list[int]:
    shards = ranks.shards(recipe)
    sizes = [] if recipe.offload == "cpu" else [
        shard_of(p, shards, 0).padded * p.itemsize for p in model.parameters
    ]  # fmt: skip
    if recipe.sharding == "ddp":
        sizes += [p.nbytes for p in model.trained]  # buckets
    return [size for size in (*sizes, model.buffers) if size]


def _states(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> list[int]:
    """Of the optimizer, on the GPU: one or two for each parameter."""
    if recipe.offload != "none":
        return []
    shards, parts = ranks.shards(recipe), 1 if recipe.optimizer in ("lion", "lion-8bit") else 2
    cut = [(p, shard_of(p, shards, 0)) for p in model.trained]
    sizes = [state_bytes(recipe, p, shard) - paged_bytes(recipe, p, shard) for p, shard in cut]
    return [size // parts for size in sizes for _ in range(parts) if size]
