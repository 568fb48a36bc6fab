"""The training loop: setting up, the step, evaluation, and when to save or stop."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from launcher.rundir.made_with import other_data
from launcher.spec.events import (
    BatchNorm,
    CheckpointFailed,
    CheckpointSaved,
    CouplesSamples,
    DataChanged,
    HandoverSkipped,
    Resumed,
    StateNotSaved,
    StepLeftOut,
)
from launcher.spec.recipe import Recipe
from launcher.spec.supported import unsupported
from launcher.spec.verdict import Phase
from launcher.train.batch_norm import check_batch_norm
from launcher.train.budget import Budget, MemoryBudget, Unlimited
from launcher.train.checkpoints.checkpoints import Checkpoints, Saved
from launcher.train.checkpoints.folder import BESIDE_WEIGHTS
from launcher.train.coupling import check_coupling
from launcher.train.data import to_device
from launcher.train.failure import fail
from launcher.train.feed import Feed, open_feed
from launcher.train.guard import Guard
from launcher.train.logged import open_logged
from launcher.train.metrics.recorder import Recorder, StepResult
from launcher.train.model import arranged, loss_of, new_model
from launcher.train.optimizer import divide_and_clip, learning_rate, set_learning_rate
from launcher.train.optimizers.build import build_optimizer
from launcher.train.optimizers.state import put_back, settings
from launcher.train.rank import Rank, SetupError
from launcher.train.recovery.collectives import kind_of
from launcher.train.recovery.current_recipe import CurrentRecipe
from launcher.train.recovery.grace_period import GracePeriod
from launcher.train.recovery.handover import Handover
from launcher.train.recovery.probe import Probe
from launcher.train.recovery.progress import Progress
from launcher.train.recovery.recovery import Recovery
from launcher.train.recovery.restart import Restart
from launcher.train.rng import seed_all
from launcher.train.scaler import LossScaler
from launcher.train.seeds import derive_seed
from launcher.train.sharding import UNLIKE, accumulate, used_parameters
from launcher.train.task import TaskError
from launcher.train.where import Where

MOST_COMPARED = 8
"Samples whose loss is computed at once and in halves, before the first step."


class Trainer:
    """One attempt of one rank. `train()` returns True when all steps are done, False when asked to stop.

    `feed`: opened before CUDA was touched; without it, it is opened here, which does on a CPU.
    """

    def __init__(
        self,
        rank: Rank,
        where: Where,
        budget: Budget,
        feed: Feed | None = None,
        restart: Restart | None = None,
    ) -> None:
        self.rank, self.where, self.budget = rank, where, budget
        job = rank.job
        if problems := unsupported(rank.recipe):
            raise SetupError("; ".join(problems))
        with budget.host_side():
            feed = feed or open_feed(rank, where)
        self.task, self.data, self.held_out, self.steps = feed.task, feed.training, feed.held_out, feed.steps
        with where.during("init", users=True):
            with budget.host_side():  # FSDP moves only its shards to the device
                model = new_model(self.task, rank.recipe)
            self.undeclared_batch_norm = check_batch_norm(model, rank)
            self.undeclared_coupling = check_coupling(self.task, rank)
            self.model = arranged(model, self.task, rank, budget)
        self.optimizer = build_optimizer(self.model, rank, budget)
        self.scaler = LossScaler(rank.recipe.grad_scaler)
        self.guard = Guard(self.scaler)
        samples = self.data.order.samples
        self.checkpoints = Checkpoints(self.model, self.optimizer, self.scaler, rank, samples, self.task)
        self.progress = Progress(rank.device, budget)
        self.handover = Handover(self.checkpoints, self.progress)
        if restart is not None:
            restart.handover = self.handover
        self.grace_period = GracePeriod(rank, restart)
        self.logged = open_logged(self.task.metrics)
        self.recorder = Recorder(rank, self.steps, self.task, budget)
        closing = partial(self.recorder.close, failed=True)
        self.recovery = recovery = Recovery(
            self.model,
            rank,
            where,
            budget,
            lambda error: fail(rank, error, where, closing, restart),
            self.task,
            self.data.dataset,
        )
        self.progress.begin(0, recovery.undo)
        probe = Probe(
            self.model, self.task, self.optimizer, self.scaler, rank, where, budget,
            recovery.undo, recovery.collectives, recovery.agreement,
        )  # fmt: skip
        setting = rank.setting(
            batch_norm=self.undeclared_batch_norm or job.model.batch_norm,
            couples_samples=self.undeclared_coupling or job.model.couples_samples,
        )
        self.current = CurrentRecipe(rank, setting, recovery, probe, self.recorder, self._follow)
        # Memory given back to the system is faulted in again: 3 % of a step of 100 ms on a CPU. Where nobody
        # counts it, gradients stay until the next backward pass can have their place.
        self._keeps_gradients = rank.device.type == "cpu" and isinstance(budget, Unlimited)
        # From here on each rank draws its own randomness; until here all drew the same.
        seed_all(derive_seed("rank", job.train.seed, rank.number))

    def train(self) -> bool:
        if self.undeclared_batch_norm:
            self.recorder.event(BatchNorm())  # the supervisor keeps the micro-batch at two or more
        if self.undeclared_coupling:
            self.recorder.event(CouplesSamples())  # the supervisor lowers the micro-batch last
        if self.rank.first:
            self._write_export_files()
        done = self._resume()
        if self.recovery.why_not is None:
            with self.budget.host_side():
                self.recovery.undo.secure(1 / self.rank.per_node)
        if done < self.steps:
            self.current.look_at_loss(lambda: self._first_samples(done + 1))
        if self._probes():
            self.current.probed()
        self.where.phase = "data"
        self.grace_period.watch()
        for step in range(done + 1, self.steps + 1):
            self.where.step = step
            self.grace_period.step_begins()
            self.current.climb(step)
            started = time.perf_counter()
            result = self.train_step(step)
            self._evaluate_and_record(step, result, time.perf_counter() - started - result.lost)
            self._tell_unsaved()
            self._tell(self.checkpoints.finished())
            if step == self.steps:
                self.grace_period.stop_watching()
                self._save(step, leaving=True)
                return True
            stop = result.stop
            if self._saves_after(step) and not stop:
                self._save(step, leaving=False)
                # A request that came meanwhile: no further step, no second checkpoint.
                stop = self.rank.add_up(self.rank.stop_requested())[0] > 0
            if stop:
                # The first rank to leave makes torchrun end the others: let them finish by themselves.
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                self.grace_period.stop_watching()
                self._save(step, leaving=True)
                self.rank.say(f"asked to stop: checkpoint of step {step} written")
                return False
        if done == self.steps and not self.checkpoints.saved:
            self._save(done, leaving=True)  # what the attempt before did not come to
        return True

    def _write_export_files(self) -> None:
        """Of the task. Without them the training goes on."""
        folder = self.rank.run.checkpoints / BESIDE_WEIGHTS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.budget.host_side():
                self.task.export_files(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()  # the task has none
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self.rank.say(f"what `launcher export` writes beside the weights could not be written: {what}")

    def _first_samples(self, step: int) -> list[Any]:
        """Two at least, and no more than a micro-batch where that has more."""
        samples = self.data.samples(step, 1)[:MOST_COMPARED]
        return samples if len(samples) > 1 else [*samples, *self.data.samples(step, 2)]

    def _tell_unsaved(self) -> None:
        """Once, of what the task and its model keep in attributes."""
        names, self.progress.unsaved = self.progress.unsaved, []
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            reason = (
                f"{', '.join(names[:5])}{more} changed as it trained. A repeated step puts this back, but no "
                "checkpoint holds it: where it matters, return it from state() of the task, or make it a "
                "buffer of the model"
            )
            self.recorder.event(StateNotSaved(names=names, reason=reason))
            self.rank.say(reason)

    def _evaluate_and_record(self, step: int, result: StepResult, seconds: float) -> None:
        evaluated = self.evaluate() if self._evaluates_after(step) else {}
        self.checkpoints.evaluated = (step, evaluated.get("eval_loss"))
        self.recorder.step(step, result, seconds, evaluated)
        # Evaluation runs the user's model, a tracker code of its own.
        self.progress.recorded(drew=bool(evaluated) or bool(self.rank.job.train.trackers))

    def train_step(self, step: int) -> StepResult:
        """One optimizer step over the global batch, in smaller micro-batches where memory runs out."""
        began = started = time.perf_counter()
        with self.recovery.raising_oom():
            while (sums := self._gradients(step)) is None:
                self.current.lower(step, began)
                began = time.perf_counter()
        self.recovery.done()
        total_loss, total_weight, stop, *logged = sums
        self.current.step_done()
        with self.where.during("optimizer"):
            # DDP and FSDP average over the ranks; the gradient of the step is the sum over its weight.
            factor = self.rank.world / total_weight if total_weight else 0.0
            factor /= self.scaler.factor
            grad_norm = divide_and_clip(self.model, factor, self.rank.job.train.clip_norm)
            self.recovery.wait_before_update()
            lr = learning_rate(step, self.steps, self.rank.job.train)
            set_learning_rate(self.optimizer, lr)
            loss, lost = _mean(total_loss, total_weight), began - started
            means = self.logged.means(logged)
            result = StepResult(loss, total_weight, grad_norm, lr, stop > 0, lost, means)
            with self.progress.updating(step, asdict(result), began):
                if reason := self.guard.refuses(total_loss, total_weight, grad_norm):
                    # The pass has written to BatchNorm's statistics, codebooks and the like.
                    with self.budget.host_side():
                        stay = self.recovery.undo.restore(tensors_alone=True).lost
                    if stay:
                        reason += f"; {', '.join(stay)} changed in it for the first time and stay changed"
                    self.rank.say(f"step {step}: {reason}; the model stays as it is")
                    self.recorder.event(StepLeftOut(step=step, reason=reason))
                    self.optimizer.zero_grad(set_to_none=True)
                else:
                    self.optimizer.step()
            if not self._keeps_gradients:
                self.optimizer.zero_grad(set_to_none=True)
        return result

    def _gradients(self, step: int) -> list[float] | None:
        """Loss, weight and requests to stop of all ranks, by one small collective; None when what is there of
        the gradients is to be discarded, on every rank."""
        recovery, recipe = self.recovery, self.current.recipe
        recovery.begin()
        self.logged.clear()
        loss, weight = self._zero(), self._zero()
        for index, batch in enumerate(self._made(self.data.micro_batches(step), "data"), start=1):
            if recovery.some_rank_outgrows(batch, recipe.micro_batch_size):
                if recovery.outgrows(batch, recipe.micro_batch_size):
                    self.current.outgrown(batch, self.data.samples(step, index))
                return None
            last = index == recipe.grad_accum
            found = recovery.attempt(
                kind_of(recipe, last=last), partial(self._micro_batch, batch, first=index == 1, last=last)
            )
            if found is not None:
                loss += found[0]
                weight += found[1]
            del found  # not into the next one's peak
            # Before the next batch is fetched, which may take its time; of the last one the sums tell.
            if not last and recovery.some_rank_failed():
                return None
        with self.where.during("optimizer"):
            used = used_parameters(self.model)
            failures, all_used, *sums = self.rank.add_up(
                recovery.failed, used, loss, weight, self.rank.stop_requested(), *self.logged.values()
            )
        if failures:
            return None
        if all_used != used * self.rank.world:
            raise TaskError(UNLIKE)
        return sums

    def _micro_batch(
        self, batch: Any, *, first: bool, last: bool
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Forward and backward; (loss sum, weight). What it holds dies with it."""
        where, recipe = self.where, self.current.recipe
        with where.during("data", users=True):
            batch = self._on_device(batch)
        self.recorder.micro_batch(batch, recipe.grad_accum)
        with accumulate(self.model, recipe, last=last):
            with where.during("forward", users=True):
                loss, weight = loss_of(self.task, self.model, batch, self.rank)
            if first and self._keeps_gradients:
                self.optimizer.zero_grad(set_to_none=True)
            with where.during("backward", users=True):
                self.scaler.scaled(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), weight

    def _probes(self) -> bool:
        if self.rank.job.retries.lower == 0:
            return False  # wants the failure, not what fits
        asked = self.rank.job.train.probe
        limited = self.rank.device.type == "cuda" or _limited(self.budget)
        return asked == "always" or (asked == "auto" and limited)

    def _follow(self, recipe: Recipe) -> None:
        """Make micro-batches as a changed recipe says; nothing is built again."""
        self.task.loss_chunks = recipe.loss_chunks
        self.where.micro_batch = recipe.micro_batch_size
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(True)  # as built: `grad_sync: each` leaves it alone
        self.data.change(recipe)
        if self.held_out is not None:
            self.held_out.micro = recipe.micro_batch_size

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss per unit of weight over the whole held-out data, and the task's own metrics."""
        assert self.held_out is not None
        loss, weight = self._zero(), self._zero()
        self.logged.clear()
        self.model.eval()
        for batch, counts in self._made(self.held_out.batches(), "evaluation"):
            with self.where.during("evaluation", users=True):
                batch = self._on_device(batch)
                batch_loss, batch_weight = loss_of(self.task, self.model, batch, self.rank)
            if counts:
                loss += batch_loss
                weight += batch_weight
        with self.where.during("evaluation"):
            total_loss, total_weight, *logged = self.rank.add_up(loss, weight, *self.logged.values())
        self.model.train()
        means = {f"eval_{name}": value for name, value in self.logged.means(logged).items()}
        return {"eval_loss": _mean(total_loss, total_weight), **means}

    def _made(self, batches: Iterator[Any], phase: Phase) -> Iterator[Any]:
        """Batches in host memory, made one by one."""
        while True:
            with self.where.during(phase, users=True), self.budget.host_side():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _on_device(self, batch: Any) -> Any:
        batch = to_device(batch, self.rank.device)
        self.budget.track(batch)
        return batch

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.rank.device)

    def _resume(self) -> int:
        kept = settings(self.optimizer)
        with self.where.during("checkpoint"):
            resumed = self.handover.resume()
        put_back(self.optimizer, kept)
        step = resumed.step
        self.progress.begin(step, self.recovery.undo, resumed.unrecorded)
        if resumed.skipped is not None:
            self.recorder.event(HandoverSkipped(reason=resumed.skipped))
        if resumed.source is not None:
            self.recorder.event(Resumed(step=step, from_=resumed.source))
            self.rank.say(f"resumed after step {step} of {self.steps}")
            if reason := other_data(self.checkpoints.before, self.rank.job, self.data.order.samples):
                self.recorder.event(DataChanged(step=step, reason=reason))
                self.rank.say(reason)
        elif self.rank.first and (resumed.skipped is not None or self.rank.run.read_metrics()):
            self.recorder.event(Resumed(step=0, from_="nothing"))
            self.rank.say("begins again with step 1: nothing is left of the steps before")
        if resumed.unrecorded is not None:
            self.where.step = step
            seconds = resumed.unrecorded["seconds"]
            self._evaluate_and_record(step, StepResult(**resumed.unrecorded["result"]), seconds)
        return step

    def _save(self, step: int, *, leaving: bool) -> None:
        """`leaving`: it must be complete before this returns, and need not be written twice."""
        with self.where.during("checkpoint"):
            self._zero()  # for a fire drill: what follows is the host's and counts for nothing
            with self.budget.host_side():
                self._tell(self.checkpoints.finished(wait=True))
                if not leaving:
                    self._tell(self.checkpoints.save(step))
                elif self.checkpoints.saved != step:
                    self._tell(self.checkpoints.save_last(step))

    def _tell(self, saved: Saved | None) -> None:
        """A checkpoint that failed costs the steps since the last good one if worse follows, and no more."""
        if saved is None:
            return
        if saved.problem is None:
            self.recorder.event(CheckpointSaved(step=saved.step, path=str(saved.path)))
        else:
            self.recorder.event(CheckpointFailed(step=saved.step, reason=saved.problem))
            self.rank.say(f"{saved.problem}. The training goes on, the next checkpoint tries again")

    def _saves_after(self, step: int) -> bool:
        every = self.rank.job.train.checkpoint_every
        return every is not None and step % every == 0

    def _evaluates_after(self, step: int) -> bool:
        every = self.rank.job.train.eval_every
        return every is not None and (step == self.steps or step % every == 0)


def _limited(budget: Budget) -> bool:
    return isinstance(budget, MemoryBudget) and budget.limit is not None


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else 0.0
