"""The collectives that FSDP2 issues in a micro-batch: recorded, replaced by copies, or completed with zeros.

A rank that runs out of memory has issued fewer collectives than the other ranks, which wait for it. Every
micro-batch issues the same collectives, so the rank can issue the missing ones. Their content does not
matter: the step is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from launcher.spec.recipe import Recipe
from launcher.train.issued_collectives import issued_so_far
from launcher.train.recovery.collective_order import CollectiveOrder, Issuer, all_gather, reduce_scatter
from launcher.train.recovery.other_shards import OtherShards
from launcher.train.sharding.cleanup import drop_partial_sums, replication
from launcher.train.sharding.sharding import reduces_gradients


class Entry(NamedTuple):
    """The properties of one collective that must be equal on all ranks."""

    name: Literal["all-gather", "reduce-scatter", "all-reduce"]
    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    input_size: int
    "Input elements of this rank."
    output_size: int
    "Output elements of this rank."
    operation: Any = None
    "dist.ReduceOp of a reduction."


def kind_of(recipe: Recipe, *, last: bool) -> Hashable:
    """Return the key for micro-batches with the same sequence of collectives. The sequence depends on whether
    gradients are reduced, and on how often a head that is a separate FSDP unit is called."""
    return reduces_gradients(recipe, last=last), recipe.loss_chunks


class Collectives(Issuer):
    """The collectives of one FSDP2 model. Those between `finish` and `begin` are not recorded.

    Construct this on every rank, before the first forward pass.
    """

    def __init__(self, model: FSDPModule, device: torch.device) -> None:
        assert isinstance(model, nn.Module)
        self.model, self.device = model, device
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.static = True
        "False once two micro-batches of one kind have issued different collectives."
        self.foreign = False
        "True once a micro-batch has issued a collective that is not FSDP2's."
        self._known: dict[Hashable, tuple[Entry, ...]] = {}
        self._trained: dict[Hashable, list[list[bool]]] = {}
        "`requires_grad` of all parameters at each collective of `_known`."
        self._recorded: list[list[bool]] = []
        self._kind: Hashable = None
        self._issued: list[Entry] | None = None
        self._local = False
        self._sending = False
        "Still True after an exception: it is then unknown whether the collective was issued."
        self._issued_before = self._own_count = 0
        "Collectives of this process before the micro-batch, and FSDP2's collectives since then."
        self._replicas, shards = replication(model)
        "The ranks that hold the same shard (hybrid sharding)."
        # With one rank per node FSDP2 issues only all-reduces, and `local` sees none of them.
        self._unseen = self._replicas is not None and shards == 1
        self.others = OtherShards(model)
        self.order = CollectiveOrder(model, self)

    def begin(self, kind: Hashable) -> None:
        """Begin a micro-batch. `kind` is the key from `kind_of`."""
        self._kind, self._issued, self._sending, self._recorded = kind, [], False, []
        self._issued_before, self._own_count = issued_so_far(), 0
        # Evaluation leaves parameters gathered: the next micro-batch would issue one collective less.
        for unit in self.units:
            unit.reshard()

    def finish(self) -> None:
        """End a complete micro-batch, and remember its sequence if it is the first of its kind."""
        assert self._issued is not None
        self.foreign |= self._has_foreign()
        if not (self._local and self._unseen):
            if self._kind not in self._known:
                self._known[self._kind], self._trained[self._kind] = tuple(self._issued), self._recorded
            self.static &= len(self._known[self._kind]) == len(self._issued)
        self._issued = None

    @property
    def issued(self) -> int:
        """Number of collectives issued so far in the current micro-batch."""
        return len(self._issued or ())

    @property
    def why_not(self) -> str | None:
        """Why the remaining collectives of the micro-batch are unknown; None if `drain` can issue them."""
        if self._sending:
            return "the failure came in the middle of a collective"
        if self.foreign or (self._issued is not None and self._has_foreign()):
            return "the task calls collectives itself, so the missing ones are unknown"
        if not self.static:
            return "the model does not issue the same collectives in every micro-batch"
        if self._issued is None or self._kind not in self._known:
            return "the collectives of a micro-batch of this kind were not known yet: it was the first one"
        at = len(self._issued)
        around = self._trained[self._kind][max(0, at - 1) : at + 1]  # the failure came between these two
        if around and self._requires_grad() not in around:
            return "parameters were frozen or unfrozen in this step, which changes the collectives"
        return None

    def _requires_grad(self) -> list[bool]:
        return [p.requires_grad for p in self.model.parameters()]

    def _has_foreign(self) -> bool:
        """Return whether the micro-batch has issued collectives that are not FSDP2's."""
        return not self._local and issued_so_far() - self._issued_before != self._own_count

    def drain(self) -> None:
        """Issue the remaining collectives of the micro-batch with zeros. This needs memory for the parameters
        or gradients of one unit at a time, so free what the failed pass held first."""
        assert self.why_not is None and self._issued is not None
        rest = self._known[self._kind][len(self._issued) :]
        self._issued = None
        self.order.forget()
        if not self._local:
            for entry in rest:
                _issue_zeros(entry)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Issue no collective, but record them as if they were issued. A gather uses the values in `others`
        for the other ranks, and a reduction keeps this rank's part of its own gradients.

        With hybrid sharding the gradients do not reach `.grad` and are dropped at the end.
        """
        self._local = True
        self.order.forget()
        hooks = [unit.register_forward_pre_hook(_no_all_reduce) for unit in self._replicated()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for unit in self._replicated():
                unit.set_requires_all_reduce(True, recurse=False)
            if self._replicas is not None:
                drop_partial_sums(self.model)
            self._local, self._issued = False, None

    def gather(
        self, unit: nn.Module, output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, later: bool
    ) -> Any:
        entry = Entry("all-gather", group, output.device, output.dtype, own.numel(), output.numel())
        if self._local:
            work = None
            self.others.fill(unit, output, own, group.rank(), group.size())
        else:
            self._sending, before = True, issued_so_far()
            with released_by_gloo(output, own):
                work = all_gather(output_tensor=output, input_tensor=own, group=group, async_op=later)
            self._sending, self._own_count = False, self._own_count + issued_so_far() - before
        self._count(entry)
        return work

    def reduce(
        self, output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any, later: bool
    ) -> Any:
        entry = Entry("reduce-scatter", group, whole.device, whole.dtype, whole.numel(), output.numel(), op)
        if not self._local:
            self._sending, before = True, issued_so_far()
            with released_by_gloo(output, whole):
                work = reduce_scatter(output=output, input=whole, group=group, op=op, async_op=later)
            self._own_count += issued_so_far() - before
            self._sending = self._replicas is not None  # FSDP2 issues an all-reduce next
            self._count(entry)
            return work
        output.copy_(whole.chunk(group.size())[group.rank()])
        self._count(entry)
        if self._replicas is not None:
            self._count(self._all_reduce_of(output))
        return None

    def all_reduced(self, reduced: torch.Tensor) -> None:
        """Record FSDP2's all-reduce."""
        self._sending, self._own_count = False, self._own_count + 1
        self._count(self._all_reduce_of(reduced))

    def _all_reduce_of(self, reduced: torch.Tensor) -> Entry:
        assert self._replicas is not None
        size, issued = reduced.numel(), self._issued or []
        # FSDP2 uses the operation of the reduce-scatter before. With one rank per node there is none.
        op = issued[-1].operation if issued and issued[-1].operation is not None else dist.ReduceOp.AVG
        return Entry("all-reduce", self._replicas, reduced.device, reduced.dtype, size, size, op)

    def _count(self, entry: Entry) -> None:
        if self._issued is None:
            return
        known = self._known.get(self._kind)
        if known is not None and (len(self._issued) >= len(known) or known[len(self._issued)] != entry):
            self.static = False
        if known is None:
            now, before = self._requires_grad(), self._recorded[-1:]
            self._recorded += before if before == [now] else [now]
        self._issued.append(entry)

    def _replicated(self) -> Sequence[Any]:
        return self.units if self._replicas is not None else ()


RELEASE_SECONDS = 1.0
"Time that gloo's thread gets to release the tensors of a collective; it takes microseconds."


@contextmanager
def released_by_gloo(*tensors: torch.Tensor) -> Iterator[None]:
    """Wait on exit until gloo's thread has released the tensors of a collective that is done.

    The thread holds them a little longer than the call lasts. A memory budget would count them until then,
    so its peak would depend on the time.
    """
    on_host = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    before = [_uses(storage) for storage in on_host]
    yield
    deadline = time.monotonic() + RELEASE_SECONDS
    while any(_uses(s) > n for s, n in zip(on_host, before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0)


def _uses(storage: torch.UntypedStorage) -> int:
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses


def _no_all_reduce(unit: Any, _: Any) -> None:
    # Needed in each forward pass: gradient accumulation enables the all-reduce for its last micro-batch.
    unit.set_requires_all_reduce(False, recurse=False)


def _issue_zeros(entry: Entry) -> None:
    """Issue `entry` with zeros on the current stream, so buffers are reused only after the collective."""

    def zeros(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=entry.dtype, device=entry.device)

    group = entry.group
    if entry.name == "all-gather":
        output = zeros(entry.output_size)
        own = output.narrow(0, group.rank() * entry.input_size, entry.input_size)
        all_gather(output_tensor=output, input_tensor=own, group=group)
    elif entry.name == "reduce-scatter":
        output, whole = zeros(entry.output_size), zeros(entry.input_size)
        reduce_scatter(output=output, input=whole, group=group, op=entry.operation)
    else:
        dist.all_reduce(zeros(entry.input_size), group=group, op=entry.operation)
