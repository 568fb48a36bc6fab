"""Run on every rank: what real training steps hold, phase by phase, for each case of `cases.json`.

On the CPU under MemoryBudget, which counts every storage from birth to death; on a GPU by the allocator's own
statistics. Two steps, or `steps`, of which the first makes the optimizer's states, and an evaluation.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import ConcatDataset

from launcher.rundir.layout import RunDir
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import Phase
from launcher.train.checkpoints import checkpoints
from launcher.train.checkpoints.checkpoints import load as read
from launcher.train.cpu_memory_budget import Budget, MemoryBudget, Unlimited
from launcher.train.data import feed
from launcher.train.data.data import TrainingData
from launcher.train.error_report import leave
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.recovery import collectives

EVALUATED = 2
"Batches of the held-out data: the second one meets what the first one left."
MOMENTS = ("first step", "steady state")
GLOO_THREAD = "pt_gloo_runloop"
"Name of the threads in which gloo runs collectives."
Peaks = dict[str, dict[str, int]]
"Bytes: moment (first step, steady state, evaluation), then phase."


class Storages(MemoryBudget):
    """Without what gloo holds and NCCL does not: the copy in which it reduces and scatters, which no operator
    makes and a view shows, and the tensors of a collective that has just ended."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "is_view", False) and not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            _wait_for_gloo()
        return out


def _wait_for_gloo() -> None:
    """Wait until gloo's threads sleep. One that has just run a collective still holds its tensors, and the
    peaks of tensor parallelism would differ from run to run, by the largest of them."""
    names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
    threads = [name.with_name("stat") for name in names if name.read_text().strip() == GLOO_THREAD]
    for _ in range(2):  # it may sleep for a moment until this thread gives up Python's lock
        while any(thread.read_text().rpartition(") ")[2].startswith("R") for thread in threads):
            time.sleep(0)
        time.sleep(0.001)


class Phases(Where):
    """Takes the peak at each change of phase. What lies between two phases counts as `data`."""

    def __init__(self, take: Callable[[], int]) -> None:
        super().__init__(phase="data")
        self.take, self.peaks = take, Peaks()

    @contextmanager
    def of(self, moment: str) -> Iterator[None]:
        gc.collect()  # FSDP's modules and autograd leave cycles: when they die shall not be chance
        self.take()
        self.now = self.peaks.setdefault(moment, {})
        yield
        self._note()

    @contextmanager
    def during(self, phase: Phase, *, users: bool = False) -> Iterator[None]:
        self._note()
        with super().during(phase, users=users):
            yield
            self._note()

    def _note(self) -> None:
        if self.peaks:
            self.now[self.phase] = max(self.now.get(self.phase, 0), self.take())


def measured(rank: Rank, case: dict[str, Any]) -> dict[str, Any]:
    if rank.device.type == "cuda":
        return on_gpu(rank, case)
    chosen = Recipe.model_validate(case["recipe"])
    if chosen.compile:
        return compiled(pretended(rank, case["ranks"]) if chosen.tensor > 1 else rank, case)
    budget = Storages(sys.maxsize)
    budget.where = where = Phases(budget.take_peak)
    with budget:
        run(trainer_of(rank, case, where, budget), where)
    gc.collect()
    answer: dict[str, Any] = {"peaks": {**where.peaks, "resume": resumed(rank, case)}}
    if case.get("profile"):
        answer["profiled"] = profiled(trainer_of(rank, case, Where(), Unlimited()))
    return answer


def compiled(rank: Rank, case: dict[str, Any]) -> dict[str, Any]:
    """The second step as the profiler sees it: no mode sees what compiled code allocates."""
    with apart(rank):
        trainer = trainer_of(rank, case, Where(), Unlimited())
        if isinstance(rank, OneOfMany):
            compare_nothing(trainer)
        return {"peaks": {MOMENTS[1]: {"step": profiled(trainer)[MOMENTS[1]]}}}


def resumed(rank: Rank, case: dict[str, Any]) -> dict[str, int]:
    """The peak of reading a checkpoint into a new model, in a run of the case's own."""
    folder = rank.run.path / f"resumed-{case['number']}"
    there = Rank(**{**vars(rank), "run": RunDir(folder)})
    first = trainer_of(there, case, Where(), Unlimited())
    first.train_step(1)
    first.checkpoints.save_last(1)
    del first
    gc.collect()
    budget = Storages(sys.maxsize)
    with budget:
        second = trainer_of(there, case, budget.where, budget)
        gc.collect()
        budget.take_peak()

        def load(*arguments: Any, **options: Any) -> None:
            with budget.host_side():  # what is read from the files is in host memory, also with a GPU
                read(*arguments, **options)

        with patch.object(checkpoints, "load", load):
            second.handover.resume()
        return {"load": budget.take_peak()}


def on_gpu(rank: Rank, case: dict[str, Any]) -> dict[str, Any]:
    """Allocated by phase, the most reserved, and the phase in which memory ran out under `cap` bytes."""
    device, reserved = rank.device, 0
    total = torch.cuda.get_device_properties(device).total_memory
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated(device) < 2**24, "the case before has left something behind"
    torch.cuda.set_per_process_memory_fraction(min(1.0, case.get("cap", total) / total), device)

    def take() -> int:
        nonlocal reserved
        reserved = max(reserved, torch.cuda.max_memory_reserved(device))
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    where = Phases(take)
    answer = under_cap(rank, case, where, Unlimited())
    return answer | {"reserved": reserved}


def on_cpu(rank: Rank, case: dict[str, Any]) -> dict[str, Any]:
    """The answer of `on_gpu`, with a memory budget for the GPU: `reserved` is what tensors hold."""
    budget = Storages(case.get("cap", sys.maxsize))
    budget.where = where = Phases(budget.take_peak)
    with budget:
        answer = under_cap(rank, case, where, budget)
    return answer | {"reserved": budget.peak}


def under_cap(rank: Rank, case: dict[str, Any], where: Phases, budget: Budget) -> dict[str, Any]:
    """Allocated bytes by phase, seconds and loss of each step, and the phase in which memory ran out."""
    done: list[tuple[float, float]] = []
    failed, alone = None, case["ranks"] == 1
    case = {**case, "job": {**case["job"], "retries": {"lower": 0}}}  # a smaller micro-batch is another case
    one = pretended(rank, case["ranks"])
    with apart(one):
        try:
            trainer = trainer_of(one, case, where, budget)
            if not alone:
                compare_nothing(trainer)
                if isinstance(trainer.model, DistributedDataParallel):
                    trainer.model.register_comm_hook(None, noop_hook)  # the pretended sum is no tensor
            run(trainer, where, case.get("steps", len(MOMENTS)), done)
        except torch.OutOfMemoryError:
            failed = where.phase
    seconds, losses = zip(*done, strict=True) if done else ((), ())
    return {"peaks": where.peaks, "failed": failed, "seconds": seconds, "losses": losses}


def compare_nothing(trainer: Trainer) -> None:
    """For a pretended rank, whose values are nobody's."""
    trainer.guard.refuses = lambda *_, **__: None
    trainer.copies.check_loss = lambda *_: None
    trainer.samples.difference = lambda: 0.0  # type: ignore[method-assign]


def pretended(rank: Rank, world: int) -> Rank:
    """One rank of `world`, whose collectives do nothing: what it gathers is whatever the memory held."""
    dist.destroy_process_group()
    gc.collect()  # what is left of a group must not end its namesake
    if world == 1:
        join_ranks(rank)
        return rank
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return OneOfMany(**{**vars(rank), "world": world, "per_node": min(world, 8)})


def apart(rank: Rank) -> AbstractContextManager[object]:
    """The pretended group does not count its collectives."""
    return (
        patch.object(collectives, "issued_so_far", lambda: 0)
        if isinstance(rank, OneOfMany)
        else nullcontext()
    )


class OneOfMany(Rank):
    """A rank whose peers are pretended: they report what it reports."""

    def add_up(self, *values: torch.Tensor | float) -> list[float]:
        # Gathered parameters are whatever the memory held: a loss may be no number.
        return [self.world * one if math.isfinite(one) else 1.0 for one in super().add_up(*values)]


def trainer_of(rank: Rank, case: dict[str, Any], where: Where, budget: Budget) -> Trainer:
    job, recipe = Job.model_validate(case["job"]), Recipe.model_validate(case["recipe"])
    rank = type(rank)(**{**vars(rank), "job": job, "recipe": recipe})
    with patch.object(feed, "TrainingData", partial(enough, job.batch.global_)):
        trainer = Trainer(rank, where, budget)
    held_out = trainer.held_out
    assert held_out is not None
    held_out.samples = min(held_out.samples, EVALUATED * recipe.micro_batch_size * rank.world)
    return trainer


def enough(samples: int, data: Any, *arguments: Any) -> TrainingData:
    """Training data of at least `samples` samples: pretended ranks may ask for more than there are."""
    times = math.ceil(samples / len(data))
    return TrainingData(ConcatDataset([data] * times) if times > 1 else data, *arguments)


def run(
    trainer: Trainer,
    where: Phases,
    steps: int = len(MOMENTS),
    done: list[tuple[float, float]] | None = None,
) -> None:
    """Train and evaluate. `done` gets the seconds and the loss of each step."""
    for step in range(1, steps + 1):
        with where.of(MOMENTS[min(step, len(MOMENTS)) - 1]):
            began = time.perf_counter()
            loss = trainer.train_step(step).loss
        if done is not None:
            done.append((time.perf_counter() - began, loss))
    with where.of("evaluation"):
        trainer.evaluate()


def profiled(trainer: Trainer) -> dict[str, int]:
    """The same two steps as PyTorch's own allocator sees them: an independent count of the same bytes.

    It also sees scratch inside kernels, and batches while they are put together.
    """
    gc.collect()  # what others left behind must not die within the profile
    live = sum(tensor.untyped_storage().nbytes() for tensor in stored(trainer.model))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        for step, moment in enumerate(MOMENTS, start=1):
            gc.collect()
            with torch.profiler.record_function(moment):
                trainer.train_step(step)
    peaks, now = dict.fromkeys(MOMENTS, 0), MOMENTS[0]
    for _, size, name in sorted(_events(profile)):
        now, live = name or now, live + size
        peaks[now] = max(peaks[now], live)
    return peaks


def stored(model: nn.Module) -> list[torch.Tensor]:
    """One tensor of each storage of parameters and buffers."""
    tensors = [local(tensor.detach()) for tensor in (*model.parameters(), *model.buffers())]
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def _events(profile: Any) -> Iterator[tuple[int, int, str]]:
    """(time, bytes, "") of each allocation, negative where memory is given back; (time, 0, moment)."""
    left = list(profile.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left.extend(event.children)
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.alloc_size, ""
        elif event.name in MOMENTS:
            yield event.start_time_ns, 0, event.name


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    answers = []
    for case in json.loads((out.parent / "cases.json").read_text()):
        with redirect_stdout(None):  # what the trainer says of its data
            answers.append(measured(rank, case))
        gc.collect()
    (out.parent / f"rank-{rank.number}.json").write_text(json.dumps(answers))
    if rank.first:
        out.write_text("null")
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # models.py
    main(Path(sys.argv[1]))
