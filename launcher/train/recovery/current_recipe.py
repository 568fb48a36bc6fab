"""The current recipe: changed by the probe, by falling back after an OOM, and by retrying a larger one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from launcher.planning.micro_batches import with_sizes_between
from launcher.planning.oom_fallback import words_of
from launcher.spec.events import Climb, CouplesSamples, Downgrade, Probed, ProbeSkipped, RecoveryOff
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting
from launcher.train.coupled_samples import Split
from launcher.train.metrics.recorder import Recorder
from launcher.train.rank import Rank
from launcher.train.recovery.fallback import CLIMB_AFTER, Fallback
from launcher.train.recovery.probe import Probe
from launcher.train.recovery.recovery import Failure, Recovery, oom_error_of, sizes_of
from launcher.train.task import TaskError

MEAN = (
    "loss() returns a mean but must return the sum over its batch: the loss of the first samples is the mean "
    "of the losses of their halves. Return the sum and its weight, such as "
    "F.cross_entropy(logits, y, reduction='sum'), len(y): launcher divides by the weight of the whole step"
)


UNDECIDED = (
    "could not check that loss() returns a sum and not a mean: the random numbers that it draws change its "
    "value too much"
)


class CurrentRecipe:
    """The recipe of this attempt. It changes on all ranks at once; `apply` applies a change to the loop."""

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
        self.fallback = Fallback(rank, setting, recovery.agreement)
        self._fitted = self._reported_off = False

    def step_done(self) -> None:
        """Record that a step with the current recipe fitted."""
        self._fitted = True

    def check_first_step(self, samples: Callable[[], list[Any]], check_data: Callable[[], object]) -> None:
        """Check the data, and whether the loss couples samples unless the task declares it.

        Every rank calls this before the first step. `samples` returns a few of the first samples. What
        `check_data` changes is undone, too.

        Raises: TaskError if the loss is a mean.
        """
        events = self.rank.run.read_events() if self.rank.first else []
        recorded = any(isinstance(event, CouplesSamples) for event in events)
        couples = self.setting.couples_samples or bool(self.recovery.agreement.from_rank_0(recorded))
        off = self.probe.off  # the same on every rank so far
        with self.probe.undone():
            check_data()
            if not couples and off is None:
                [split] = self.recovery.agreement.maximum(self.probe.split(self.recipe, samples))
        if not couples and off is not None:
            self.rank.say(f"could not check that loss() returns a sum and not a mean: {off}")
        elif not couples:
            if split == Split.MEAN:
                raise TaskError(MEAN)
            if split == Split.UNDECIDED:
                self.rank.say(UNDECIDED)
            couples = split == Split.COUPLED
            if couples:
                self.recorder.event(CouplesSamples(attempt=self.attempt))  # later attempts read this event
                self.rank.say(
                    "the loss of a batch differs from that of its halves: it couples samples, or has a term, "
                    "such as a penalty on the weights, that is not multiplied by the weight of the batch. "
                    "launcher lowers the micro-batch only as a last resort (couples_samples = True in the "
                    "task declares it)"
                )
        if couples:
            self.setting = self.fallback.setting = replace(self.setting, couples_samples=True)

    def use_largest(self, since: float | None = None) -> None:
        """Use the largest micro-batch that fits on every rank. The ranks search independently, then agree.
        `since` is the time.perf_counter at which training stopped, if before this call."""
        began, agreement, before = time.perf_counter(), self.recovery.agreement, self.recipe
        rungs, asked = with_sizes_between(before, self.fallback.within(before)), self.probe.tried
        with self.probe.undone():
            first_fit = self.probe.largest(rungs)
            [lowest] = agreement.maximum(len(rungs) if first_fit is None else first_fit)
            off = self._probe_is_off()
            if not off and lowest < len(rungs):
                size = rungs[lowest].micro_batch_size
                self.recovery.record_size(self.probe.batch(size), size)
        if off:
            return
        if lowest == len(rungs):
            self._give_up(self.probe.failure if first_fit is None or first_fit > 0 else None)
        self._take(rungs[lowest])
        seconds = round(time.perf_counter() - began, 3)
        self.recorder.event(
            Probed(
                attempt=self.attempt,
                planned=before.micro_batch_size,
                micro_batch_size=self.recipe.micro_batch_size,
                asked=self.probe.tried - asked,
                seconds=seconds,
            )
        )
        if self.recipe != before:
            text = f"{before.micro_batch_size} samples at once do not fit"
            lost = seconds if since is None else round(time.perf_counter() - since, 3)
            self._report(Downgrade, before, text, phase="probe", seconds=lost)

    def _probe_is_off(self) -> bool:
        """Return whether the probe is off on any rank; the same on every rank. Report the reason once."""
        answers = self.recovery.agreement.all_values((self.probe.off, self.probe.may_call_collectives))
        offs = [(off, may_call) for off, may_call in answers if off is not None]
        if offs and not self._reported_off:
            self._reported_off = True
            self.recorder.event(ProbeSkipped(attempt=self.attempt, reason=offs[0][0]))
            self.rank.say(f"probe skipped: {offs[0][0]}")
        calls = [off for off, may_call in offs if may_call]
        if calls and self.recovery.why_not is None and self.recovery.collectives is not None:
            self.recovery.why_not = calls[0]
            self.recorder.event(RecoveryOff(attempt=self.attempt, reason=calls[0]))
        return bool(offs)

    def outgrown(self, batch: Any, samples: list[Any]) -> None:
        """Let the next probe use the largest of these samples: their batch is larger than any probed one."""
        self.recovery.record_size(batch, len(samples))
        self.probe.sample = max(samples, key=lambda one: sum(sizes_of(self.probe.task.collate([one]))))

    def lower(self, step: int, began: float) -> None:
        """Choose a recipe after an OOM on some rank in this step, or after a batch larger than any probed.
        `began` is the start of the discarded pass, by time.perf_counter."""
        recovery, before = self.recovery, self.recipe
        suspect = recovery.suspect
        answers = recovery.agreement.all_values((recovery.failure, suspect and suspect.issued))
        failures = [failure for failure, _ in answers if failure is not None]
        suspects = [issued for _, issued in answers if issued is not None]
        if suspects and not failures:
            # The earliest exception is a cause; later ones may follow from the zeros that its rank sent.
            if suspect is not None and suspect.issued == min(suspects):
                recovery.raise_suspect()
            recovery.agreement.wait_for_the_end()
        lost = [names for names in recovery.agreement.all_values(recovery.discard()) if names]
        if lost:
            names = ", ".join(lost[0])
            if not failures:
                raise RuntimeError(f"a batch is larger than any before, and {names} cannot be restored")
            recovery.where.why_not = f"{names} changed for the first time, and there is no copy of it"
            self._give_up(recovery.failure)
        if not failures:
            self.use_largest(since=began)
            return
        recipe = self.fallback.below(before)
        if recipe is None:
            recovery.where.why_not = self.fallback.why_none(before)
            self._give_up(recovery.failure)
        self.fallback.fell_back(before, step, had_fitted=self._fitted)
        self._take(recipe)
        first = failures[0]
        seconds = round(time.perf_counter() - began, 3)
        where = {"step": step, "phase": first.phase, "rank": first.rank}
        # The log must not have the words of an error that the run survives: they would explain a later end.
        cause = f"memory ran out in {first.phase} of step {step} on rank {first.rank}"
        self._report(Downgrade, before, cause, because=first.text, **where, seconds=seconds)

    def climb(self, step: int) -> None:
        """Retry a larger recipe before this step: the failure may have been temporary."""
        recipe, before = self.fallback.recipe_to_retry(step), self.recipe
        if recipe is None:
            return
        self.fallback.retried(recipe)
        with self.probe.undone():
            [misfits] = self.recovery.agreement.maximum(not self.probe.fits(recipe))
            off = self._probe_is_off()
        if not misfits and not off:
            self._take(recipe)
            self._report(Climb, before, f"no failure in {CLIMB_AFTER} steps", step=step)

    def _give_up(self, failure: Failure | None) -> NoReturn:
        """Raise the OOM to end the attempt; a rank without a failure waits for the others to end it."""
        if failure is None:
            self.recovery.agreement.wait_for_the_end()
        raise oom_error_of(failure, self.recovery.where)

    def _take(self, recipe: Recipe) -> None:
        if recipe != self.recipe:
            self.recipe, self._fitted = recipe, False
            self.apply(recipe)

    def _report(
        self, change: type[Downgrade | Climb], before: Recipe, cause: str, because: str = "", **fields: Any
    ) -> None:
        """Report the change. `because`: the message of the error, if there was one."""
        words, text = words_of(self.recipe, before, self.setting), (because or cause).partition("\n")[0]
        changes = self.recipe.changes_from(before)
        event = change(
            attempt=self.attempt, in_process=True, changes=changes, reason=words, because=text, **fields
        )
        self.recorder.event(event)
        self.rank.say(f"{event.kind}: {words} ({cause})")
