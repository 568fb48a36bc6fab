"""The local probe: before the first step, each rank alone finds out which micro-batch fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.spec.recipe import Recipe
from launcher.train.activations.saved_tensors import memory_of
from launcher.train.activations.selective import written
from launcher.train.batch_norm_modules import batch_norms_in_evaluation
from launcher.train.coupled_samples import Split, split
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.data.data import to_device
from launcher.train.ddp import DDP, without_ddp
from launcher.train.error_report import classify, in_a_line
from launcher.train.forward import loss_of
from launcher.train.local_shards import local
from launcher.train.optimizers.sharded_states import ShardedStates
from launcher.train.rank import SetupError
from launcher.train.recovery.collectives import kind_of
from launcher.train.recovery.ddp_buckets import as_in_buckets, bytes_of_new_buckets
from launcher.train.recovery.optimizer_dry_run import OptimizerDryRun, dry_run_of
from launcher.train.recovery.recovery import Failure, Recovery, failure_of
from launcher.train.recovery.torch_modes import KeptModes
from launcher.train.rng import seed_all
from launcher.train.scaler import LossScaler
from launcher.train.sharding.cleanup import clean, free_failed_pass
from launcher.train.sharding.sharding import accumulate, reduces_gradients
from launcher.train.step_in_backward import StepInBackward
from launcher.train.task import Task
from launcher.train.task_metrics import NOTHING, added


class Probe:
    """Runs a step on one rank alone and undoes it.

    It issues no collective. Parameters, optimizer states and everything that `Undo` covers are the same
    afterwards, and there are no gradients. A recipe may differ from the rank's in micro-batch, accumulation,
    gradient synchronisation and loss chunks. Call it between steps, within `undone`.

    An exception of the user's code ends the probe but not the run: under FSDP the shards of other ranks have
    made-up values.
    """

    def __init__(
        self,
        task: Task,
        data: Any,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        recovery: Recovery,
        in_backward: StepInBackward | None,
    ) -> None:
        """`data`: what the task returned as its training data."""
        self.task, self.data, self.optimizer, self.scaler = task, data, optimizer, scaler
        self.model, self.rank, self.where = recovery.model, recovery.rank, recovery.where
        self.budget, self.undo, self.agreement = recovery.budget, recovery.undo, recovery.agreement
        self.collectives, self.in_backward = recovery.collectives, in_backward
        self.off: str | None = None
        "Why the probe is off; every recipe then counts as fitting."
        rank = self.rank
        if rank.mesh.tensor > 1:
            self.off = "with tensor parallelism no rank runs a step alone"
        elif rank.mesh.pipeline > 1:
            self.off = "a stage of a pipeline cannot run a step alone"
        self.may_call_collectives = False
        "The probe is off because the task calls collectives itself, or may do so."
        self.sample: Any = None
        "The largest known sample of the dataset; at first the task's example."
        self.tried = 0
        "Number of recipes tried."
        self.failure: Failure | None = None
        "The OOM of the last recipe that did not fit."
        # Collectives in compiled code cannot be intercepted, so check first that there are none.
        self._must_check = rank.world > 1 and rank.recipe.compile
        self._checks = False

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore all state on exit. Every rank uses this around every use of the probe."""
        environment = dict(os.environ)
        with self.budget.host_side():
            self.undo.take()
            if reason := self.undo.secure(1 / self.rank.per_node):
                self.off = self.off or reason
            if self.collectives is not None and self.off is None:
                self.collectives.others.collect(self.agreement)
        try:
            yield
        finally:
            with self.budget.host_side():
                lost = self.undo.restore().lost
            if lost:
                raise SetupError(
                    f"{', '.join(lost)} changed while the probe tried a step, and is too large to be "
                    "restored: make it a buffer of the model, or set train.probe: never"
                )
            if dict(os.environ) != environment:
                os.environ.clear()
                os.environ.update(environment)

    def split(self, recipe: Recipe, samples: Callable[[], list[Any]]) -> Split:
        """Return how the loss of these samples relates to the losses of their halves. Let `undo` follow the
        trained parameters that a pass writes."""

        def sums_of(part: list[Any]) -> tuple[float, float]:
            with batch_norms_in_evaluation(self.model), self._alone(recipe), self._no_collective():
                with self.budget.host_side():
                    batch = self.task.collate(part)
                batch = to_device(batch, self.rank.device)
                self.budget.track(batch)
                loss, weight = loss_of(self.task, without_ddp(self.model), batch, self.rank)
                return float(loss), float(weight)

        def begin(seed: int) -> None:
            with self.budget.host_side():
                self.undo.restore()
            seed_all(seed)

        before = self.where.phase, self.where.users
        self.where.trying = self._checks = True
        writes = _Writes()
        try:
            with (
                KeptModes(self.rank.device),
                torch.no_grad(),
                torch.compiler.set_stance("force_eager") if self.rank.recipe.compile else nullcontext(),
                self.where.during("init", users=True),
            ):
                chosen = samples()
                # torch would never compile what it first meets under a dispatch mode, so this pass runs
                # uncompiled. Code that does not run under one is not watched.
                with suppress(Exception), torch.compiler.set_stance("force_eager"), writes:
                    sums_of(chosen)
                clean(self.model)
                return split(sums_of, chosen, begin)
        except KeyboardInterrupt:
            raise
        except BaseException:  # the step raises it again
            return Split.SUM
        finally:
            self.where.phase, self.where.users = before
            self.where.trying = self._checks = False
            clean(self.model)
            self.undo.follow(lambda p: memory_of(p) in writes.memories)
            self._forget_peak()

    def largest(self, rungs: Sequence[Recipe]) -> int | None:
        """Return the index of the first rung that fits, or None. `rungs` are in falling order of memory."""

        def fits(at: int) -> bool:
            return self.fits(rungs[at], last=at == len(rungs) - 1)

        if not (self._collectives_known(rungs[0]) or self._collectives_known(rungs[-1])) and self.off is None:
            self.off, self.may_call_collectives = (
                (
                    "an uncompiled step is needed to check that the task calls no collectives itself, and "
                    f"with micro-batch {rungs[-1].micro_batch_size} it does not fit"
                ),
                True,
            )
        if fits(0):
            return 0
        misfit, fit = 0, len(rungs)
        while fit - misfit > 1:
            middle = (misfit + fit) // 2
            if fits(middle):
                fit = middle
            else:
                misfit = middle
        if self.rank.recipe.compile:
            # After several sizes torch compiles for dynamic shapes, which is slower.
            torch.compiler.reset()
        return fit if fit < len(rungs) else None

    def fits(self, recipe: Recipe, *, last: bool = False) -> bool:
        """Return whether a step of `recipe` fits into this rank's memory. `last`: it is the last recipe."""
        if not self._collectives_known(recipe):
            return self.off is not None
        if self.off is not None:
            return True
        self.tried += 1
        return self._tries(recipe, last=last) or self.off is not None

    def _collectives_known(self, recipe: Recipe) -> bool:
        """Find out whether the task calls collectives itself; if it does, set `off`. A compiled task is run
        once without the compiler. Return False if that run did not fit."""
        if self._must_check and self.off is None:
            self._checks = True
            with torch.compiler.set_stance("force_eager"):
                self._must_check = not self._tries(recipe, last=False)
            self._checks = False
        return not self._must_check

    def _tries(self, recipe: Recipe, *, last: bool) -> bool:
        before = self.where.phase, self.where.users
        self.where.trying = not last
        completed = self._completes(recipe)
        # Repeat if a buffer changed for the first time: a real step holds a copy of it.
        while self.undo.restore().followed and completed:
            completed = self._completes(recipe)
        self.where.phase, self.where.users = before
        self.where.trying = False
        self._forget_peak()
        return completed

    def _completes(self, recipe: Recipe) -> bool:
        completed = False
        try:
            with self.where.during("probe"), KeptModes(self.rank.device):
                with self.budget.host_side():
                    self.undo.take()  # before `_alone` registers hooks, which are not the model's state
                with self._alone(recipe):
                    self._step(recipe)
            completed = True
        except _CollectiveError as error:
            self.off, self.may_call_collectives = str(error), True
        except (Exception, SystemExit) as error:
            failure = classify(error, self.where)
            if failure == "gpu-oom":
                self.failure = failure_of(error, self.rank, self.where)
            elif failure in ("user-error", "numerical"):
                words = in_a_line(error).partition("\n")[0][:300]
                self.off = f"when one rank ran a step alone, the task raised {words}"
            else:
                raise
        # The exception and its frames are gone, so the activations can be freed.
        clean(self.model)
        self.optimizer.zero_grad(set_to_none=True)  # gradients may be on the host
        if not completed:
            free_failed_pass(self.rank.device, self.budget)
        return completed

    @contextmanager
    def _alone(self, recipe: Recipe) -> Iterator[None]:
        chunks, self.task.loss_chunks = self.task.loss_chunks, recipe.loss_chunks
        try:
            with ExitStack() as stack:
                for module in self.model.modules():
                    if isinstance(module, nn.SyncBatchNorm):
                        stack.enter_context(_without_others(module))
                if self.collectives is not None:
                    stack.enter_context(self.collectives.local())
                yield
        finally:
            self.task.loss_chunks = chunks
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(True)

    def _step(self, recipe: Recipe) -> None:
        """Run a step like the training loop, with the same tensors alive."""
        dry_run = dry_run_of(self.optimizer, self.rank.recipe)
        if dry_run is not None:
            dry_run.step()  # creates the states
        sums = NOTHING
        # The first micro-batch starts without gradients. With `last`, the first, middle and last ones differ.
        count = min(recipe.grad_accum, 3 if recipe.grad_sync == "last" else 2)
        for number in range(1, count + 1):
            with self.where.during("probe", users=True):
                with self.budget.host_side():
                    batch = self.batch(recipe.micro_batch_size)
                batch = to_device(batch, self.rank.device)
                self.budget.track(batch)
            if isinstance(self.model, DDP) and number == 2 and reduces_gradients(recipe, last=False):
                # DDP rebuilds its buckets in the first step. The optimizer states exist here, but not then.
                states = dry_run.new_state_bytes if dry_run is not None else 0
                size = max(0, bytes_of_new_buckets(self.model) - states)
                torch.empty(size, dtype=torch.uint8, device=self.rank.device)
            with (
                self._micro_batch(recipe, last=number == count) as model,
                self._no_collective(),
                self.where.during("probe", users=True),
            ):
                loss, weight = loss_of(self.task, model, batch, self.rank)
                with self._updates(dry_run):
                    self.scaler.scaled(loss).backward()  # type: ignore[no-untyped-call]
            sums = added(sums, (loss, weight))
            del batch, loss, weight
        if self.in_backward is not None:
            return
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        if gradients:
            torch.nn.utils.get_total_norm(gradients)
        if dry_run is not None:
            dry_run.step()
        if isinstance(self.optimizer, ShardedStates):
            torch.empty(self.optimizer.gather_bytes, dtype=torch.uint8, device=self.rank.device)

    def _updates(self, dry_run: OptimizerDryRun | None) -> AbstractContextManager[object]:
        """Return the context of a backward pass: with `optimizer_step: backward`, it includes the update."""
        if self.in_backward is None or dry_run is None:
            return nullcontext()
        return self.in_backward.with_update(dry_run.step_alone)

    @contextmanager
    def _micro_batch(self, recipe: Recipe, *, last: bool) -> Iterator[nn.Module]:
        """Yield the model to call."""
        if self.collectives is not None:
            with accumulate(self.model, recipe, last=last):
                self.collectives.begin(kind_of(recipe, last=last))
                yield self.model
                self.collectives.finish()
        elif isinstance(self.model, DDP):
            with as_in_buckets(self.model, reduced=reduces_gradients(recipe, last=last)):
                yield self.model.module
        else:
            yield self.model

    def _no_collective(self) -> AbstractContextManager[object]:
        # Under a dispatch mode, compiled code would not run compiled.
        alone = self.rank.world == 1 or (self.rank.recipe.compile and not self._checks)
        return nullcontext() if alone else _NoCollective()  # type: ignore[no-untyped-call]

    def batch(self, size: int) -> Any:
        """Return a batch of `size` copies of the largest sample, in host memory."""
        if self.sample is None:
            own = type(self.task).example is not Task.example  # the default would load the data once more
            self.sample = self.task.example() if own else self.data[0]
        return self.task.collate([self.sample] * size)

    def _forget_peak(self) -> None:
        """Reset the peak memory, so that the next peak is that of the training."""
        if isinstance(self.budget, MemoryBudget):
            self.budget.take_peak()
        elif self.rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.rank.device)


class _CollectiveError(Exception):
    pass


class _NoCollective(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives of the task, in which this rank would wait for the others."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what the task compiles itself run compiled, now and later."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # the operators that it calls come here again
        if "c10d" in func.namespace:
            raise _CollectiveError(f"the task calls {func} itself, which needs all ranks")
        return func(*args, **(kwargs or {}))


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the memory of tensors that are changed in place, also through `.data`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # the operators that it calls come here again
        self.memories.update(map(memory_of, written(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_others(norm: nn.SyncBatchNorm) -> Iterator[None]:
    group = norm.process_group
    norm.process_group = dist.GroupMember.NON_GROUP_MEMBER
    try:
        yield
    finally:
        norm.process_group = group
