"""Run on every rank: what real training steps hold, phase by phase, for each case of `cases.json`.

On the CPU under MemoryBudget, which counts every storage from birth to death; on a GPU by the allocator's own
statistics. Two steps, of which the first makes the optimizer's states, and an evaluation.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.budget import Budget, MemoryBudget, Unlimited
from launcher.train.failure import leave
from launcher.train.loop import Trainer
from launcher.train.optimizers.state import local
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.where import Phase, Where

EVALUATED = 2
"Batches of the held-out data: the second one meets what the first one left."
Peaks = dict[str, dict[str, int]]
"Bytes: moment (first step, steady state, evaluation), then phase."


class Phases(Where):
    """Takes the peak at each change of phase. What lies between two phases counts as `data`."""

    def __init__(self, take: Callable[[], int]) -> None:
        super().__init__(phase="data")
        self.take, self.peaks = take, Peaks()

    @contextmanager
    def of(self, moment: str) -> Iterator[None]:
        gc.collect()  # FSDP's modules and autograd leave cycles: when they die shall not be chance
        self.take()
        self.now = self.peaks[moment] = {}
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
    budget = MemoryBudget(sys.maxsize)
    budget.where = where = Phases(budget.take_peak)
    with budget:
        run(trainer_of(rank, case, where, budget), where)
    answer: dict[str, Any] = {"peaks": where.peaks}
    if case.get("profile"):
        answer["profiled"] = profiled(trainer_of(rank, case, Where(), Unlimited()))
    return answer


def on_gpu(rank: Rank, case: dict[str, Any]) -> dict[str, Any]:
    """Allocated by phase, the most reserved, and the phase in which memory ran out under `cap` bytes."""
    device, reserved = rank.device, 0
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, case.get("cap", total) / total), device)

    def take() -> int:
        nonlocal reserved
        reserved = max(reserved, torch.cuda.max_memory_reserved(device))
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    where, failed = Phases(take), None
    try:
        run(trainer_of(rank, case, where, Unlimited()), where)
    except torch.OutOfMemoryError:
        failed = where.phase
    return {"peaks": where.peaks, "reserved": reserved, "failed": failed}


def trainer_of(rank: Rank, case: dict[str, Any], where: Where, budget: Budget) -> Trainer:
    job, recipe = Job.model_validate(case["job"]), Recipe.model_validate(case["recipe"])
    trainer = Trainer(Rank(**{**vars(rank), "job": job, "recipe": recipe}), where, budget)
    held_out = trainer.held_out
    assert held_out is not None
    held_out.samples = min(held_out.samples, EVALUATED * recipe.micro_batch_size * rank.world)
    return trainer


def run(trainer: Trainer, where: Phases) -> None:
    for step, moment in enumerate(("first step", "steady state"), start=1):
        with where.of(moment):
            trainer.train_step(step)
    with where.of("evaluation"):
        trainer.evaluate()


def profiled(trainer: Trainer) -> dict[str, int]:
    """The same two steps as PyTorch's own allocator sees them: an independent count of the same bytes.

    It also sees scratch inside kernels, and batches while they are put together.
    """
    peaks = {}
    for step, moment in enumerate(("first step", "steady state"), start=1):
        gc.collect()
        held = stored(trainer)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            trainer.train_step(step)
        live = peak = 0
        for _, size in sorted(_allocations(profile)):
            live += size
            peak = max(peak, live)
        peaks[moment] = held + peak
    return peaks


def stored(trainer: Trainer) -> int:
    """Bytes between two steps: parameters, buffers, and what the optimizer keeps."""
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    model: nn.Module = trainer.model
    tensors = [*model.parameters(), *model.buffers(), *(s for s in states if isinstance(s, torch.Tensor))]
    storages = {local(tensor.detach()).untyped_storage() for tensor in tensors}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _allocations(profile: Any) -> Iterator[tuple[int, int]]:
    """(time, bytes), negative where memory is given back."""
    left = list(profile.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left.extend(event.children)
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.alloc_size


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
