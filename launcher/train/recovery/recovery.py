"""OOM in a step: every rank learns of the failure, no rank hangs, and all repeat the step.

`docs/out-of-memory.md` describes the protocol for users.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from launcher.diagnosis.memory import out_of_memory
from launcher.spec.errors import text_of
from launcher.spec.verdict import FailureClass, Phase
from launcher.train.cpu_memory_budget import Budget
from launcher.train.error_report import causes, classify, in_a_line, shortened
from launcher.train.phase import Where
from launcher.train.rank import Rank
from launcher.train.recovery.agreement import Agreement
from launcher.train.recovery.collectives import Collectives
from launcher.train.recovery.deadline import Deadline
from launcher.train.recovery.selftest import self_test
from launcher.train.recovery.torch_modes import KeptModes
from launcher.train.sharding.cleanup import clean, free_failed_pass
from launcher.train.task import Task
from launcher.train.undo.undo import Undo

T = TypeVar("T")
_self_tested: dict[tuple[str, str], str | None] = {}


class Failure(NamedTuple):
    """An OOM on one rank. Holds no exception: that would keep every activation alive."""

    rank: int
    phase: Phase
    text: str
    "Message of the exception."
    traceback: tuple[str, ...]


class Suspect(NamedTuple):
    """An exception of the user's code that is not an OOM. Zeros from a rank that ran out of memory may have
    caused it; the step is then repeated."""

    error: BaseException
    phase: Phase
    issued: int
    "Number of collectives issued in the micro-batch before the exception."


def failure_of(error: BaseException, rank: Rank, where: Where) -> Failure:
    """Return the `Failure` for `error`, which is an OOM or was caused by one."""
    words = next(text_of(cause) for cause in causes(error) if out_of_memory(in_a_line(cause)))
    return Failure(rank.number, where.phase, words, tuple(shortened(error)))


def oom_error_of(failure: Failure, where: Where) -> torch.OutOfMemoryError:
    """Return the exception that ends the attempt. Set `where` to the phase and traceback of the failure."""
    where.phase, where.traceback = failure.phase, failure.traceback
    return torch.OutOfMemoryError(failure.text)


class Recovery:
    """Recovery on one rank. `failure` is set after an OOM on this rank, and `suspect` after another exception
    of the user's code, until the step is repeated.

    `end` ends the attempt with the given exception; any thread may call it.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: Rank,
        where: Where,
        budget: Budget,
        end: Callable[[BaseException], object],
        task: Task | None = None,
        data: Any = None,
    ) -> None:
        """Changes in `task` and `data` are undone too."""
        self.model, self.rank, self.where, self.budget = model, rank, where, budget
        self.agreement = Agreement(rank, budget)
        with budget.host_side():
            self.undo = Undo(model, rank.device, task, data)
        self.collectives = None
        if isinstance(model, FSDPModule):
            self.collectives = Collectives(model, rank.device)
        self.failure: Failure | None = None
        self.suspect: Suspect | None = None
        self.probed: list[int] | None = None
        """Largest probed number of elements per sample, for each tensor of a batch; None without a probe. The
        list and its numbers only grow, so probing comes to an end."""
        self.why_not = self._why_not()
        self._end, self._deadline = end, Deadline(rank.job.train.collective_timeout)

    def _why_not(self) -> str | None:
        """Return why an OOM ends the attempt in this setup, or None if steps can be repeated."""
        if self.rank.recipe.optimizer_step == "backward":
            return "with optimizer_step: backward, parameters may have changed when memory runs out"
        if self.rank.recipe.pipeline > 1:
            return "a stage that runs out of memory leaves its neighbours waiting for what it would send"
        if self.rank.world == 1 and self.collectives is None:
            return None
        if self.rank.mesh.tensor > 1:
            return "with tensor parallelism, the other ranks wait in a collective inside a layer"
        if self.collectives is None:
            return f"sharding: {self.rank.recipe.sharding} cannot be retried after a failure in backward"
        if self.rank.world > 1 and any(
            isinstance(module, nn.SyncBatchNorm) for module in self.model.modules()
        ):
            return "SyncBatchNorm calls collectives itself, so the missing ones are unknown"
        problems = self.agreement.all_values(self._self_test())
        return next((problem for problem in problems if problem is not None), None)

    def _self_test(self) -> str | None:
        """Return the result of `self_test`, which runs once per process and kind of sharding."""
        recipe = self.rank.recipe
        key = (recipe.sharding, recipe.offload)
        if key not in _self_tested:
            mesh = next(p.device_mesh for p in self.model.parameters() if isinstance(p, DTensor))
            with self.budget.host_side():
                _self_tested[key] = self_test(self.rank, mesh)
        return _self_tested[key]

    def begin(self) -> None:
        """Begin a step or its repetition. All state is as of the last `Undo.take`, at the end of the previous
        step, or as of `discard`."""
        self.failure = self.suspect = None
        self._deadline.step_begins()

    def done(self) -> None:
        """Record that the gradients of the step are complete on all ranks."""
        self._deadline.step_done()

    def wait_before_update(self) -> None:
        """Wait for all ranks before the update, under DDP. Clipping needs no communication there: if one rank
        ran out of memory in it, the others would be a step ahead, and no common step could be handed over."""
        if self.collectives is None:
            self.agreement.maximum(0)

    @contextmanager
    def raising_oom(self) -> Iterator[None]:
        """Raise the OOM in place of an error that follows it before the ranks have agreed again."""
        try:
            yield
        except Exception as error:
            if self.failure is None or classify(error, self.where) == "gpu-oom":
                raise
            raise self._unmet_error(self.failure) from error

    def _unmet_error(self, failure: Failure) -> torch.OutOfMemoryError:
        self.where.why_not = "the ranks did not meet again after the collectives of the micro-batch"
        return oom_error_of(failure, self.where)

    def attempt(self, kind: object, micro_batch: Callable[[], T]) -> T | None:
        """Return the result of `micro_batch`, or None after a failure that the ranks can recover from.

        If they cannot recover, the exception is raised. Micro-batches of one `kind` issue the same
        collectives.
        """
        if self.collectives is not None:
            self.collectives.begin(kind)
        before = self.where.phase, self.where.users
        try:
            with KeptModes(self.rank.device):
                result = micro_batch()
        except (Exception, SystemExit) as error:
            kind_of_error = classify(error, self.where)
            why_not = self.why_not or self._why_not_after(error)
            if kind_of_error == "gpu-oom":
                self.where.why_not = why_not
            if why_not is not None or not (
                kind_of_error == "gpu-oom" or self._may_come_from_zeros(kind_of_error)
            ):
                raise
            if kind_of_error == "gpu-oom":
                self.failure = failure_of(error, self.rank, self.where)
            else:
                self._suspect(error)
            del error
        else:
            if self.collectives is not None:
                self.collectives.finish()
            return result
        # This runs after the except block: the exception holds every activation until that block ends.
        self.where.phase, self.where.users = before
        self.free()
        if self.collectives is not None and self.rank.world > 1:
            self._deadline.set(self._end_unmet)
            self.collectives.drain()
            self.free()
        return None

    def without_retry(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Its failure ends the attempt: the ranks cannot repeat this."""
        try:
            return work()
        except (Exception, SystemExit) as error:
            if classify(error, self.where) == "gpu-oom":
                self.where.why_not = self.why_not
            raise

    def _may_come_from_zeros(self, kind: FailureClass | None) -> bool:
        return kind in ("user-error", "numerical") and self.collectives is not None and self.rank.world > 1

    def _suspect(self, error: BaseException) -> None:
        assert self.collectives is not None
        for cause in causes(error):
            traceback.clear_frames(cause.__traceback__)  # they hold every activation
        self.suspect = Suspect(error, self.where.phase, self.collectives.issued)

    def _end_unmet(self) -> None:
        if self.failure is not None:
            self._end(self._unmet_error(self.failure))
        elif self.suspect is not None:
            self._end(self.suspect.error)

    def raise_suspect(self) -> NoReturn:
        """Raise the user's exception: no rank ran out of memory, so zeros did not cause it."""
        assert self.suspect is not None
        self._deadline.lift()
        self.where.phase, self.where.users = self.suspect.phase, True
        raise self.suspect.error

    def _why_not_after(self, error: BaseException) -> str | None:
        if any(isinstance(cause, (torch.AcceleratorError, dist.DistError)) for cause in causes(error)):
            return "the device or the communication between ranks may be broken after such an error"
        return self.collectives.why_not if self.collectives is not None and self.rank.world > 1 else None

    def free(self) -> None:
        free_failed_pass(self.rank.device, self.budget)

    @property
    def failed(self) -> bool:
        return self.failure is not None or self.suspect is not None

    def some_rank_failed(self) -> bool:
        """Return whether any rank failed in this micro-batch. Every rank calls it after each micro-batch."""
        if self.why_not is not None:
            return False  # the rank would have ended the attempt
        [failed] = self.agreement.maximum(self.failed)
        return bool(failed)

    def some_rank_outgrows(self, batch: Any, micro_batch_size: int) -> bool:
        """Return whether any rank has a batch larger than any probed one. Every rank calls it before each
        micro-batch."""
        if self.probed is None:
            return False
        [larger] = self.agreement.maximum(self.outgrows(batch, micro_batch_size))
        return bool(larger)

    def outgrows(self, batch: Any, micro_batch_size: int) -> bool:
        """Return whether the samples of this batch are larger than the probed ones."""
        if self.probed is None:
            return False
        pairs = zip_longest(sizes_of(batch), self.probed, fillvalue=0)
        return any(size > most * micro_batch_size for size, most in pairs)

    def record_size(self, batch: Any, micro_batch_size: int) -> None:
        """Count the sizes of this batch as probed, in addition to earlier ones. The maximum is kept for each
        tensor: samples may be longest in different tensors, or have fewer tensors."""
        sizes = [-(-size // micro_batch_size) for size in sizes_of(batch)]
        self.probed = [max(pair) for pair in zip_longest(sizes, self.probed or (), fillvalue=0)]

    def discard(self) -> tuple[str, ...]:
        """Restore the state from the beginning of the step. Every rank calls this once all have agreed.
        Return the names of tensors that could not be restored."""
        self._deadline.lift()
        clean(self.model)
        with self.budget.host_side():
            lost = self.undo.restore().lost
        for parameter in self.model.parameters():  # also those that the pass had taken out of the model
            parameter.grad = None
        self.free()
        return lost


def sizes_of(batch: Any) -> list[int]:
    """Return the number of elements of each tensor in `batch`."""
    return [leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
