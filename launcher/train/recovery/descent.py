"""Which recipe a run goes on with when memory runs out in it, and when it may try the larger one again."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.planning.batches import WITHIN_A_RUN
from launcher.planning.lower import why_none_within, within_a_run
from launcher.planning.plan import Plan
from launcher.rundir.downgrades import changed
from launcher.rundir.files import read_record
from launcher.spec.events import AttemptStarted, Climb, Downgrade, Event, RecipeChange, Resumed, Submitted
from launcher.spec.recipe import Recipe
from launcher.spec.rules import Setting
from launcher.train.rank import Rank
from launcher.train.recovery.gate import Gate

CLIMB_AFTER = 200
"Steps without a failure before what may have been a passing one is tried again."


class Descent:
    """Rank 0 knows the plan and the budget, and decides for all."""

    def __init__(self, rank: Rank, setting: Setting, gate: Gate) -> None:
        self.rank, self.setting, self.gate = rank, setting, gate
        self.planned: tuple[Recipe, ...] = ()
        self._left: dict[Recipe, int] = {}
        """Recipes that had fitted before memory ran out under them -> the step in which it did; 0 where it
        was in an earlier run."""
        self._given_up: set[Recipe] = set()
        if rank.first:
            if found := read_record(rank.run.plan):
                plan = Plan.model_validate(found)
                self.planned = (plan.recipe, *plan.ladder)
                self._left |= dict.fromkeys(plan.above, 0)
                self._given_up.update(plan.above)
            self._remember(rank.run.read_events())
        known = (self.planned, self._left, self._given_up)
        self.planned, self._left, self._given_up = gate.firsts(known)

    def _remember(self, events: Sequence[Event]) -> None:
        """What the attempts before this one went down from, and came back to; also before somebody resumed
        the run."""
        recipe, done = self.rank.recipe, 0  # under `recipe`, after so many steps of the run
        for event in events:
            if isinstance(event, AttemptStarted):
                recipe, done = Recipe.model_validate(event.recipe), 0
            elif isinstance(event, Resumed):
                done = event.step
            elif isinstance(event, RecipeChange):
                before, recipe = recipe, changed(recipe, event)
                step = event.step
                if isinstance(event, Climb):
                    self.climbed(recipe)
                else:
                    self.went_down(before, step or 0, had_fitted=step is not None and step > done + 1)
                done = step - 1 if step is not None else done
        for other in [one for one in self._left if not self._may_return(one)]:
            del self._left[other]

    def _may_return(self, recipe: Recipe) -> bool:
        """Whether the run can go up to it without a restart, and without doing what somebody has changed."""
        now, asked = self.rank.recipe, self.rank.job.recipe.micro_batch_size
        within = recipe.changes_from(now).keys() <= WITHIN_A_RUN
        same_batch = recipe.micro_batch_size * recipe.grad_accum == now.micro_batch_size * now.grad_accum
        higher = recipe != now and recipe.micro_batch_size >= now.micro_batch_size
        return within and same_batch and higher and (asked is None or recipe.micro_batch_size <= asked)

    def below(self, recipe: Recipe) -> Recipe | None:
        """What to go on with, without a restart; the same on every rank. None where that is not possible, or
        not any more."""
        may = self.gate.firsts(self.rank.first and self._may_go_lower())
        return next(iter(self.within(recipe)), None) if may else None

    def within(self, recipe: Recipe) -> tuple[Recipe, ...]:
        """Every rung below that needs no restart, the next one first; the same on every rank."""
        return within_a_run(recipe, self.setting, self.planned)

    def why_nothing(self, recipe: Recipe) -> str:
        """Why `below` has nothing; the same on every rank."""
        reason = why_none_within(recipe, self.setting)
        limit = self.rank.job.retries.lower
        if limit == 0:
            reason = "a downgrade is forbidden (retries.lower: 0)"
        elif self.rank.first and not self._may_go_lower():
            reason = f"the budget retries.lower of {limit} is spent"
        return str(self.gate.firsts(reason))

    def _may_go_lower(self) -> bool:
        """By the downgrades since somebody last submitted or resumed the run."""
        spent = 0
        for event in self.rank.run.read_events():
            if isinstance(event, Submitted):
                spent = 0
            spent += isinstance(event, Downgrade)
        return spent < self.rank.job.retries.lower

    def went_down(self, recipe: Recipe, step: int, *, had_fitted: bool) -> None:
        """From `recipe`. One that had fitted may do so again, once."""
        if recipe in self._left or (had_fitted and recipe not in self._given_up):
            self._left.pop(recipe, None)  # to the end
            self._left[recipe] = step
        self._given_up.add(recipe)

    def to_climb_to(self, step: int) -> Recipe | None:
        """Before `step`: the recipe that was left last, when that is long enough ago; the same on every
        rank. None for good when running out of memory once more would end the run."""
        recipe, left = next(reversed(self._left.items()), (None, 0))
        if recipe is None or step < left + CLIMB_AFTER:
            return None
        if not self.gate.firsts(self.rank.first and self._may_go_lower()):
            self._left.clear()
            return None
        return recipe

    def climbed(self, recipe: Recipe) -> None:
        """Tried again, with success or without: never a third time."""
        self._left.pop(recipe, None)
