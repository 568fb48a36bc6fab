"""The peaks of a task's recipe: from its own code, in one call."""

from __future__ import annotations

from launcher.memory.estimate import Peak
from launcher.memory.peaks import Like, completely_traced_as, peaks_of
from launcher.memory.profile import Profile
from launcher.memory.states import Ranks
from launcher.memory.trace import Trace, alone
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.shapes import read_shapes
from launcher.train.task import Task
from launcher.train.tracing.tracer import Tracer


def predict(task: Task, job: Job, recipe: Recipe, ranks: Ranks, like: Like) -> tuple[Peak, ...]:
    """On rank 0. `ranks`: with `on_gpu`, also where the CPU stands in for the device."""
    trace = exact_trace(Tracer(task, job, like), recipe, ranks)
    return peaks_of(read_shapes(task, recipe), Profile(trace, recipe), recipe, ranks)


def exact_trace(tracer: Tracer, recipe: Recipe, ranks: Ranks) -> Trace:
    """Of this very micro-batch: no law, nothing folded."""
    return alone(
        tracer.sample(completely_traced_as(recipe), ranks, recipe.micro_batch_size, whole=True, complete=True)
    )
