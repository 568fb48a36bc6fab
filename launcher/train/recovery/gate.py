"""Where the ranks meet beside the training: on the CPU, so that no GPU is waited for."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from launcher.train.budget import Budget


class Gate:
    """Every rank must come through every gate, in the same order as through all else that they send."""

    def __init__(self, world: int, budget: Budget) -> None:
        self.world, self.budget = world, budget

    def highest(self, *values: int) -> list[int]:
        """Of each value over all ranks: about 0.1 ms among ranks of one node."""
        if self.world == 1:
            return list(values)
        with self.budget.host_side():
            tensor = torch.tensor(values, dtype=torch.int64)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            return [int(value) for value in tensor.tolist()]

    def everyones(self, value: Any) -> list[Any]:
        """Of each rank, in their order. Slow: for failures."""
        found: list[Any] = [value] * self.world
        if self.world > 1:
            with self.budget.host_side():
                dist.all_gather_object(found, value)
        return found

    def firsts(self, value: Any) -> Any:
        """What rank 0 has."""
        return self.everyones(value)[0]

    def wait_for_the_end(self) -> NoReturn:
        """Some rank cannot go on, and will see to it that all end."""
        while True:
            self.highest(0)
