"""The recipe in force: what the probe found, what running out of memory left of it, what came back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from launcher.planning.batches import finely
from launcher.planning.lower import words_of
from launcher.spec.events import Climb, CouplesSamples, Downgrade, Probed, ProbeSkipped, RecoveryOff
from launcher.spec.recipe import Recipe
from launcher.spec.rules import Setting
from launcher.train.coupling import Split
from launcher.train.metrics.recorder import Recorder
from launcher.train.rank import Rank
from launcher.train.recovery.descent import CLIMB_AFTER, Descent
from launcher.train.recovery.probe import Probe
from launcher.train.recovery.recovery import Failure, Recovery, raised_again, sizes_of
from launcher.train.task import TaskError

MEAN = (
    "loss() returns the mean of its batch where it has to return the sum: the loss of the first samples is "
    "the mean of the losses of their halves. Return the sum and its weight, such as "
    "F.cross_entropy(logits, y, reduction='sum'), len(y): launcher divides by the weight of the whole step"
)


UNDECIDED = (
    "whether loss() returns a sum, as it has to, or a mean could not be told: the random numbers that it "
    "draws change it too much"
)


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
        self.recorder, self.apply, self.attempt = recorder, apply, rank.attempt.number
        self.recipe = rank.recipe
        if recovery.why_not is not None:
            recorder.event(RecoveryOff(attempt=self.attempt, reason=recovery.why_not))
        self.descent = Descent(rank, setting, recovery.gate)
        self._fitted = self._said_off = False

    def step_done(self) -> None:
        """With this recipe, and it fitted."""
        self._fitted = True

    def look_at_loss(self, samples: Callable[[], list[Any]]) -> None:
        """Before the first step, on every rank: whether the loss couples samples, which no declaration says.
        `samples`: a few of the first ones. Raises TaskError for one that is a mean."""
        if self.setting.couples_samples:
            return
        told = self.rank.run.read_events() if self.rank.first else []
        found = bool(self.recovery.gate.firsts(any(isinstance(one, CouplesSamples) for one in told)))
        if not found:
            with self.probe.unseen():
                [rank_found] = self.recovery.gate.highest(self.probe.split(self.recipe, samples))
            if rank_found == Split.MEAN:
                raise TaskError(MEAN)
            if rank_found == Split.UNDECIDED:
                self.rank.say(UNDECIDED)
            found = rank_found == Split.COUPLED
            if found:
                self.recorder.event(CouplesSamples(attempt=self.attempt))  # later attempts keep to it
                self.rank.say(
                    "the loss of a batch is not that of its halves: it couples samples. The micro-batch is "
                    "lowered only when nothing else is left (couples_samples = True in the task declares it)"
                )
        if found:
            self.setting = self.descent.setting = replace(self.setting, couples_samples=True)

    def probed(self, since: float | None = None) -> None:
        """Take the largest micro-batch that fits on every rank. Nobody waits until each knows its own.
        `since` when, by time.perf_counter, the training does not get on, if before this."""
        began, gate, before = time.perf_counter(), self.recovery.gate, self.recipe
        rungs, asked = finely(before, self.descent.within(before)), self.probe.asked
        with self.probe.unseen():
            found = self.probe.largest(rungs)
            [lowest] = gate.highest(len(rungs) if found is None else found)
            off = self._probe_is_off()
            if not off and lowest < len(rungs):
                size = rungs[lowest].micro_batch_size
                self.recovery.meets(self.probe.batch(size), size)
        if off:
            return
        if lowest == len(rungs):
            self._give_up(self.probe.failure if found is None or found > 0 else None)
        self._take(rungs[lowest])
        seconds = round(time.perf_counter() - began, 3)
        self.recorder.event(
            Probed(
                attempt=self.attempt,
                planned=before.micro_batch_size,
                micro_batch_size=self.recipe.micro_batch_size,
                asked=self.probe.asked - asked,
                seconds=seconds,
            )
        )
        if self.recipe != before:
            text = f"{before.micro_batch_size} samples at once do not fit"
            lost = seconds if since is None else round(time.perf_counter() - since, 3)
            self._tell(Downgrade, before, text, phase="probe", seconds=lost)

    def _probe_is_off(self) -> bool:
        """Whether some rank's probe can find out nothing; the same on every rank, and told once."""
        everyones = self.recovery.gate.everyones((self.probe.off, self.probe.may_send))
        offs = [(off, may_send) for off, may_send in everyones if off is not None]
        if offs and not self._said_off:
            self._said_off = True
            self.recorder.event(ProbeSkipped(attempt=self.attempt, reason=offs[0][0]))
            self.rank.say(f"probe skipped: {offs[0][0]}")
        sends = [off for off, may_send in offs if may_send]
        if sends and self.recovery.why_not is None and self.recovery.collectives is not None:
            self.recovery.why_not = sends[0]
            self.recorder.event(RecoveryOff(attempt=self.attempt, reason=sends[0]))
        return bool(offs)

    def outgrown(self, batch: Any, samples: list[Any]) -> None:
        """The batch of these samples is larger than what the probe knows: it takes the largest next."""
        self.recovery.meets(batch, len(samples))
        self.probe.sample = max(samples, key=lambda one: sum(sizes_of(self.probe.task.collate([one]))))

    def lower(self, step: int, began: float) -> None:
        """After some rank ran out of memory in this step, or met a batch larger than what was probed.
        `began`: the pass that is thrown away, by time.perf_counter."""
        recovery, before = self.recovery, self.recipe
        suspect = recovery.suspect
        everyones = recovery.gate.everyones((recovery.failure, suspect and suspect.issued))
        failures = [failure for failure, _ in everyones if failure is not None]
        suspects = [issued for _, issued in everyones if issued is not None]
        if suspects and not failures:
            # What came of the zeros of a rank came after them.
            if suspect is not None and suspect.issued == min(suspects):
                recovery.raise_suspect()
            recovery.gate.wait_for_the_end()
        lost = [names for names in recovery.gate.everyones(recovery.discard()) if names]
        if lost:
            names = ", ".join(lost[0])
            if not failures:
                raise RuntimeError(
                    f"a batch is larger than any before, and {names} cannot be put back as it was"
                )
            recovery.where.why_not = f"{names} changed for the first time, and how it was before is not known"
            self._give_up(recovery.failure)
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
        self._tell(Downgrade, before, first.text, **where, seconds=seconds)

    def climb(self, step: int) -> None:
        """Before this step, where nothing is under way: try again what only a passing failure may have
        taken."""
        recipe, before = self.descent.to_climb_to(step), self.recipe
        if recipe is None:
            return
        self.descent.climbed(recipe)
        with self.probe.unseen():
            [misfits] = self.recovery.gate.highest(not self.probe.fits(recipe))
            off = self._probe_is_off()
        if not misfits and not off:
            self._take(recipe)
            self._tell(Climb, before, f"no failure in {CLIMB_AFTER} steps", step=step)

    def _give_up(self, failure: Failure | None) -> NoReturn:
        """What is left is a restart, which the ranks that failed bring about."""
        if failure is None:
            self.recovery.gate.wait_for_the_end()
        raise raised_again(failure, self.recovery.where)

    def _take(self, recipe: Recipe) -> None:
        if recipe != self.recipe:
            self.recipe, self._fitted = recipe, False
            self.apply(recipe)

    def _tell(self, change: type[Downgrade | Climb], before: Recipe, text: str, **fields: Any) -> None:
        """`text`: what brought it about."""
        words, text = words_of(self.recipe, before, self.setting), text.partition("\n")[0]
        changes = self.recipe.changes_from(before)
        event = change(
            attempt=self.attempt, in_process=True, changes=changes, reason=words, because=text, **fields
        )
        self.recorder.event(event)
        self.rank.say(f"{event.kind}: {words} ({text})")
