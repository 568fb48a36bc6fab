"""Memory that runs out in a model's own code: in forward, in a custom backward, in recomputation.

Hooks on one module of the model raise what torch raises. They draw no random number, and until they raise
they leave the computation alone.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from launcher.train.loop import Trainer

VARIABLE = "ZOO_FAILS"
"Of the environment: `place=backward,rank=last,step=2,micro_batch=4,module=blocks.1.down`."
TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which "
    "1.32 GiB is free. Including non-PyTorch memory, this process has 138.48 GiB memory in use. Of the "
    "allocated memory 136.20 GiB is allocated by PyTorch, and 1.56 GiB is reserved by PyTorch but "
    "unallocated."
)

Place = Literal["forward", "backward", "recomputation"]


@dataclass(frozen=True)
class Fails:
    """Memory runs out on `rank` in `step`, each time while the micro-batch in force is at least so large.

    In the first step in its first micro-batch, in later ones in the last, behind gradients of others.
    """

    place: Place
    rank: Literal["all", "last"]
    step: int
    micro_batch: int
    module: str = ""
    "Its name in the model; one in the middle of the trained blocks if left out."

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @classmethod
    def parse(cls, text: str) -> Fails:
        values: dict[str, Any] = dict(part.split("=", 1) for part in text.split(","))
        return cls(**{**values, "step": int(values["step"]), "micro_batch": int(values["micro_batch"])})


def arm(trainer: Trainer, fails: Fails) -> None:
    """Let memory run out in this trainer, if it is of a rank that `fails`."""
    rank = trainer.rank
    if fails.rank == "last" and rank.number != rank.world - 1:
        return
    first = due = False
    gradients, micro_batch = trainer._gradients, trainer._micro_batch

    def begun(step: int) -> Any:
        nonlocal first
        first = True
        return gradients(step)

    def watched(batch: Any, sums: Any, *, last: bool) -> Any:
        nonlocal first, due
        due = first if fails.step == 1 else last
        first = False
        return micro_batch(batch, sums, last=last)

    def strikes(phase: str) -> bool:
        large = trainer.current.recipe.micro_batch_size >= fails.micro_batch
        return due and large and trainer.where.step == fails.step and trainer.where.phase == phase

    def before(*_: Any) -> None:
        if strikes("backward" if fails.place == "recomputation" else "forward"):
            raise torch.OutOfMemoryError(TEXT)

    def after(_: nn.Module, __: Any, outputs: Any) -> Any:
        if not strikes("forward"):
            return outputs
        return tree_map(lambda one: RunsOut.apply(one) if _differentiable(one) else one, outputs)

    trainer._gradients = begun  # type: ignore[method-assign]
    trainer._micro_batch = watched  # type: ignore[method-assign]
    module = _module(trainer, fails.module)
    if fails.place == "backward":
        module.register_forward_hook(after)
    else:
        module.register_forward_pre_hook(before)


class RunsOut(torch.autograd.Function):
    """The identity, whose backward finds no memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(TEXT)


def arm_from_environment() -> None:
    """In a process of `launcher.train`, which knows nothing of the zoo: arm each trainer before it trains."""
    fails = Fails.parse(os.environ[VARIABLE])
    train = Trainer.train

    def armed(trainer: Trainer) -> bool:
        arm(trainer, fails)
        return train(trainer)

    Trainer.train = armed  # type: ignore[method-assign]


def _module(trainer: Trainer, name: str) -> nn.Module:
    model = trainer.model
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    if name:
        return whole.get_submodule(name)
    blocks = [one for one in trainer.task.blocks(whole) if any(p.requires_grad for p in one.parameters())]
    leaves = [one for one in blocks[len(blocks) // 2].modules() if not list(one.children())]
    return leaves[-1]


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
