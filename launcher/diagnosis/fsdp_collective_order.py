"""The order in which the ranks issued the collectives of FSDP's units, and where two ranks differ.

A unit's number is its place among the units; `~number` stands for its gradients. A larger number stands for
the end of a micro-batch or step, where all ranks meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

END = "the end of the micro-batch"
DIFFERENT = "the ranks called the model's blocks in different orders, or not equally often, in a step"
REMEDY = (
    "FSDP gathers each block, with fsdp-layers also its layers, when it is called, so the ranks wait for "
    "each other or exchange weights of different blocks. Call the model equally often on every rank in each "
    "micro-batch, and let blocks() of the task return only modules that every rank calls in the same order "
    "(of experts or branches, the module that has them), or use sharding: ddp with "
    "train.find_unused_parameters: true"
)


def problem_of(units: Sequence[str], orders: Mapping[int, Sequence[int]], *, ended: bool) -> str | None:
    """Return what to tell the user if ranks issued different collectives; None if that is not certain.

    `orders` has the numbers of each rank. Unless all ranks have `ended` the step, one that issued fewer may
    only be late.
    """
    if not orders:
        return None
    first, *others = sorted(orders)
    for other in others:
        for one, two in zip_longest(orders[first], orders[other]):
            if one == two:
                continue
            if not ended and None in (one, two):
                break
            return (
                f"{DIFFERENT}: rank {first} came to {_name(units, one)} where rank {other} came to "
                f"{_name(units, two)}. {REMEDY}"
            )
    return None


def _name(units: Sequence[str], number: int | None) -> str:
    if number is None:
        return "nothing"
    place = number if number >= 0 else ~number
    name = units[place] if place < len(units) else END
    return name if number >= 0 else f"the gradients of {name}"
