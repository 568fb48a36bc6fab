"""Values that the ranks agree on, exchanged through the CPU: no GPU has to finish first."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from launcher.train.cpu_memory_budget import Budget
from launcher.train.rank import Rank


class Agreement:
    """Small collectives on the CPU. Every rank must make the same calls in the same order."""

    def __init__(self, rank: Rank, budget: Budget) -> None:
        self.rank, self.budget = rank, budget

    def maximum(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks. Takes about 0.1 ms within one node."""
        if self.rank.world == 1:
            return list(values)
        with self.budget.host_side():
            tensor = torch.tensor(values, dtype=torch.int64)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            return [int(value) for value in tensor.tolist()]

    def all_values(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Slow: use it for failures only."""
        with self.budget.host_side():
            return self.rank.all_values(value)

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's value."""
        return self.all_values(value)[0]

    def wait_for_the_end(self) -> NoReturn:
        """Block until another rank, which cannot continue, ends the attempt."""
        while True:
            self.maximum(0)
