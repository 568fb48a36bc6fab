"""Run on every rank by test_drain.py: memory runs out at one allocation of a step after the other, on one
rank or on several; the step is finished with zeros, thrown away and repeated.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from countdown import Countdown
from launcher.rundir.files import replace_json
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.error_report import leave
from launcher.train.forward import loss_of
from launcher.train.local_shards import local
from launcher.train.loss import chunked_cross_entropy
from launcher.train.mesh import meshes
from launcher.train.model import arranged, new_model
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.recovery import selftest
from launcher.train.recovery.collectives import Collectives
from launcher.train.sharding.cleanup import clean, free_failed_pass, partial_sums
from launcher.train.sharding.sharding import accumulate
from launcher.train.task import TaskError
from ragged import VOCABULARY, Ragged
from runs import HERE, recipe

STRIDE = int(os.environ.get("DRAIN_STRIDE", "0"))
"""1: every allocation. 0: some POSITIONS of each case, and three times as many of those that show what the
clean-up is for."""
POSITIONS = int(os.environ.get("DRAIN_POSITIONS", "8"))
WHO = ("one", "all", "apart")
FLAG = torch.zeros(())  # made before allocations are counted
BY_WORLD: dict[int, list[dict[str, str]]] = {
    2: [
        {"sharding": "fsdp"},
        {"sharding": "fsdp", "activations": "checkpoint", "grad_sync": "last"},
        {"sharding": "fsdp", "offload": "cpu", "grad_sync": "last"},
        {"sharding": "fsdp-keep", "activations": "checkpoint"},
        {"sharding": "fsdp-keep", "precision": "bf16-mixed", "grad_sync": "last"},
        {"sharding": "fsdp", "loss_chunks": "3"},
        {"sharding": "fsdp-layers", "activations": "checkpoint"},
    ],
    4: [
        {"sharding": "hybrid"},
        {"sharding": "hybrid", "activations": "checkpoint", "grad_sync": "last"},
        {"sharding": "hybrid", "offload": "cpu", "precision": "bf16-mixed"},
        {"sharding": "fsdp", "grad_sync": "last"},
        {"sharding": "hybrid", "loss_chunks": "3", "grad_sync": "last"},
    ],
}


class Stack(nn.Module):
    """Leaves its last block out when told to. Its embedding and its head are FSDP units."""

    skips = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, dim)) for _ in range(3)
        )
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, chunks: int) -> Any:
        x = self.embedding(tokens)
        for layer in list(self.layers)[: -1 if self.skips else None]:
            x = x + layer(x)
        return chunked_cross_entropy(x, self.head, targets, chunks)


class Stacked(Ragged):
    sends = False

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.sends:
            most(0)
        return model(batch["inputs"], batch["targets"], self.loss_chunks)

    def model(self) -> nn.Module:
        return Stack(self.dim)


class Case:
    """A model, two micro-batches of one step, and the step."""

    def __init__(self, rank: Rank, fields: dict[str, str], budget: MemoryBudget) -> None:
        asked = dict(fields)
        self.recipe = recipe(asked.pop("sharding"), 2, 2, **asked)
        self.rank = Rank(**{**vars(rank), "recipe": self.recipe})
        self.task, self.budget, self.countdown = Stacked(), budget, Countdown()
        budget.drills = self.countdown  # type: ignore[assignment]
        samples = self.task.data("train")[4 * rank.number :]
        self.batches = [self.task.collate(samples[:2]), self.task.collate(samples[2:4])]
        self.task.loss_chunks = self.recipe.loss_chunks
        torch.manual_seed(0)
        self.model = arranged(
            new_model(self.task, self.recipe), self.task, self.rank, budget, meshes(self.rank)
        )
        assert isinstance(self.model, FSDPModule)
        self.collectives = Collectives(self.model, rank.device)

    def pass_of(self, index: int) -> None:
        self.collectives.begin(self.meet(index))
        with accumulate(self.model, self.recipe, last=index == 1):
            loss_of(self.task, self.model, self.batches[index], self.rank)[0].backward()
        self.collectives.finish()

    def meet(self, index: int) -> bool:
        return self.recipe.grad_sync == "each" or index == 1

    def passes(self) -> None:
        for index in range(len(self.batches)):
            self.pass_of(index)

    def step(self) -> bool:
        """True: some rank ran out of memory, and now all know."""
        return any(most(self.failed_in(index)) for index in range(len(self.batches)))

    def failed_in(self, index: int) -> bool:
        try:
            self.pass_of(index)
            return False
        except torch.OutOfMemoryError:
            pass  # what the exception holds is let go here
        free_failed_pass(self.rank.device, self.budget)
        assert self.collectives.why_not is None
        self.collectives.drain()
        return True

    def gradients(self) -> list[torch.Tensor]:
        met = [local(p.grad).clone() for p in self.model.parameters() if p.grad is not None]
        return [*met, *(part.clone() for part in partial_sums(self.model))]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def most(value: float) -> int:
    """The largest of all ranks."""
    FLAG.fill_(value)
    dist.all_reduce(FLAG, op=dist.ReduceOp.MAX)
    return int(FLAG)


def sweep(case: Case) -> dict[str, Any]:
    """After each failure: drain, meet, clean, repeat."""
    budget, countdown, rank = case.budget, case.countdown, case.rank
    with case.collectives.local():  # learns the sequences
        case.passes()
    clean(case.model)
    gc.unfreeze()  # the case before
    gc.collect()
    gc.freeze()  # else each collection goes through all of torch
    before = countdown.allocations
    assert not case.step()
    total = most(countdown.allocations - before)
    found = {"allocations": total, "steps": 0, "failed": 0, "again": 0, "wrong": 0, "left": 0}
    expected = case.gradients()
    clean(case.model)
    gc.collect()
    live = budget.live
    for number, at in enumerate(range(1, total + 1, STRIDE or total // POSITIONS)):
        for who in WHO if STRIDE else [WHO[number % len(WHO)]]:
            countdown.fail_in(position(rank, who, at, total))
            found["steps"] += 1
            found["failed"] += case.step()
            countdown.fail_in(None)
            clean(case.model)
            found["left"] += most(not comes_back(budget, live))
            found["again"] += case.step()
            found["wrong"] += most(not same(case.gradients(), expected))
            clean(case.model)
    return found


def comes_back(budget: MemoryBudget, live: int) -> bool:
    """gloo's threads hold a collective's tensors for a moment after it has ended."""
    deadline = time.monotonic() + 60.0
    while gc.collect() >= 0 and budget.live != live and time.monotonic() < deadline:
        time.sleep(0.01)
    return budget.live == live


def position(rank: Rank, who: str, at: int, total: int) -> int | None:
    """Of the allocation that fails on this rank."""
    if who == "apart":
        return 1 + (at + rank.number * total // 3) % total
    return at if who == "all" or rank.number == rank.world - 1 else None


def careless(case: Case, total: int) -> dict[str, int]:
    """Wrong gradients of a step that is repeated after less than `clean`; alone and without collectives."""
    ways = {"no gradients": no_gradients, "reset_iter_state": reset, "clean": clean}
    wrong = dict.fromkeys(ways, 0)
    with case.collectives.local():
        case.passes()
        expected = case.gradients()
        for name, forget in ways.items():
            for at in range(1, total + 1, total // (3 * POSITIONS)):
                clean(case.model)
                case.countdown.fail_in(at)
                with suppress(torch.OutOfMemoryError):
                    case.passes()
                case.countdown.fail_in(None)
                forget(case.model)
                try:
                    case.passes()
                    wrong[name] += not same(case.gradients(), expected)
                except (AssertionError, RuntimeError, TaskError):
                    wrong[name] += 1
    clean(case.model)
    return wrong


def no_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def reset(model: Any) -> None:
    if hasattr(model, "reset_iter_state"):  # from torch 2.13 on
        model.reset_iter_state()
    no_gradients(model)


def skipped(rank: Rank, budget: MemoryBudget) -> list[str | None]:
    """Why a failure could not be drained: in the second step, in one after an evaluation, in one after a
    step that left a block out; for another model in the first step whose task has sent something of its own,
    and in the second."""
    case, able = Case(rank, {"sharding": "fsdp"}, budget), []
    for happens in (case.passes, partial(evaluate, case), partial(leave_out, case)):
        happens()
        case.collectives.begin(case.meet(0))
        able.append(case.collectives.why_not)
        case.passes()
    case = Case(rank, {"sharding": "fsdp"}, budget)
    case.passes()
    case.collectives.begin(case.meet(0))
    most(0)
    able.append(case.collectives.why_not)
    case.task.sends = True
    case.passes()
    case.collectives.begin(case.meet(0))
    return [*able, case.collectives.why_not]


@torch.no_grad()
def evaluate(case: Case) -> None:
    loss_of(case.task, case.model, case.batches[0], case.rank)


def leave_out(case: Case) -> None:
    case.model.skips = True
    case.passes()
    case.model.skips = False


def self_tests(rank: Rank, sharding: str) -> list[str | None]:
    """As it is; without torch's own reset, as before torch 2.13; and with nothing else than that."""
    asked = Rank(**{**vars(rank), "recipe": recipe(sharding)})
    mesh = meshes(asked).data
    before = torch.get_rng_state()
    self_test = inspect.unwrap(selftest.self_test)
    found = [self_test(asked, mesh)]
    assert torch.equal(torch.get_rng_state(), before)
    if public := getattr(FSDPModule, "reset_iter_state", None):
        del FSDPModule.reset_iter_state
        found.append(self_test(asked, mesh))
        FSDPModule.reset_iter_state = public
    selftest.clean = reset
    found.append(self_test(asked, mesh))
    selftest.clean = clean
    return found


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    result: dict[str, Any] = {"sweeps": {}, "careless": {}}
    shardings = {fields["sharding"] for fields in BY_WORLD[rank.world]}
    result["self tests"] = {sharding: self_tests(rank, sharding) for sharding in sorted(shardings)}
    with MemoryBudget(2**30) as budget:
        result["why not"] = skipped(rank, budget)
        for fields in BY_WORLD[rank.world]:
            case, begun = Case(rank, fields, budget), time.perf_counter()
            name = " ".join(f"loss in {v}" if k == "loss_chunks" else v for k, v in fields.items())
            found = result["sweeps"][name] = sweep(case)
            found["seconds"] = round(time.perf_counter() - begun, 2)
            found["static"] = case.collectives.static
            if len(fields) == 1:
                result["careless"][name] = careless(case, found["allocations"])
    if rank.first:
        replace_json(out, result)
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))
