"""The recipe to fall back to after an OOM, and when to retry a larger one."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.planning.micro_batches import WITHIN_A_RUN
from launcher.planning.oom_fallback import why_none_within, within_a_run
from launcher.planning.plan import Plan
from launcher.rundir.files import read_record
from launcher.rundir.recipe_changes import changed
from launcher.spec.events import (
    AttemptStarted,
    Climb,
    Downgrade,
    Event,
    RecipeChange,
    Resumed,
    since_submission,
)
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting
from launcher.train.rank import Rank
from launcher.train.recovery.agreement import Agreement

CLIMB_AFTER = 200
"Steps without a failure after which the larger recipe is retried: its failure may have been temporary."


class Fallback:
    """Chooses recipes within one attempt. Rank 0 knows the plan and the retry budget and decides for all."""

    def __init__(self, rank: Rank, setting: Setting, agreement: Agreement) -> None:
        self.rank, self.setting, self.agreement = rank, setting, agreement
        self.planned: tuple[Recipe, ...] = ()
        self._may_retry: dict[Recipe, int] = {}
        """Recipes that fitted before they ran out of memory -> the step of the OOM; 0 for one in an earlier
        run."""
        self._given_up: set[Recipe] = set()
        if rank.first:
            if record := read_record(rank.run.plan):
                plan = Plan.model_validate(record)
                self.planned = (plan.recipe, *plan.ladder)
                self._may_retry |= dict.fromkeys(plan.above, 0)
                self._given_up.update(plan.above)
            self._replay(rank.run.read_events())
        shared = (self.planned, self._may_retry, self._given_up)
        self.planned, self._may_retry, self._given_up = agreement.from_rank_0(shared)

    def _replay(self, events: Sequence[Event]) -> None:
        """Replay the changes of recipe in earlier attempts, including those before the run was resumed."""
        recipe, done = self.rank.recipe, 0  # the recipe in use and the number of completed steps
        for event in events:
            if isinstance(event, AttemptStarted):
                recipe, done = Recipe.model_validate(event.recipe), 0
            elif isinstance(event, Resumed):
                done = event.step
            elif isinstance(event, RecipeChange):
                before, recipe = recipe, changed(recipe, event)
                step = event.step
                if isinstance(event, Climb):
                    self.retried(recipe)
                else:
                    self.fell_back(before, step or 0, had_fitted=step is not None and step > done + 1)
                done = step - 1 if step is not None else done
        for other in [recipe for recipe in self._may_retry if not self._may_return(recipe)]:
            del self._may_retry[other]

    def _may_return(self, recipe: Recipe) -> bool:
        """Return whether the run can switch to `recipe` without a restart and as the job asks."""
        now, job_size = self.rank.recipe, self.rank.job.recipe.micro_batch_size
        within = recipe.changes_from(now).keys() <= WITHIN_A_RUN
        same_batch = recipe.micro_batch_size * recipe.grad_accum == now.micro_batch_size * now.grad_accum
        higher = recipe != now and recipe.micro_batch_size >= now.micro_batch_size
        return within and same_batch and higher and (job_size is None or recipe.micro_batch_size <= job_size)

    def below(self, recipe: Recipe) -> Recipe | None:
        """Return the next smaller recipe that needs no restart, the same on every rank. None if there is none
        or the budget is spent."""
        may = self.agreement.from_rank_0(self.rank.first and self._may_go_lower())
        return next(iter(self.within(recipe)), None) if may else None

    def within(self, recipe: Recipe) -> tuple[Recipe, ...]:
        """Return every later recipe of the ladder that needs no restart, in order; the same on every rank."""
        return within_a_run(recipe, self.setting, self.planned)

    def why_none(self, recipe: Recipe) -> str:
        """Return why `below` returned None; the same on every rank."""
        reason = why_none_within(recipe, self.setting)
        limit = self.rank.job.retries.lower
        if limit == 0:
            reason = "a downgrade is forbidden (retries.lower: 0)"
        elif self.rank.first and not self._may_go_lower():
            reason = f"no retry is left (retries.lower: {limit})"
        return str(self.agreement.from_rank_0(reason))

    def _may_go_lower(self) -> bool:
        """Return whether `retries.lower` allows another downgrade. Counts since the last submit or resume."""
        events = since_submission(self.rank.run.read_events())
        return sum(isinstance(event, Downgrade) for event in events) < self.rank.job.retries.lower

    def fell_back(self, recipe: Recipe, step: int, *, had_fitted: bool) -> None:
        """Record that the run fell back from `recipe`. A recipe that had fitted may be retried once."""
        if recipe in self._may_retry or (had_fitted and recipe not in self._given_up):
            self._may_retry.pop(recipe, None)  # to the end
            self._may_retry[recipe] = step
        self._given_up.add(recipe)

    def recipe_to_retry(self, step: int) -> Recipe | None:
        """Return the recipe to retry before `step`, the same on every rank, or None.

        It is the one given up last, if that was at least CLIMB_AFTER steps ago. If another OOM would end the
        run, the result is None from now on.
        """
        recipe, oom_step = next(reversed(self._may_retry.items()), (None, 0))
        if recipe is None or step < oom_step + CLIMB_AFTER:
            return None
        if not self.agreement.from_rank_0(self.rank.first and self._may_go_lower()):
            self._may_retry.clear()
            return None
        return recipe

    def retried(self, recipe: Recipe) -> None:
        """Record that `recipe` was retried, successfully or not. It is not retried a second time."""
        self._may_retry.pop(recipe, None)
