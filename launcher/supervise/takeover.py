"""Continue from what an earlier supervisor of the same run left."""

from __future__ import annotations

from launcher.planning.plan import Plan
from launcher.rundir.files import read_json
from launcher.rundir.layout import RunDir
from launcher.rundir.recipe_changes import recipe_in_force
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import Verdict
from launcher.supervise.journal import Journal


def first_recipe(run: RunDir, plan: Plan) -> Recipe:
    """Return the plan's recipe, or the recipe that an earlier supervisor with the same plan lowered to."""
    for attempt in reversed(run.attempts()):
        earlier = read_json(attempt.recipe)
        if earlier is not None and attempt.number >= run.planned_at:
            begun = Recipe.model_validate(earlier)
            return recipe_in_force(begun, run.read_events(), attempt.number)
    return plan.recipe


KILLED = Verdict(
    failure="node-failed",
    reason="the supervisor was killed, or its machine restarted, during this attempt",
    node=0,
    confidence="likely",
)


def close_attempts(run: RunDir, journal: Journal, verdict: Verdict, then: str) -> None:
    """Write `verdict` for each attempt that has none because its supervisor ended too early."""
    for attempt in run.attempts():
        if not attempt.verdict.exists():
            journal.json(attempt.verdict, {**verdict.model_dump(), "then": then})
