"""The gradients of layers that tensor parallelism leaves whole: averaged, and compared between the ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.spec.recipe import SHARDED
from launcher.train.local_shards import local
from launcher.train.mesh import SHARD, TENSOR, Meshes
from launcher.train.optimizers.gradient_norm import norm_of
from launcher.train.precision import compute_type
from launcher.train.rank import Rank
from launcher.train.task import Task, TaskError

COMPARED = 3
"""Number of steps in which the ranks compare the gradients of a parameter. Steps that overflow, or in which
the gradient is only rounding, do not count. After such a step the ranks wait before they compare again, each
time twice as many steps: a gradient that stays that small costs some 20 comparisons in a million steps."""
CURE = (
    "Cut it as well, name its module in the plan with ReplicatedInCutRegion() of "
    "launcher.train.tensor_parallel, or leave the cut layers around it out of the plan"
)
APART = 0.05
"""Relative difference of two ranks' gradients above which it is not rounding: 16-bit kernels that add in
another order each time differ by about 1e-2."""

SUMMED = 1e-6
"Rounding of a loss per unit of weight: of a sum in fp32 of values around 1."


@dataclass
class _Checked:
    """How far the gradients of one parameter have been compared."""

    times: int = 0
    "How often they have been compared, without comparisons of mere rounding."
    differed: int = 0
    "How often they differed, but were too small to distinguish this from rounding."
    pause: int = 0
    "Steps before the next comparison."
    last_pause: int = 0


class Copies:
    """The gradients of layers that stay whole, which each rank of a group computes from the same activations.

    They are averaged before they are used. Without that, kernels of a GPU that add in another order each time
    would let the copies of a parameter drift apart.
    """

    def __init__(
        self,
        mesh: Meshes,
        task: Task,
        rank: Rank,
        model: nn.Module,
        first_problem: Callable[[str | None], str | None] | None,
    ) -> None:
        """`first_problem` returns the problem of the first stage of a pipeline that has one, on all its
        ranks."""
        self._group = mesh.tensor.get_group() if mesh.tensor is not None else None
        self._shards = mesh.data.get_group(SHARD) if rank.recipe.sharding in SHARDED else None
        self._first_problem, self._reports = first_problem, rank.number == rank.stage_ranks.start
        self._rank, self._parameters = rank, [p for p in model.parameters() if p.is_floating_point()]
        self._plan = f"parallel_plan() of {type(task).__name__}"
        # Where the true gradient is zero, as for a bias of keys in attention, there is only rounding.
        self._rounding = max(torch.finfo(compute_type(rank.recipe)).eps / 10, 1e-5)
        # Ranks of a group compute the loss from the same bits.
        self._loss_apart = max(1e-3, 4 * torch.finfo(compute_type(rank.recipe)).eps)
        self._losses = 0
        "Number of steps whose losses have been compared."
        self._largest = 0.0
        "Largest norm of a gradient so far."
        self._checked: defaultdict[str, _Checked] = defaultdict(_Checked)
        "Name of a parameter -> how far it has been compared."

    def check_loss(self, difference: float, loss: float, weight: float, grad_norm: float) -> None:
        """Raise TaskError, on all ranks, if the ranks of a group have different losses in the first steps.

        `difference` is the sum of `Rank.difference_in_group`; `loss` and `weight` are sums over the
        data-parallel ranks, and `grad_norm` is the norm of the gradient of loss / weight.
        """
        if self._group is None or self._losses == COMPARED or not math.isfinite(grad_norm):
            return
        self._losses += 1
        # If its summands cancel, a loss may be smaller than its rounding. That is at most the rounding of its
        # parameters times its gradient, plus the rounding of the sum.
        rounding = self._rounding * grad_norm * self._norm() + SUMMED
        if abs(difference) > self._group.size() * (self._loss_apart * abs(loss) + rounding * weight):
            raise TaskError(
                f"{self._plan}: the ranks of a group have different losses, so layers that are whole on each "
                "of them get different activations: from a layer whose result is cut and not added up or "
                "gathered, or from a dropout of whole activations between two cut layers. Change the plan, "
                "or use tensor: 1"
            )

    @torch.no_grad()
    def _norm(self) -> float:
        """Return the norm of all parameters of the model. Every rank must call this."""
        copies = 1 if self._rank.recipe.sharding in SHARDED else self._rank.mesh.data
        squared = 0.0
        for p in self._parameters:
            squared += float(norm_of(local(p))) ** 2 / copies / (1 if _is_cut(p) else self._rank.mesh.tensor)
        return math.sqrt(self._rank.add_up(squared)[0])

    @torch.no_grad()
    def average(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Average the gradients that are not cut. Each rank of a stage must pass the same names.

        Raises TaskError, on all ranks, if the gradients of a parameter differ by more than rounding.
        """
        if self._group is None:
            return
        due = [name for name in gradients if self._is_due(self._checked[name])]
        problem = self._compare({name: gradients[name] for name in due}) if due else None
        if self._first_problem is not None:
            problem = self._first_problem(problem)
        if problem is not None:
            raise TaskError(problem)
        for gradient in gradients.values():
            if not _is_cut(gradient):
                dist.all_reduce(local(gradient), group=self._group)
                local(gradient).div_(self._group.size())

    def _is_due(self, checked: _Checked) -> bool:
        checked.pause -= 1
        return checked.times < COMPARED and checked.pause < 0

    def _compare(self, gradients: Mapping[str, torch.Tensor]) -> str | None:
        """Compare a few sums over each gradient: a copy of the gradient might not fit into memory.

        Return what is wrong, the same on all ranks of a stage; None if nothing is.
        """
        assert self._group is not None
        own = torch.stack([_sums(local(gradient).flatten()) for gradient in gradients.values()])
        if self._shards is not None:
            # All ranks must judge alike, and not every rank may have a shard of a small gradient.
            dist.all_reduce(own, group=self._shards)
        own[:, 0].sqrt_()
        answers = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(answers, own, group=self._group)
        sums = torch.stack(answers)  # (ranks, gradients, sums)
        if not sums.isfinite().all():
            return None  # an overflow in fp16: the step is left out, and the next one is compared
        self._largest = max(self._largest, float(sums[..., 0].max()))
        scale = sums.abs().amax(dim=(0, 2))
        differences = (sums.amax(dim=0) - sums.amin(dim=0)).amax(dim=1)
        noise = self._rounding * self._largest
        verdicts = torch.stack([scale > noise, differences > APART * scale], dim=1).tolist()
        for (name, gradient), (significant, differs) in zip(gradients.items(), verdicts, strict=True):
            checked, differs = self._checked[name], differs and not _is_cut(gradient)
            if significant and differs:
                return (
                    f"{self._plan}: the ranks of a group have different gradients of {name}, which is whole "
                    f"on each of them: it is used where a rank has a part of the activations. {CURE}"
                )
            if significant:
                checked.times += 1
                continue
            # Compare it later: it may grow, as in a layer before one that starts at zero.
            checked.pause = checked.last_pause = max(1, 2 * checked.last_pause)
            checked.differed += differs
            if differs and checked.differed == COMPARED and self._reports:
                print(
                    f"{self._plan}: the ranks of a group have different gradients of {name}, which is whole "
                    f"on each of them. They are below {self._rounding:.0e} of the largest gradient, so this "
                    "may be rounding, as of a bias of keys in attention. If it is used where a rank has a "
                    f"part of the activations, it is trained wrongly. {CURE}",
                    flush=True,
                )
        return None


def _sums(gradient: torch.Tensor) -> torch.Tensor:
    """Return the square of the norm and two sums. Parts of one gradient hardly agree in all of them."""
    half = len(gradient) // 2
    sums = [gradient.sum(dtype=torch.float32), gradient[:half].sum(dtype=torch.float32)]
    return torch.stack([norm_of(gradient).double().square(), *(one.double() for one in sums)])


def _is_cut(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and TENSOR in (tensor.device_mesh.mesh_dim_names or ())
