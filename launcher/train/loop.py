"""The training loop: set-up, steps, evaluation, saving and stopping."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from launcher.rundir.made_with import data_change
from launcher.spec.errors import first_line
from launcher.spec.events import (
    AdapterWarning,
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
from launcher.spec.listed_names import listed
from launcher.spec.mesh import in_buckets
from launcher.spec.pipeline_schedule import in_groups, table_of
from launcher.spec.recipe import APPROXIMATE, REPLICATED, Recipe
from launcher.spec.unsupported_recipes import unsupported
from launcher.spec.verdict import Phase
from launcher.train.adapters.adapter import write_config
from launcher.train.adapters.adapter_use import warnings_about
from launcher.train.checkpoints.checkpoints import Checkpoints, Saved
from launcher.train.checkpoints.folder import BESIDE_WEIGHTS
from launcher.train.coupled_samples import to_compare
from launcher.train.cpu_memory_budget import Budget, MemoryBudget
from launcher.train.data.data import to_device
from launcher.train.data.feed import Feed, check_lengths, open_feed
from launcher.train.data.same_samples import (
    APART,
    DIFFERENT,
    DIVIDED,
    SameSamples,
    are_divided,
    number_of,
)
from launcher.train.data.slow_fetch import SlowFetch
from launcher.train.ddp import without_ddp
from launcher.train.detected_properties import setting_of
from launcher.train.error_report import fail
from launcher.train.forward import check_gradients_on, loss_of
from launcher.train.handover.grace_period import GracePeriod
from launcher.train.handover.handover import Handover
from launcher.train.handover.progress import Progress
from launcher.train.handover.restart import Restart
from launcher.train.mesh import meshes, replicas_of
from launcher.train.metrics.recorder import Recorder, StepResult
from launcher.train.model import arranged, new_model
from launcher.train.optimizers.build import build_optimizer
from launcher.train.optimizers.gradient_norm import divide_and_clip
from launcher.train.optimizers.learning_rate import set_learning_rate
from launcher.train.optimizers.offload import gradient_of
from launcher.train.optimizers.state import restore_settings, settings
from launcher.train.phase import Where
from launcher.train.pipeline.stage import Stages
from launcher.train.rank import Rank, SetupError
from launcher.train.recovery.collective_order import CollectiveOrder, Issuer
from launcher.train.recovery.collectives import kind_of
from launcher.train.recovery.current_recipe import CurrentRecipe
from launcher.train.recovery.probe import Probe
from launcher.train.recovery.recovery import Recovery, sizes_of
from launcher.train.rng import seed_all
from launcher.train.scaler import LossScaler
from launcher.train.seeds import derive_seed
from launcher.train.sharding.cleanup import clean
from launcher.train.sharding.first_rank import buffers_of_first_rank
from launcher.train.sharding.replicas import Replicas
from launcher.train.sharding.same_parameters import COMPARED, check_same_model, check_same_parameters
from launcher.train.sharding.sharding import (
    DIFFERENT_PARAMETERS,
    NO_GRADIENT_SEEN,
    accumulate,
    fsdp_roots,
    is_gathered,
    used_parameters,
)
from launcher.train.skipped_steps import Guard
from launcher.train.step_in_backward import StepInBackward
from launcher.train.task import TaskError
from launcher.train.task_metrics import NOTHING, Sums, added, open_logged
from launcher.train.tensor.replicated_gradients import Copies
from launcher.train.undo.containers import Containers


class Trainer:
    """One attempt of one rank. `train()` returns True when all steps are done, False when asked to stop.

    `feed` must be opened before the first call to CUDA. If it is None, it is opened here: for CPU ranks only.
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
            check_lengths(feed, rank)
        self.task, self.data, self.held_out, self.steps = feed.task, feed.training, feed.held_out, feed.steps
        with where.during("init", users=True):
            with budget.host_side():  # FSDP moves only the shards to the device
                model = new_model(self.task, rank.recipe, say=rank.say)
                check_same_model(model, rank)
            self.setting = setting_of(model, self.task, rank)
            with budget.host_side():  # a mesh keeps the numbers of its ranks in host memory
                mesh = meshes(rank)
            self.model = arranged(model, self.task, rank, budget, mesh)
        self._adapters_unchecked = self.task.adapter is not None
        self.stages = Stages(self.model, self.task, rank, mesh.tensor) if rank.recipe.pipeline > 1 else None
        # Under FSDP the shards, as after each pass.
        self._parameters = [*without_ddp(self.model).named_parameters()]
        self._modules = _modules_of(self.model)
        "The modules and parameters of each module when no parameter was unknown to the optimizer."
        self._frozen = [(name, p) for name, p in self._parameters if not p.requires_grad]
        self.optimizer = build_optimizer(self.model, rank, budget, mesh.data)
        self.replicas: Replicas | None = None
        if rank.recipe.sharding in REPLICATED and not in_buckets(rank.recipe) and rank.mesh.data > 1:
            self.replicas = Replicas(self.model, mesh.data)
        self._replicas_of_this = replicas_of(mesh, rank.recipe)
        self._exported_buffers: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        "Gives the model the buffers that an export has. DDP does so in each forward pass."
        if rank.mesh.data > 1 and not in_buckets(rank.recipe):
            self._exported_buffers = partial(buffers_of_first_rank, self.model, mesh.data, budget)
        first_problem = self.stages.first_problem if self.stages is not None else None
        self.copies = Copies(mesh, self.task, rank, self.model, first_problem)
        self.in_backward: StepInBackward | None = None
        if rank.recipe.optimizer_step == "backward":
            watched = not rank.recipe.compile
            self.in_backward = StepInBackward(
                self.model, self.optimizer, self.copies, rank.world, watched=watched
            )
        self.scaler = LossScaler(rank.recipe.grad_scaler)
        self.guard = Guard(self.scaler)
        samples = self.data.order.samples
        with budget.host_side():  # it keeps the first values of some buffers there
            self.checkpoints = Checkpoints(self.model, self.optimizer, self.scaler, rank, samples, self.task)
        self.progress = Progress(rank.device, budget)
        self.handover = Handover(self.checkpoints, self.progress)
        if restart is not None:
            restart.handover = self.handover
        self.grace_period = GracePeriod(rank, restart)
        self.samples = SameSamples(rank)
        self.slow_fetch = SlowFetch(rank)
        self.logged = open_logged(self.task.metrics)
        self.recorder = Recorder(rank, self.steps, self.task, budget, self.model, self.optimizer)
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
        collectives = recovery.collectives
        self.order = collectives.order if collectives else CollectiveOrder(self.model, Issuer())
        if rank.mesh.pipeline == 1:  # stages have different units
            where.collectives = self.order.record
        self.progress.begin(0, recovery.undo)
        probe = Probe(self.task, self.data.dataset, self.optimizer, self.scaler, recovery, self.in_backward)
        self.current = CurrentRecipe(rank, self.setting, recovery, probe, self.recorder, self._follow)
        # From here on each rank has its own random state; until here all ranks had the same one. A
        # tensor-parallel group computes the same activations, so its ranks draw the same numbers.
        seed_all(derive_seed("rank", job.train.seed, rank.number // rank.mesh.tensor))

    def train(self) -> bool:
        check_gradients_on(f"the code of task {self.rank.job.task}")
        declared = self.rank.job.model
        if self.setting.batch_norm and not declared.batch_norm:
            self.recorder.event(BatchNorm())  # the supervisor keeps the micro-batch at two or more
        if self.setting.couples_samples and not declared.couples_samples:
            self.recorder.event(CouplesSamples())  # the supervisor lowers the micro-batch last
        if self.rank.first:
            self._write_export_files()
        if self.rank.recipe.activations == "compress":
            self.rank.say(APPROXIMATE)
        if self.rank.recipe.compile:
            self.rank.say("compiling the model's blocks: the first step may take minutes")
        done = self._resume()
        if self.recovery.why_not is None:
            with self.budget.host_side():
                self.recovery.undo.secure(1 / self.rank.per_node)
        if done < self.steps:
            self.task.current_step = done + 1
            self.current.check_first_step(
                lambda: self._first_samples(done + 1), lambda: self._compare_a_sample(done + 1)
            )
        if self._probes():
            self.current.use_largest()
        self.where.phase = "data"
        self.slow_fetch.watch()
        self.grace_period.watch()
        if self._checkpoint_is_due(done):
            self.where.step = done
            self._save(done, leaving=done == self.steps)
        for step in range(done + 1, self.steps + 1):
            self.where.step = self.task.current_step = step
            self.grace_period.step_begins()
            self.current.climb(step)
            started = time.perf_counter()
            result = self.train_step(step)
            if step == done + COMPARED:
                self._check_parameters_to_save()
            self._look_at_adapters(result)
            self._evaluate_and_record(step, result, time.perf_counter() - started - result.lost)
            self._report_unsaved()
            self._report_checkpoint(self.checkpoints.finished())
            if step == self.steps:
                if done == 0:
                    with self.where.during("optimizer"):
                        self.guard.check_trained()
                self.grace_period.stop_watching()
                self._save(step, leaving=True)
                return True
            stop = result.stop
            if self._saves_after(step) and not stop:
                self._save(step, leaving=False)
                # If a stop request arrived during the save, skip the next step and a second checkpoint.
                stop = self.rank.add_up(self.rank.stop_requested())[0] > 0
            if stop:
                # The other ranks are ended when the first one leaves; ignoring SIGHUP lets them finish.
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                self.grace_period.stop_watching()
                self._save(step, leaving=True)
                self.rank.say(f"asked to stop: checkpoint of step {step} written")
                return False
        return True

    def _write_export_files(self) -> None:
        """Write the task's export files. If this fails, training continues."""
        folder = self.rank.run.checkpoints / BESIDE_WEIGHTS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.budget.host_side():
                self.task.export_files(folder)
                if self.task.adapter is not None:
                    write_config(without_ddp(self.model), folder)
            with contextlib.suppress(OSError):
                folder.rmdir()  # the task wrote no files
        except Exception as error:
            self.rank.say(f"the task's files for `launcher export` could not be written: {first_line(error)}")

    def _compare_a_sample(self, step: int) -> None:
        """Report if ranks have different samples under one index."""
        numbers: list[float] = []
        with self.budget.host_side(), contextlib.suppress(Exception):  # the step raises it again
            numbers += [number_of(self.data.first_sample(step)) for _ in range(2)]
        if are_divided(self.recovery.agreement.all_values(numbers)):
            self.rank.say(DIVIDED)

    def _first_samples(self, step: int) -> list[Any]:
        """Return samples of the step, at most a micro-batch of them but at least two, to compare their
        losses."""
        recipe = self.current.recipe
        parts = (self._samples(step, index) for index in range(1, max(2, recipe.grad_accum) + 1))
        samples, most = itertools.chain.from_iterable(parts), max(2, recipe.micro_batch_size)
        with self.budget.host_side():
            return to_compare(samples, self._size_of, most)

    def _size_of(self, sample: Any) -> int:
        """Return the number of elements of a sample's tensors; 0 if it cannot be collated alone."""
        with contextlib.suppress(Exception):
            return sum(sizes_of(self.task.collate([sample])))
        return 0

    def _samples(self, step: int, index: int) -> list[Any]:
        with self.budget.host_side():
            return self.data.samples(step, index)

    def _report_unsaved(self) -> None:
        """Report, once, the attributes of the task and its model that no checkpoint holds."""
        names, self.progress.unsaved = self.progress.unsaved, []
        if names:
            reason = (
                f"{listed(names)} changed during training. A repeated step restores this, but "
                "no checkpoint holds it: if it matters, return it from state() of the task, or make it a "
                "buffer of the model. Read current_step of the task instead of counting steps"
            )
            self.recorder.event(StateNotSaved(names=names, reason=reason))
            self.rank.say(reason)

    def _check_parameters_to_save(self) -> None:
        """Raise TaskError if a checkpoint would not hold this rank's parameters: replicas differ, or frozen
        ones that no checkpoint holds have changed. Every rank must call this."""
        with self.budget.host_side():
            check_same_parameters(self._parameters, self._replicas_of_this)
            if names := self.recovery.undo.rewritten():
                raise TaskError(
                    f"{listed(names)} is frozen, but was changed during training. No checkpoint holds it, "
                    "because of the adapter or because state_dict() of the model leaves it out, so a resumed "
                    "run would begin with the old values: make it a buffer (register_buffer), which "
                    "checkpoints hold"
                )

    def _look_at_adapters(self, result: StepResult) -> None:
        """After the first update, report layers whose adapter did not change or is used without its layer."""
        if self._adapters_unchecked and result.lr > 0 and 0 < result.grad_norm < math.inf:
            self._adapters_unchecked = False
            for names, reason in warnings_about(without_ddp(self.model), self._parameters, self.rank):
                self.recorder.event(AdapterWarning(names=names, reason=reason))
                self.rank.say(reason)

    def _evaluate_and_record(self, step: int, result: StepResult, seconds: float) -> None:
        evaluated = self.evaluate() if self._evaluates_after(step) else {}
        self.checkpoints.evaluated = (step, evaluated.get("eval_loss"))
        self.recorder.step(step, result, seconds, evaluated)
        # Evaluation runs the user's model and trackers run other code: both may draw random numbers.
        self.progress.recorded(drew=bool(evaluated) or bool(self.rank.job.train.trackers))

    def train_step(self, step: int) -> StepResult:
        """Run one optimizer step over the global batch; repeat it with a lower recipe after an OOM."""
        if self.in_backward is not None:
            return self._step_in_backward(step, self.in_backward)
        began = started = time.perf_counter()
        with self.recovery.raising_oom():
            while (sums := self._gradients(step)) is None:
                self.current.lower(step, began)
                began = time.perf_counter()
        self.recovery.done()
        difference, stop, total_loss, total_weight, *logged = sums
        self.current.step_done()
        with self.where.during("optimizer"):
            # DDP and FSDP average over the ranks; the step's gradient is the sum divided by the total weight.
            factor = self.rank.mesh.data / total_weight if total_weight else 0.0
            factor /= self.scaler.factor
            with self.budget.host_side() if self.rank.recipe.gradients_leave else contextlib.nullcontext():
                if self.replicas is not None:
                    self.replicas.average()
                gradients = self._all_gradients()
                self.recorder.before_update(gradients.values(), self.current.recipe)
                self.copies.average(gradients)
                over_stages = self.stages.add_up if self.stages is not None else None
                limit = self.rank.job.train.clip_norm
                grad_norm = divide_and_clip([*gradients.values()], factor, limit, over_stages)
                del gradients
            self.copies.check_loss(difference, total_loss, total_weight, grad_norm)
            self.recovery.wait_before_update()
            lr = set_learning_rate(self.optimizer, step, self.steps, self.rank.job.train)
            loss, lost = _mean(total_loss, total_weight), began - started
            means = self.logged.means(logged)
            result = StepResult(loss, total_weight, grad_norm, lr, stop > 0, lost, means)
            with self.progress.updating(step, dict(vars(result)), began):
                if reason := self.guard.refuses(total_loss, total_weight, grad_norm):
                    self._skip_update(step, reason)
                else:
                    self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return result

    def _skip_update(self, step: int, reason: str) -> None:
        # The forward pass has changed BatchNorm's statistics, codebooks, memory banks and similar state.
        with self.budget.host_side():
            stay = self.recovery.undo.restore(skipped=True).lost
        if stay:
            reason += f"; {', '.join(stay)} changed for the first time and cannot be restored"
        self.rank.say(f"step {step} skipped: {reason}; the model is unchanged")
        self.recorder.event(StepLeftOut(step=step, reason=reason))

    def _step_in_backward(self, step: int, in_backward: StepInBackward) -> StepResult:
        """Run one optimizer step of one micro-batch that updates parameters in its backward pass.

        The ranks exchange their sums before the backward pass, which needs the total weight. Raises
        FloatingPointError if a gradient is not finite: by then it has been used.
        """
        began = started = time.perf_counter()
        recovery = self.recovery
        self.order.begin()
        while True:
            recovery.begin()
            [batch] = self._fetched(self.data.micro_batches(step), "data")
            if not self._outgrown(batch, step, 1):
                break
            self.current.lower(step, began)
            began = time.perf_counter()
        self.logged.clear()
        loss, weight = recovery.without_retry(partial(self._forward, batch))
        del batch
        with self.where.during("optimizer"):
            difference, stop, total_loss, total_weight, *logged = self._add_up(
                self.rank.difference_in_group(loss.detach()),
                self.rank.stop_requested(),
                *self.rank.once(loss.detach(), weight, *self.logged.values()),
            )
            lr = set_learning_rate(self.optimizer, step, self.steps, self.rank.job.train)
        self.current.step_done()
        self.recorder.before_update((), self.current.recipe)
        means, mean_loss = self.logged.means(logged), _mean(total_loss, total_weight)
        result = StepResult(mean_loss, total_weight, 0.0, lr, stop > 0, began - started, means)
        record = dict(vars(result))
        with self.progress.updating(step, record, began):
            if reason := self.guard.refuses(total_loss, total_weight, grad_norm=0.0):
                del loss
                clean(self.model)
                self._skip_update(step, reason)
                recovery.done()
                return result
            with (
                self.where.during("backward", users=True),
                in_backward.updating(self.rank.mesh.data / total_weight) as gradients,
            ):
                recovery.without_retry(loss.backward)
            with self.where.during("optimizer"):
                self._check_parameters()
                used = used_parameters(self.model, gradients.__contains__)
                [squared] = self._add_up(gradients.squared, used=used)
                record["grad_norm"] = math.sqrt(squared)
                self.copies.check_loss(difference, total_loss, total_weight, record["grad_norm"])
                if not math.isfinite(squared):
                    raise FloatingPointError(
                        f"the gradient of step {step} was not finite, and optimizer_step: backward had used "
                        "it before that was known. No checkpoint contains this step. optimizer_step: after "
                        "leaves such steps out"
                    )
        recovery.done()
        return replace(result, grad_norm=record["grad_norm"])

    def _gradients(self, step: int) -> list[float] | None:
        """Compute the step's gradients; return sums over all ranks: of differences of losses in groups, stop
        requests, loss, weight and logged values.

        One small collective adds them up. None means that every rank must discard its gradients.
        """
        recovery, recipe = self.recovery, self.current.recipe
        recovery.begin()
        self.order.begin()
        if recipe.gradients_leave:
            self.optimizer.zero_grad(set_to_none=True)  # those of a failed try are still on the host
        self.logged.clear()
        if self.stages is None:
            result = self._in_turn(step)
        else:
            result = recovery.without_retry(partial(self._in_stages, step, self.stages))
        if result is None:
            return None
        loss, weight = result
        with self.where.during("optimizer"):
            used = used_parameters(self.model, lambda p: gradient_of(p, self.optimizer) is not None)
            sums = self._add_up(
                self.rank.difference_in_group(loss),
                self.rank.stop_requested(),
                *self.rank.once(loss, weight, *self.logged.values()),
                used=used,
                failed=recovery.failed,
            )
        return sums or None

    def _add_up(self, *values: torch.Tensor | float, used: int = 0, failed: bool = False) -> list[float]:
        """Return the sums over all ranks, with one collective; an empty list if a rank has `failed`.

        `used`: this rank's `used_parameters`. Raises TaskError if it differs between ranks that have the same
        part of the model, if their FSDP units issued collectives in different orders, or if ranks that share
        a copy of the model fetched different samples.
        """
        self.order.end_micro_batch()
        rank, order, difference = self.rank, self.order.fingerprint(), self.samples.difference()
        stages, stage = rank.mesh.pipeline, rank.coordinates.pipeline
        failures, difference, *sums = rank.add_up(
            failed, difference, *rank.by_stage(order), *rank.by_stage(used), *values
        )
        if failures:
            return []
        if abs(difference) > APART:
            raise TaskError(DIFFERENT)
        ranks = rank.world // stages
        if sums[stage] != order * ranks:
            # Ranks of other stages have not noticed it, so nothing can be exchanged.
            raise TaskError(self.order.problem(self.recovery.agreement if stages == 1 else None))
        if sums[stages + stage] != used * ranks:
            raise TaskError(DIFFERENT_PARAMETERS)
        return sums[2 * stages :]

    def _in_turn(self, step: int) -> Sums | None:
        """Run one micro-batch after the other; return the sums of loss and weight, or None as `_gradients`
        does."""
        recovery, recipe = self.recovery, self.current.recipe
        sums = NOTHING
        for index, batch in enumerate(self._fetched(self.data.micro_batches(step), "data"), start=1):
            if self._outgrown(batch, step, index):
                return None
            last = index == recipe.grad_accum
            computed = partial(self._micro_batch, batch, sums, last=last)
            sums = recovery.attempt(kind_of(recipe, last=last), computed) or sums
            # Check before the next batch is fetched, which may be slow. After the last one, the sums show it.
            if not last:
                self.order.end_micro_batch()
                if recovery.some_rank_failed():
                    return None
        return sums

    def _in_stages(self, step: int, stages: Stages) -> Sums:
        """Run this rank's part of the micro-batches; return the sums of loss and weight, zeros on ranks
        without the last stage."""
        where, recipe = self.where, self.current.recipe
        sums = NOTHING
        batches, held = self._fetched(self.data.micro_batches(step), "data"), dict[int, Any]()
        last_chunk = recipe.virtual_stages - 1
        for kind, index, chunk in table_of(recipe)[stages.at]:
            if kind == "forward":
                if chunk == 0:
                    with where.during("data", users=True):
                        held[index] = self._on_device(next(batches))
                    self.recorder.micro_batch(held[index], recipe.grad_accum)
                batch = held[index] if chunk < last_chunk else held.pop(index)
                with where.during("forward", users=True):
                    result = stages.own[chunk].forward(batch)
                if result is not None:
                    sums = added(sums, result)
                del batch, result
                continue
            last = index == recipe.grad_accum - 1
            if kind == "weights":
                with where.during("backward", users=True):
                    stages.own[chunk].weights(last=last)
                continue
            with where.during("backward", users=True):
                stages.own[chunk].backward(self.scaler.scaled, last=last)
        with where.during("backward"):
            stages.settle()
        return sums

    def _check_parameters(self) -> None:
        """Raise TaskError for parameters that no optimizer knows: new ones, frozen ones with a gradient."""
        if not self._modules.hold_the_same():
            known = {id(p) for _, p in self._parameters}
            new = [name for name, p in without_ddp(self.model).named_parameters() if id(p) not in known]
            if new and is_gathered(self.model):
                raise TaskError(NO_GRADIENT_SEEN)
            if new:
                raise TaskError(
                    f"{listed(new)} of the model was made or replaced during training, and no optimizer "
                    "knows it: let model() make all parameters, and change their values in place"
                )
            self._modules = _modules_of(self.model)
        if late := [name for name, p in self._frozen if p.grad is not None]:
            raise TaskError(
                f"{listed(late)} of the model had requires_grad=False when training began, and now got a "
                "gradient, which no optimizer uses. To train a parameter later, let model() return it with "
                "requires_grad=True, and set it to False in forward until then"
            )

    def _all_gradients(self) -> dict[str, torch.Tensor]:
        self._check_parameters()
        gradients = ((name, gradient_of(p, self.optimizer)) for name, p in self._parameters)
        return {name: gradient for name, gradient in gradients if gradient is not None}

    def _outgrown(self, batch: Any, step: int, index: int) -> bool:
        """Return whether a rank has a micro-batch that is larger than any probed one."""
        size = self.current.recipe.micro_batch_size
        if not self.recovery.some_rank_outgrows(batch, size):
            return False
        if self.recovery.outgrows(batch, size):
            self.current.outgrown(batch, self._samples(step, index))
        return True

    def _forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        with self.where.during("data", users=True):
            batch = self._on_device(batch)
        self.recorder.micro_batch(batch, self.current.recipe.grad_accum)
        with self.where.during("forward", users=True):
            return loss_of(self.task, self.model, batch, self.rank)

    def _micro_batch(self, batch: Any, sums: Sums, *, last: bool) -> Sums:
        """Run forward and backward of one micro-batch; return `sums` plus its loss and weight."""
        where, recipe = self.where, self.current.recipe
        with where.during("data", users=True):
            batch = self._on_device(batch)
        self.recorder.micro_batch(batch, recipe.grad_accum)
        with accumulate(self.model, recipe, last=last):
            with where.during("forward", users=True):
                loss, weight = loss_of(self.task, self.model, batch, self.rank)
            with where.during("backward", users=True):
                self.scaler.scaled(loss).backward()  # type: ignore[no-untyped-call]
        return added(sums, (loss, weight))

    def _probes(self) -> bool:
        if self.rank.job.retries.lower == 0:
            return False  # with `retries.lower: 0` an OOM ends the run: do not look for what fits
        probe = self.rank.job.train.probe
        limited = self.rank.device.type == "cuda" or _limited(self.budget)
        return probe == "always" or (probe == "auto" and limited)

    def _follow(self, recipe: Recipe) -> None:
        """Apply the micro-batch, accumulation and loss chunks of a changed recipe, without a rebuild."""
        self.task.loss_chunks = recipe.loss_chunks
        self.where.micro_batch = recipe.micro_batch_size
        for root in fsdp_roots(self.model):
            root.set_requires_gradient_sync(True)  # the initial value; `grad_sync: each` never sets it
        self.data.change(recipe)
        if self.held_out is not None:
            self.held_out.micro = recipe.micro_batch_size

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss per unit of weight over all held-out data, and the task's own metrics, of the
        model that a checkpoint of this step exports."""
        assert self.held_out is not None
        with self.where.during("evaluation"), self._exported_buffers():
            self.order.begin()
            sums = NOTHING
            self.logged.clear()
            self.model.eval()
            for (batch, counts), chunk in self._evaluated(self.held_out.batches()):
                self.logged.counts = counts
                with self.where.during("evaluation", users=True):
                    result = (
                        self.stages.own[chunk].forward(batch)
                        if self.stages is not None
                        else loss_of(self.task, self.model, batch, self.rank)
                    )
                if counts and result is not None:
                    sums = added(sums, result)
                del batch, result  # otherwise they are on the device together with the next batch
            if self.stages is not None:
                self.stages.settle()
            total_loss, total_weight, *logged = self._add_up(*self.rank.once(*sums, *self.logged.values()))
            self.model.train()
        means = {f"eval_{name}": value for name, value in self.logged.means(logged).items()}
        return {"eval_loss": _mean(total_loss, total_weight), **means}

    def _evaluated(self, batches: Iterator[tuple[Any, bool]]) -> Iterator[tuple[tuple[Any, bool], int]]:
        """Yield each batch, and whether it counts, with each stage of this rank that runs it, counted from
        0."""
        recipe, fetched = self.rank.recipe, self._fetched(batches, "evaluation")
        size = recipe.pipeline if recipe.virtual_stages > 1 else 1
        while group := list(itertools.islice(fetched, size)):
            with self.where.during("evaluation", users=True):
                group = [(self._on_device(batch), counts) for batch, counts in group]
            for index, chunk in in_groups(recipe.pipeline, len(group), recipe.virtual_stages):
                yield group[index], chunk

    def _fetched(self, batches: Iterator[Any], phase: Phase) -> Iterator[Any]:
        """Yield batches in host memory, one at a time."""
        while True:
            with self.where.during(phase, users=True), self.budget.host_side(), self.slow_fetch.fetching():
                batch = list(itertools.islice(batches, 1))  # a list, because a task's collate may return None
            if not batch:
                return
            with self.budget.host_side():
                self.samples.look(batch[0], phase)
            yield batch.pop()

    def _on_device(self, batch: Any) -> Any:
        batch = to_device(batch, self.rank.device)
        self.budget.track(batch)
        return batch

    def _resume(self) -> int:
        kept = settings(self.optimizer)
        with self.where.during("checkpoint"):
            resumed = self.handover.resume()
        restore_settings(self.optimizer, kept)
        step = resumed.step
        self.progress.begin(step, self.recovery.undo, resumed.unrecorded)
        if resumed.skipped is not None:
            self.recorder.event(HandoverSkipped(reason=resumed.skipped))
        if resumed.source is not None:
            self.recorder.event(Resumed(step=step, from_=resumed.source))
            self.rank.say(f"resumed after step {step} of {self.steps}")
            if reason := data_change(self.checkpoints.resumed_from, self.rank.job, self.data.order.samples):
                self.recorder.event(DataChanged(step=step, reason=reason))
                self.rank.say(reason)
        elif self.rank.first and (resumed.skipped is not None or self.rank.run.read_metrics()):
            self.recorder.event(Resumed(step=0, from_="nothing"))
            self.rank.say("starting again from step 1: no state of earlier steps is left")
        if resumed.unrecorded is not None:
            self.where.step = self.task.current_step = step
            seconds = resumed.unrecorded["seconds"]
            self._evaluate_and_record(step, StepResult(**resumed.unrecorded["result"]), seconds)
        return step

    def _save(self, step: int, *, leaving: bool) -> None:
        """Save a checkpoint. With `leaving`, wait until it is complete; do not save a step twice. Raises
        TaskError if it would not hold the parameters."""
        if self.checkpoints.saved != step:
            self._check_parameters_to_save()
        with self.where.during("checkpoint"):
            # An allocation for a fire drill: the rest is in host memory and is not counted.
            torch.zeros((), device=self.rank.device)
            with self.budget.host_side():
                self._report_checkpoint(self.checkpoints.finished(wait=True))
                if not leaving:
                    self._report_checkpoint(self.checkpoints.save(step))
                elif self.checkpoints.saved != step:
                    self._report_checkpoint(self.checkpoints.save_last(step))

    def _report_checkpoint(self, saved: Saved | None) -> None:
        """Report a checkpoint. After a failed one, training continues: the last complete one remains."""
        if saved is None:
            return
        if saved.problem is None:
            self.recorder.event(CheckpointSaved(step=saved.step, path=str(saved.path)))
        else:
            self.recorder.event(CheckpointFailed(step=saved.step, reason=saved.problem))
            self.rank.say(f"{saved.problem}. Training continues; the next checkpoint tries again")

    def _saves_after(self, step: int) -> bool:
        every = self.rank.job.train.checkpoint_every
        return every is not None and step % every == 0

    def _checkpoint_is_due(self, done: int) -> bool:
        """Return whether the previous attempt handed over a step whose checkpoint was due but not written."""
        due = done == self.steps or self._saves_after(done)
        return due and done > 0 and self.checkpoints.saved != done

    def _evaluates_after(self, step: int) -> bool:
        every = self.rank.job.train.eval_every
        return every is not None and (step == self.steps or step % every == 0)


def _modules_of(model: nn.Module) -> Containers:
    """Return what each module holds, to see cheaply whether parameters were made or replaced."""
    containers, modules = Containers(), [*model.modules()]
    containers.add(_ModuleDicts(modules))
    for module in modules:
        containers.add(module._modules)
        containers.add(module._parameters)
    return containers


class _ModuleDicts(Collection[Any]):
    """The dictionaries of modules and parameters that modules have. Code may replace a dictionary."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules

    def __len__(self) -> int:
        return 2 * len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        dicts = map(operator.attrgetter("_modules", "_parameters"), self._modules)
        return itertools.chain.from_iterable(dicts)

    def __contains__(self, container: object) -> bool:
        return any(container is each for each in self)


def _limited(budget: Budget) -> bool:
    return isinstance(budget, MemoryBudget) and budget.limit is not None


def _mean(total: float, weight: float) -> float:
    """Return the mean. Without weight, return NaN, which is recorded as no value: a loss of 0 would be the
    best."""
    return total / weight if weight else math.nan
