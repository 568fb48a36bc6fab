"""The allocations of a run in order: tensors that stay, two steps with their updates, an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from launcher.memory.estimate import When
from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, Shard, has_states, paged_bytes, shard_of, state_bytes, updated_by
from launcher.memory.trace import COMPUTE, PRODUCT, Trace
from launcher.spec.mesh import in_buckets
from launcher.spec.optimizer_table import OPTIMIZERS
from launcher.spec.recipe import Recipe

CUBLAS = "cuBLAS workspaces"
"Name of the storages whose sizes launcher.memory.overheads.cublas_workspaces returns."


@dataclass
class Timeline:
    """The input of launcher.memory.allocator.replay, with names and phases."""

    sizes: list[int] = field(default_factory=list)
    "Bytes of each storage."
    names: list[str] = field(default_factory=list)
    "Name of each storage, or of the module that allocates it."
    streams: list[str] = field(default_factory=list)
    "The CUDA stream that each storage is allocated on."
    events: list[int] = field(default_factory=list)
    "As in Trace.events."
    spans: list[tuple[int, When, str]] = field(default_factory=list)
    "(first event, when, phase)"
    workspaces: dict[str, int] = field(default_factory=dict)
    "Phase -> bytes of the workspace that its first matrix product will allocate."

    def begin(self, when: When, phase: str) -> None:
        self.spans.append((len(self.events), when, phase))

    def at(self, event: int) -> tuple[When, str]:
        """Return the moment and the phase of an event."""
        return next((when, phase) for start, when, phase in reversed(self.spans) if start <= event)

    def allocate(self, name: str, size: int, stream: str = COMPUTE) -> int:
        """Allocate a storage and return its number."""
        number = len(self.sizes)
        self.events.append(number)
        self.sizes.append(size)
        self.names.append(name)
        self.streams.append(stream)
        return number

    def allocate_for_good(self, tensors: Iterable[tuple[str, int]]) -> None:
        """Allocate tensors that are never freed."""
        for name, size in tensors:
            if size:
                self.allocate(name, size)


def timeline(
    model: ModelShapes, trace: Trace, recipe: Recipe, ranks: Ranks, workspaces: Mapping[str, int]
) -> Timeline:
    """Return the timeline of a recipe. `trace`: a Profile's complete trace. `workspaces`: cuBLAS's, by the
    phase that allocates one. They are allocated at its first matrix product, among tensors that are freed, or
    at the start if the trace does not contain the products."""
    line = Timeline()
    line.begin("first step", "init")
    if any(storage.category == PRODUCT for storage in trace.storages):
        line.workspaces = dict(workspaces)
    else:
        line.allocate_for_good((CUBLAS, size) for size in workspaces.values())
    line.allocate_for_good(_standing(model, recipe, ranks))
    states = [*_states(model, recipe, ranks)]
    if recipe.optimizer_step == "backward":  # they are created before the first step
        line.allocate_for_good(states)
        states = []
    _step(line, trace, recipe, "first step", states)
    _step(line, trace, recipe, "steady state", ())
    _evaluation(line, trace, recipe)
    return line


def _step(
    line: Timeline, trace: Trace, recipe: Recipe, when: When, states: Iterable[tuple[str, int]]
) -> None:
    """Append one step. The update runs before the gradients are freed, and allocates `states`."""
    numbers: dict[int, int] = {}
    for name, start, end in trace.spans():
        if name == "evaluation":
            break
        events = trace.events[start:end]
        freed_last = len(events)
        while freed_last and events[freed_last - 1] < 0:
            freed_last -= 1
        line.begin(when, name.split()[0])
        _follow(line, trace, recipe, events[:freed_last], numbers)
        if name == trace.last_backward:
            line.begin(when, "optimizer")
            line.allocate_for_good(states)
        _follow(line, trace, recipe, events[freed_last:], numbers)
    line.events += [~number for number in numbers.values()]


def _evaluation(line: Timeline, trace: Trace, recipe: Recipe) -> None:
    line.begin("evaluation", "forward")
    start = dict(trace.phases)["evaluation"]
    _follow(line, trace, recipe, trace.events[start:], {})


def _follow(
    line: Timeline, trace: Trace, recipe: Recipe, events: Iterable[int], numbers: dict[int, int]
) -> None:
    """Append traced events.

    `numbers`: traced storage -> storage of the timeline. A storage that is not in it has been freed.
    """
    for event in events:
        if event < 0:
            if ~event in numbers:
                line.events.append(~numbers.pop(~event))
            continue
        storage = trace.storages[event]
        if storage.category == PRODUCT:
            line.allocate_for_good([(CUBLAS, line.workspaces.pop(line.spans[-1][2], 0))])
        if size := storage.at(recipe.micro_batch_size):
            numbers[event] = line.allocate(storage.module, size, storage.stream)


def _standing(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> Iterator[tuple[str, int]]:
    shards = ranks.shards(recipe)
    if recipe.offload != "cpu":
        for p in model.parameters:
            yield p.name, shard_of(p, shards, 0).padded * p.itemsize
    yield "buffers", model.buffers
    if in_buckets(recipe):
        for p in model.trained:
            yield f"DDP's bucket for {p.name}", p.nbytes


def _states(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> Iterator[tuple[str, int]]:
    """Yield the optimizer states on the GPU in the order of the update: matrices first."""
    if recipe.offload != "none":
        return
    for p in sorted(model.trained, key=lambda p: p.vector):
        if has_states(p, recipe):
            for name, size in _tensors(recipe, p, updated_by(p, recipe, ranks)):
                yield f"{name} of {p.name}", size


def _tensors(recipe: Recipe, p: Parameter, shard: Shard) -> Iterator[tuple[str, int]]:
    size = state_bytes(recipe, p, shard) - paged_bytes(recipe, p, shard)
    optimizer = OPTIMIZERS[recipe.optimizer]
    names = [f"state{number}" for number, _ in enumerate(optimizer.states, start=1)]
    if optimizer.eight_bit and (codes := min(shard.numel, size // len(names))) < size:
        for name in names:
            yield name, codes
            yield f"scales of {name}", size // len(names) - codes
    else:
        for name in names:
            yield name, size // len(names)
