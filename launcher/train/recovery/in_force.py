"""The recipe in force: what the probe found, what running out of memory left of it, what came back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

from launcher.planning.batches import micro_batches
from launcher.planning.lower import words_of
from launcher.spec.recipe import Recipe
from launcher.spec.rules import Setting
from launcher.train.metrics.recorder import Recorder
from launcher.train.rank import Rank
from launcher.train.recovery.descent import CLIMB_AFTER, Descent
from launcher.train.recovery.probe import Probe
from launcher.train.recovery.recovery import Failure, Recovery, raised_again, sizes_of


class InForce:
    """Changes on all ranks at once, in the same way. `apply` makes the loop follow."""

    def __init__(
        self,
        rank: Rank,
        setting: Setting,
        recovery: Recovery,
        probe: Probe,
        recorder: Recorder,
        apply: Callable[[Recipe], None],
    ) -> None:
        self.rank, self.setting, self.recovery, self.probe = rank, setting, recovery, probe
        self.recorder, self.apply = recorder, apply
        self.recipe = rank.recipe
        if recovery.why_not is not None:
            self._event("recovery-off", reason=recovery.why_not)
        self.descent = Descent(rank, setting, recovery.gate)
        self._fitted = False

    def step_done(self) -> None:
        """With this recipe, and it fitted."""
        self._fitted = True

    def probed(self, since: float | None = None) -> None:
        """Take the largest micro-batch that fits on every rank. Nobody waits until each knows its own.
        `since` when, by time.perf_counter, the training does not get on, if before this."""
        began, gate, before = time.perf_counter(), self.recovery.gate, self.recipe
        rungs, asked = micro_batches(before, self.setting), self.probe.asked
        found = self.probe.largest(rungs)
        [lowest] = gate.highest(len(rungs) if found is None else found)
        if off := next(filter(None, gate.everyones(self.probe.off)), None):
            self._event("probe-skipped", reason=off)
            if self.recovery.why_not is None and self.recovery.collectives is not None:
                self.recovery.why_not = off
                self._event("recovery-off", reason=off)
            return
        if lowest == len(rungs) or self._keeps_micro_batch(before, rungs[lowest]):
            self._give_up(self.probe.failure if found is None or found > 0 else None)
        self._take(rungs[lowest])
        self.recovery.meets(self.probe.batch(self.recipe.micro_batch_size), self.recipe.micro_batch_size)
        seconds = round(time.perf_counter() - began, 3)
        sizes = {"planned": before.micro_batch_size, "micro_batch_size": self.recipe.micro_batch_size}
        self._event("probe", **sizes, asked=self.probe.asked - asked, seconds=seconds)
        if self.recipe != before:
            text = f"{before.micro_batch_size} samples at once do not fit"
            lost = seconds if since is None else round(time.perf_counter() - since, 3)
            self._tell("downgrade", before, text, phase="probe", seconds=lost)

    def _keeps_micro_batch(self, recipe: Recipe, found: Recipe) -> bool:
        smaller = found.micro_batch_size < recipe.micro_batch_size
        return smaller and self.setting.batch_norm and self.descent.restarts_for(recipe)

    def outgrown(self, batch: Any, samples: list[Any]) -> None:
        """The batch of these samples is larger than what the probe knows: it takes the largest next."""
        self.recovery.meets(batch, len(samples))
        self.probe.sample = max(samples, key=lambda one: sum(sizes_of(self.probe.task.collate([one]))))

    def lower(self, step: int, began: float) -> None:
        """After some rank ran out of memory in this step, or met a batch larger than what was probed.
        `began`: the pass that is thrown away, by time.perf_counter."""
        recovery, before = self.recovery, self.recipe
        failures = [one for one in recovery.gate.everyones(recovery.failure) if one is not None]
        recovery.discard()
        if not failures:
            self.probed(since=began)
            return
        recipe = self.descent.below(before)
        if recipe is None:
            recovery.where.why_not = self.descent.why_nothing(before)
            self._give_up(recovery.failure)
        self.descent.went_down(before, step, had_fitted=self._fitted)
        self._take(recipe)
        first = failures[0]
        seconds = round(time.perf_counter() - began, 3)
        where = {"step": step, "phase": first.phase, "rank": first.rank}
        self._tell("downgrade", before, first.text, **where, seconds=seconds)

    def climb(self, step: int) -> None:
        """Before this step, where nothing is under way: try again what only a passing failure may have
        taken."""
        recipe, before = self.descent.to_climb_to(step), self.recipe
        if recipe is None:
            return
        self.descent.climbed(recipe)
        [misfits] = self.recovery.gate.highest(not self.probe.fits(recipe))
        if not misfits:
            self._take(recipe)
            self._tell("climb", before, f"no failure in {CLIMB_AFTER} steps", step=step)

    def _give_up(self, failure: Failure | None) -> NoReturn:
        """What is left is a restart, which the ranks that failed bring about."""
        if failure is None:
            self.recovery.gate.wait_for_the_end()
        raise raised_again(failure, self.recovery.where)

    def _take(self, recipe: Recipe) -> None:
        if recipe != self.recipe:
            self.recipe, self._fitted = recipe, False
            self.apply(recipe)

    def _tell(self, event: str, before: Recipe, text: str, **fields: Any) -> None:
        """`text`: what brought it about."""
        words, text = words_of(self.recipe, before, self.setting), text.partition("\n")[0]
        changes = {name: list(pair) for name, pair in self.recipe.changes_from(before).items()}
        self._event(event, in_process=True, changes=changes, reason=words, because=text, **fields)
        self.rank.say(f"{event}: {words} ({text})")

    def _event(self, kind: str, **fields: Any) -> None:
        self.recorder.event(kind, attempt=self.rank.attempt.number, **fields)
