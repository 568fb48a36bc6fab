"""Running out of memory in a step: every rank gets to know, nobody hangs, the step is repeated.

`docs/out-of-memory.md` tells the protocol as a user sees it.
"""

from __future__ import annotations

import gc
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
from launcher.spec.verdict import FailureClass, Phase
from launcher.train.budget import Budget
from launcher.train.failure import causes, classify, in_a_line, shortened
from launcher.train.rank import Rank
from launcher.train.recovery.cleanup import clean
from launcher.train.recovery.collectives import Collectives
from launcher.train.recovery.deadline import Deadline
from launcher.train.recovery.gate import Gate
from launcher.train.recovery.modes import kept_modes
from launcher.train.recovery.selftest import self_test
from launcher.train.recovery.undo import Undo
from launcher.train.task import Task
from launcher.train.where import Where

T = TypeVar("T")
_self_tested: dict[tuple[str, str], str | None] = {}


class Failure(NamedTuple):
    """Memory that ran out on one rank. Nothing of the exception, which would keep every activation alive."""

    rank: int
    phase: Phase
    text: str
    "In its words."
    traceback: tuple[str, ...]


class Suspect(NamedTuple):
    """An exception of the user's code that is not of memory. It may come of the zeros that another rank sends
    which ran out of memory: then that rank is the cause, and the step is repeated."""

    error: BaseException
    phase: Phase
    issued: int
    "Collectives of its micro-batch before it."


def failure_of(error: BaseException, rank: Rank, where: Where) -> Failure:
    """`error`: of memory, or came of one that is."""
    words = next(str(cause) for cause in causes(error) if out_of_memory(in_a_line(cause)))
    return Failure(rank.number, where.phase, words, tuple(shortened(error)))


def raised_again(failure: Failure, where: Where) -> torch.OutOfMemoryError:
    """What ends the attempt after all: `where` tells of the failure itself."""
    where.phase, where.traceback = failure.phase, failure.traceback
    return torch.OutOfMemoryError(failure.text)


class Recovery:
    """One rank's part. `failure` is set from the moment when memory ran out here until the step is repeated,
    `suspect` likewise when the user's code raised.

    `end`: ends the attempt with the exception that it is given, from any thread.
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
        """`task`, `data`: what changes in them is undone as well."""
        self.model, self.rank, self.where, self.budget = model, rank, where, budget
        self.gate = Gate(rank.world, budget)
        with budget.host_side():
            self.undo = Undo(model, rank.device, task, data)
        self.collectives = Collectives(model, rank.device) if isinstance(model, FSDPModule) else None
        self.failure: Failure | None = None
        self.suspect: Suspect | None = None
        self.probed: list[int] | None = None
        """Elements per sample of the first tensor of a batch, the second ..., the most that was probed; None:
        nothing was. It only ever grows, in number and in size: probing comes to an end."""
        self.why_not = self._why_not()
        self._end, self._deadline = end, Deadline(rank.job.train.collective_timeout)

    def _why_not(self) -> str | None:
        """Why running out of memory ends the attempt here; None: it does not."""
        if self.rank.world == 1 and self.collectives is None:
            return None
        if self.collectives is None:
            return f"sharding: {self.rank.recipe.sharding} cannot be retried after a failure in backward"
        if self.rank.world > 1 and any(isinstance(one, nn.SyncBatchNorm) for one in self.model.modules()):
            return "SyncBatchNorm calls collectives itself, and nobody else knows which are missing"
        found = self.gate.everyones(self._self_test())
        return next((problem for problem in found if problem is not None), None)

    def _self_test(self) -> str | None:
        """Once in a process for each way of sharding."""
        recipe = self.rank.recipe
        key = (recipe.sharding, recipe.offload)
        if key not in _self_tested:
            mesh = next(p.device_mesh for p in self.model.parameters() if isinstance(p, DTensor))
            with self.budget.host_side():
                _self_tested[key] = self_test(self.rank, mesh)
        return _self_tested[key]

    def begin(self) -> None:
        """A step, or a repetition. Everything is as it was last taken: when the step before was done, or by
        `discard`."""
        self.failure = self.suspect = None
        self._deadline.step_begins()

    def done(self) -> None:
        """The gradients of the step are complete on all ranks."""
        self._deadline.step_done()

    def meet_before_update(self) -> None:
        """Under DDP nothing is sent when gradients are clipped: a rank that runs out of memory there would
        leave the others a step ahead, and no state of one step could be handed over."""
        if self.collectives is None:
            self.gate.highest(0)

    @contextmanager
    def told(self) -> Iterator[None]:
        """What goes wrong after memory ran out, and before the ranks have met again, came of it: raised is
        what ran out."""
        try:
            yield
        except Exception as error:
            if self.failure is None or classify(error, self.where) == "gpu-oom":
                raise
            raise self._not_met(self.failure) from error

    def _not_met(self, failure: Failure) -> torch.OutOfMemoryError:
        self.where.why_not = "the ranks did not meet again behind what each of them sends in a micro-batch"
        return raised_again(failure, self.where)

    def attempt(self, kind: object, micro_batch: Callable[[], T]) -> T | None:
        """What `micro_batch` returns; None when memory ran out in it and the ranks can go on together.

        `kind`: micro-batches of one kind send the same. Where they cannot, the exception passes.
        """
        if self.collectives is not None:
            self.collectives.begin(kind)
        before = self.where.phase, self.where.users
        try:
            with kept_modes(self.rank.device):
                result = micro_batch()
        except (Exception, SystemExit) as error:
            kind_of_error = classify(error, self.where)
            why_not = self.why_not or self._why_not_after(error)
            if kind_of_error == "gpu-oom":
                self.where.why_not = why_not
            if why_not is not None or not (
                kind_of_error == "gpu-oom" or self._may_be_of_zeros(kind_of_error)
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
        # Outside of the except block: until its end the exception holds every activation.
        self.where.phase, self.where.users = before
        self.free()
        if self.collectives is not None and self.rank.world > 1:
            self._deadline.set(self._end_unmet)
            self.collectives.drain()
            self.free()
        return None

    def _may_be_of_zeros(self, kind: FailureClass | None) -> bool:
        return kind in ("user-error", "numerical") and self.collectives is not None and self.rank.world > 1

    def _suspect(self, error: BaseException) -> None:
        assert self.collectives is not None
        for cause in causes(error):
            traceback.clear_frames(cause.__traceback__)  # they hold every activation
        self.suspect = Suspect(error, self.where.phase, self.collectives.issued)

    def _end_unmet(self) -> None:
        if self.failure is not None:
            self._end(self._not_met(self.failure))
        elif self.suspect is not None:
            self._end(self.suspect.error)

    def raise_suspect(self) -> NoReturn:
        """No rank ran out of memory: what the user's code raised is its own."""
        assert self.suspect is not None
        self._deadline.lift()
        self.where.phase, self.where.users = self.suspect.phase, True
        raise self.suspect.error

    def _why_not_after(self, error: BaseException) -> str | None:
        if any(isinstance(one, (torch.AcceleratorError, dist.DistError)) for one in causes(error)):
            return "the device, or what connects the ranks, may be in no good state after such an error"
        return self.collectives.why_not if self.collectives is not None and self.rank.world > 1 else None

    def free(self) -> None:
        gc.collect()
        if self.rank.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def failed(self) -> bool:
        return self.failure is not None or self.suspect is not None

    def some_rank_failed(self) -> bool:
        """Return, on every rank and after each micro-batch, whether some rank failed in it."""
        if self.why_not is not None:
            return False  # the rank would have ended the attempt
        [failed] = self.gate.highest(self.failed)
        return bool(failed)

    def some_rank_outgrows(self, batch: Any, micro_batch_size: int) -> bool:
        """Before a micro-batch, on every rank: whether one has a batch larger than any that was probed."""
        if self.probed is None:
            return False
        [larger] = self.gate.highest(self.outgrows(batch, micro_batch_size))
        return bool(larger)

    def outgrows(self, batch: Any, micro_batch_size: int) -> bool:
        """A batch of so many samples: whether a sample of it is larger than what was probed."""
        if self.probed is None:
            return False
        known = zip_longest(sizes_of(batch), self.probed, fillvalue=0)
        return any(size > most * micro_batch_size for size, most in known)

    def meets(self, batch: Any, micro_batch_size: int) -> None:
        """From here on no batch of these sizes is a surprise, nor of any before: one sample may be the
        longest in one tensor and another one in another, or have fewer of them."""
        sizes = [-(-size // micro_batch_size) for size in sizes_of(batch)]
        self.probed = [max(pair) for pair in zip_longest(sizes, self.probed or (), fillvalue=0)]

    def discard(self) -> tuple[str, ...]:
        """On every rank, when they have met: as the step began. Returns names of what is not put back."""
        self._deadline.lift()
        clean(self.model)
        with self.budget.host_side():
            lost = self.undo.restore().lost
        self.free()
        return lost


def sizes_of(batch: Any) -> list[int]:
    """Elements of each tensor in it."""
    return [leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
