"""Find parameters that differ between the ranks: of a new model, and of replicas of the model.

Replicas begin with the same parameters and get the same gradients. A parameter that the model's or the task's
code changes from the samples of its rank, such as a codebook, differs from then on: each rank would compute
another function, and a checkpoint would hold the values of any rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from launcher.spec.listed_names import listed
from launcher.spec.recipe import SHARDED
from launcher.train.rank import Rank
from launcher.train.seeds import derive_seed
from launcher.train.task import TaskError
from launcher.train.undo.fingerprint import fingerprint
from launcher.train.undo.objects import content

COMPARED = 2
"""The step of an attempt after which ranks compare their parameters. They also do so before each checkpoint.
The first step is too early: if a parameter has no gradient, DDP averages none and says so in the next
step."""
ROUNDING = 1e-4
"""Difference of two ranks' values, relative to the largest one, that may be rounding: some kernels of a GPU
add in another order each time."""
FEW = 2**16
"Number of values of each tensor of a new model that ranks compare."


@torch.no_grad()
def check_same_model(model: nn.Module, rank: Rank) -> None:
    """Raise TaskError, on all ranks, if they have made different models and would put parts of them together.

    Every rank must call this with the whole model. DDP gives all ranks the parameters and buffers of rank 0.
    """
    if rank.world == 1 or (rank.recipe.sharding not in SHARDED and rank.recipe.tensor == 1):
        return
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    there = [(name, p, values) for name, p in named if (values := content(p)) is not None]
    shapes = derive_seed(*(f"{name} {p.dtype} {tuple(p.shape)}" for name, p, _ in there))
    if len({*rank.all_values(shapes)}) > 1:
        names = ["the names or shapes of its parameters"]
    else:
        few = [(name, p, values.reshape(-1)[:FEW]) for name, p, values in there]
        names = [name for name, _ in _differing(few, None)]
    if names:
        raise TaskError(
            f"model() of the task has not made the same model on each rank: {listed(names)} differ when "
            "training begins. If it draws random numbers that launcher does not seed (such as "
            "numpy.random.default_rng() or os.urandom), use the global generators of torch, random or numpy, "
            "which are seeded before model() is called. Otherwise it depends on the rank, or on files that "
            "differ between the nodes"
        )


@torch.no_grad()
def check_same_parameters(
    parameters: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None
) -> None:
    """Raise TaskError, on all ranks of the group, if a parameter differs between them by more than rounding.

    `parameters`: each with its name; the same ones on every rank. `group`: see `replicas_of`.
    """
    if group is None:
        return
    plain = [(name, p, values) for name, p in parameters if (values := content(p)) is not None]
    different = _differing(plain, group)
    if not different:
        return
    unused = (
        "If it is trained and has no gradient in some steps, set train.find_unused_parameters: true. "
        if any(p.requires_grad for _, p in different)
        else ""
    )
    raise TaskError(
        f"{listed([name for name, _ in different])} of the model differs between the ranks. {unused}If code "
        "of the model or the task changes it from the samples of its rank, add up over the ranks what it is "
        "computed from, with torch.distributed.all_reduce. If each rank is to have its own, keep it in an "
        "attribute of the task, and return it from state()"
    )


def _differing(
    plain: Sequence[tuple[str, torch.Tensor, torch.Tensor]], group: dist.ProcessGroup | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the names and tensors of which ranks have different values. `plain`: each with its values."""
    if not plain:
        return []
    hashes = torch.stack([_hash(values) for *_, values in plain]).to(plain[0][2].device)
    largest, smallest = _extremes(hashes, group)
    differing = itertools.compress(plain, (largest != smallest).tolist())
    return [(name, p) for name, p, values in differing if _differ(values, group)]


def _hash(values: torch.Tensor) -> torch.Tensor:
    """Return a number of 62 bits and its sign, on the CPU."""
    return fingerprint(fingerprint(values).cpu()).view(torch.int64)[0] >> 1


def _extremes(values: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest and the smallest value on any rank, for each element."""
    both = torch.stack([values, -values])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0], -both[1]


def _differ(values: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    largest, smallest = _extremes(values.float(), group)
    rounding = max(ROUNDING, 2 * torch.finfo(values.dtype).eps) if values.is_floating_point() else 0.0
    scale = torch.maximum(largest.abs(), smallest.abs()).max()
    return bool((largest - smallest).max() > rounding * scale)
