"""The order in which a rank issues the collectives of its FSDP units, compared over the ranks in each step.

A process group pairs collectives by their order alone. If ranks call blocks of equal size in different
orders, each gets the weights and gradients of another block, and no library notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from launcher.diagnosis.fsdp_collective_order import DIFFERENT, REMEDY, problem_of
from launcher.train.local_shards import parameter_groups
from launcher.train.recovery.agreement import Agreement

# torch 2.13 and newer have the new names; their old names warn.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Issuer:
    """Issues the collectives of FSDP's units. A subclass may do more."""

    def gather(
        self, unit: nn.Module, output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, later: bool
    ) -> Any:
        return all_gather(output_tensor=output, input_tensor=own, group=group, async_op=later)

    def reduce(
        self, output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any, later: bool
    ) -> Any:
        return reduce_scatter(output=output, input=whole, group=group, op=op, async_op=later)

    def all_reduced(self, reduced: torch.Tensor) -> None:
        """Called directly after FSDP2's all-reduce, with hybrid sharding."""


class CollectiveOrder:
    """The units of one model whose collectives this rank has issued since `begin`."""

    def __init__(self, model: nn.Module, issuer: Issuer) -> None:
        units = [(name, one) for name, one in model.named_modules() if isinstance(one, FSDPModule)]
        self._names = [name or "the rest of the model" for name, _ in units]
        self._issued: list[int] = []
        self._begun, self._complete = 0, True
        for number, (_, unit) in enumerate(units):
            gradients = ~number  # another number for the same unit
            unit.set_custom_all_gather(AllGather(issuer, unit, self._issued, number))  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(ReduceScatter(issuer, unit, self._issued, gradients))  # type: ignore[arg-type]
            [group] = parameter_groups(unit) or [None]
            if group is not None and getattr(group.mesh_info, "replicate_process_group", None) is not None:
                # With one rank per node (hybrid sharding) there are only all-reduces.
                unit.set_all_reduce_hook(partial(self._reduced, issuer, gradients))

    def _reduced(self, issuer: Issuer, number: int, reduced: torch.Tensor) -> None:
        self._issued.append(number)
        issuer.all_reduced(reduced)

    def begin(self) -> None:
        """Begin a step or an evaluation."""
        self._issued.clear()
        self._begun += 1
        self._complete = True

    def end_micro_batch(self) -> None:
        """Mark the end of a micro-batch: all ranks are about to exchange values."""
        self._issued.append(len(self._names))

    def forget(self) -> None:
        """Mark the order as incomplete until `begin`: other collectives are issued now."""
        self._complete = False

    def fingerprint(self) -> int:
        """Return a hash of the order since `begin`; 0 without FSDP. The sum over 2^13 ranks is exact in
        fp64."""
        return hash(tuple(self._issued)) % 2**40 if self._names else 0

    def record(self) -> dict[str, Any] | None:
        """Return the order, for the record of an error; None without FSDP, or if it is incomplete.

        Records of several ranks can be compared if they are of the same `begin`.
        """
        if not (self._names and self._complete):
            return None
        return {"begun": self._begun, "units": self._names, "issued": [*self._issued]}

    def problem(self, agreement: Agreement | None) -> str:
        """Return what to tell the user after ranks had different fingerprints.

        With `agreement`, every rank of the job calls this, and the message names the units.
        """
        issued = agreement.all_values(self._issued) if agreement is not None else []
        return problem_of(self._names, dict(enumerate(issued)), ended=True) or f"{DIFFERENT}. {REMEDY}"


class AllGather:
    """FSDP2's interface for an all-gather; its base class has no public name. Allocates like the default."""

    def __init__(self, issuer: Issuer, unit: nn.Module, issued: list[int], number: int) -> None:
        self._issuer, self._unit, self._note, self._number = issuer, unit, issued.append, number

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self._note(self._number)
        return self._issuer.gather(self._unit, output_tensor, input_tensor, group, async_op)


class ReduceScatter(AllGather):
    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._note(self._number)
        return self._issuer.reduce(output_tensor, input_tensor, group, op, async_op)
