"""The prediction as the evidence asks for it: the one place that knows how it is called."""

from __future__ import annotations

from typing import Any, Literal

from launcher.memory.states import Ranks
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe

MOMENTS = ("first step", "steady state", "evaluation")


def predicted(job: Job, recipe: Recipe, ranks: Ranks, like: Literal["cpu", "cuda"]) -> Any:
    """The launcher.memory.estimate.Estimate of one rank."""
    raise NotImplementedError("launcher.train.tracing is not merged yet")


def peaks(estimate: Any) -> dict[str, dict[str, int]]:
    """Allocated bytes by moment and phase, as tests/memory/truth.py measures them."""
    found: dict[str, dict[str, int]] = {}
    for one in estimate.peaks:
        if one.when in MOMENTS:
            phases = found.setdefault(one.when, {})
            phases[one.phase] = max(phases.get(one.phase, 0), one.allocated)
    return found
