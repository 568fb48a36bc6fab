"""One training step of a rank, on tensors without memory and with ranks that do not exist."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from launcher.memory.states import Ranks
from launcher.memory.trace import Sample, Trace, Work4, combine
from launcher.memory.unroll import NotUniformError, Recorded, unroll
from launcher.runs.layout import RunDir
from launcher.spec.job import Job
from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.budget import Unlimited
from launcher.train.model import arranged, loss_of, new_model
from launcher.train.rank import Rank
from launcher.train.sharding import accumulate, device_mesh
from launcher.train.task import Task
from launcher.train.tracing.as_cuda import as_cuda
from launcher.train.tracing.folding import fold
from launcher.train.tracing.watch import Watch

PASSES = (("forward", "backward"), ("forward again", "backward again"))


@dataclass(frozen=True)
class _Imagined(Rank):
    """Rank 0 of ranks that do not exist."""

    def say(self, text: str) -> None:
        pass


class Tracer:
    """Traces steps of one task. `like`: whose kernels decide what is saved for the backward pass.

    The process group of this process is replaced by one that pretends to have as many ranks as asked for.
    """

    def __init__(self, task: Task, job: Job, like: Literal["cuda", "cpu"]) -> None:
        self.task, self.job, self.like = task, job, like
        self._sample: Any = None

    def trace(self, recipe: Recipe, ranks: Ranks) -> Trace:
        """With sizes as a law of the micro-batch, whatever the recipe's. Raises NotAffineError when there is
        no such law, and what the task's own code raises that looks at the values of tensors."""
        return combine(*(self.sample(recipe, ranks, micro) for micro in (2, 3)))

    def sample(self, recipe: Recipe, ranks: Ranks, micro_batch: int, *, whole: bool = False) -> Sample:
        """With one micro-batch. `whole`: every block is run, none stands for another one."""
        recipe = recipe.model_copy(update={"micro_batch_size": micro_batch})
        if recipe.sharding == "none":
            ranks = Ranks(1, 1, ranks.on_gpu)  # each of several is alone until the gradients meet
        try:
            return _sample(
                unroll(self._record(recipe, ranks, whole or recipe.checkpoint_ratio < 1)), micro_batch
            )
        except NotUniformError:
            return _sample(self._record(recipe, ranks, whole=True), micro_batch)

    def _record(self, recipe: Recipe, ranks: Ranks, whole: bool) -> Recorded:
        rank = self._rank(recipe, ranks)
        mesh = self._join(rank)
        batch = self.task.collate([self._example()] * recipe.micro_batch_size)
        self.task.loss_chunks = recipe.loss_chunks
        with FakeTensorMode() as fake, as_cuda() if self.like == "cuda" else nullcontext():
            # Not on meta: to_empty() cannot swap a fake tensor. Here it costs no memory either.
            model = _on_cpu(new_model(self.task, recipe, on_meta=False))
            names = {module: name for name, module in model.named_modules()}
            runs, blocks = ((), {}) if whole else fold(model, self.task.blocks(model))
            model = arranged(model, self.task, rank, Unlimited(), mesh)
            watch = Watch(names, blocks, runs)
            watch.leave_out([*model.parameters(), *model.buffers()])
            with watch.following():
                self._step(model, rank, watch, fake, batch)
        return watch.recorded

    def _step(self, model: nn.Module, rank: Rank, watch: Watch, fake: FakeTensorMode, batch: Any) -> None:
        accumulates = rank.recipe.grad_accum > 1
        for number, (forward, backward) in enumerate(PASSES):
            last = number == 1 or not accumulates
            watch.begin(forward)
            arrived = tree_map_only(torch.Tensor, fake.from_tensor, batch)
            watch.arrive(arrived)
            with accumulate(model, rank.recipe, last=last):
                loss, _ = loss_of(self.task, model, arrived, rank)
                watch.begin(backward)
                loss.backward()  # type: ignore[no-untyped-call]
            watch.are_gradients([p.grad for p in model.parameters() if p.grad is not None])
            if last:
                model.zero_grad(set_to_none=True)
        watch.begin("evaluation")
        model.eval()
        with torch.no_grad():
            loss_of(self.task, model, arrived, rank)

    def _example(self) -> Any:
        if self._sample is None:
            self._sample = self.task.example()
        return self._sample

    def _rank(self, recipe: Recipe, ranks: Ranks) -> Rank:
        run = RunDir(Path("/nowhere"))
        return _Imagined(
            run=run,
            attempt=run.attempt(0),
            number=0,
            node=0,
            job=self.job,
            recipe=recipe,
            workdir=".",
            local=0,
            world=ranks.world,
            per_node=ranks.per_node,
            device=torch.device("cpu"),
            stop_file=Path("/nowhere/stop"),
        )

    def _join(self, rank: Rank) -> DeviceMesh | None:
        """A mesh holds values: it is made before tensors have none."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=rank.world)
        return device_mesh(rank) if rank.recipe.sharding in SHARDED else None


def _on_cpu(model: nn.Module) -> nn.Module:
    """Exchanges what the task itself has put on the meta device. Tied tensors stay tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            empty = torch.empty_like(tensor, device="cpu")
            parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
        return made[tensor]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = exchanged(tensor)  # type: ignore[assignment]
    return model


def _sample(recorded: Recorded, micro_batch: int) -> Sample:
    events: list[int] = []
    phases: list[tuple[str, int]] = []
    work = dict.fromkeys(Work4._fields, 0.0)
    for segment in recorded.segments:
        if not phases or phases[-1][0] != segment.phase:
            phases.append((segment.phase, len(events)))
        events += _ordered(segment.events)
        if segment.phase in PASSES[0]:
            work[f"{segment.phase}_flops"] += segment.flops
            work[f"{segment.phase}_bytes"] += segment.traffic
    return Sample(
        micro_batch,
        tuple(recorded.sizes),
        tuple(recorded.categories),
        tuple(recorded.modules),
        tuple(events),
        tuple(phases),
        Work4(**work),
    )


def _ordered(events: list[int]) -> list[int]:
    """What is freed at one time, such as autocast's copies of weights, is freed in any order."""
    ordered: list[int] = []
    for dying, group in itertools.groupby(events, key=lambda event: event < 0):
        some = list(group)
        ordered += sorted(some, reverse=True) if dying else some
    return ordered
