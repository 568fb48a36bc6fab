"""The prediction as the evidence asks for it: the one place that knows how it is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from launcher.memory.assess import assess
from launcher.memory.estimate import Estimate
from launcher.memory.host import Surroundings
from launcher.memory.peaks import completely_traced_as
from launcher.memory.recipe_trace import profile_of, stages_alone
from launcher.memory.states import Ranks
from launcher.spec.cluster import Gpu
from launcher.spec.job import Job
from launcher.spec.mesh import Part
from launcher.spec.recipe import Recipe
from launcher.train.tracing.task_source import TaskSource

MOMENTS = ("first step", "steady state", "evaluation", "resume")


def predicted(
    job: Job,
    recipe: Recipe,
    ranks: int,
    like: Literal["cpu", "cuda"],
    gpu: Gpu | None = None,
    per_node: int | None = None,
    stage: int = 0,
) -> Estimate:
    """Of one rank, the first of a stage, as the plan has it for the recipe that it chooses."""
    source = TaskSource(job, Path(job.workdir), like)
    # The CPU stands in for the device in traces: what a GPU run keeps in host memory is not counted.
    place = Ranks(ranks, per_node or min(ranks, 8), on_gpu=True, stage=stage)
    alone = stages_alone(completely_traced_as(recipe), place)
    traces = [source.trace(one, where, exact=True) for one, where in alone]
    model, around = source.shapes(recipe.precision, None, Part.of(recipe, stage)), Surroundings(gpu)
    place = replace(place, on_gpu=like == "cuda")
    profile = profile_of(traces, model, recipe, place)
    return assess(profile, recipe, place, around, replayed=like == "cuda")


def peaks(*stages: Estimate) -> dict[str, dict[str, int]]:
    """The most bytes that any stage allocates, by moment and phase, as measured_steps.py measures them: its
    resume ends when the checkpoint is loaded."""
    found: dict[str, dict[str, int]] = {}
    for one in (peak for estimate in stages for peak in estimate.peaks):
        if one.when in MOMENTS and (one.when, one.phase) != ("resume", "forward"):
            phases = found.setdefault(one.when, {})
            phases[one.phase] = max(phases.get(one.phase, 0), one.allocated)
    return found
