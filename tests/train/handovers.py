"""Run on every rank by test_handover.py: states given in the middle of a step, and taken up."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import handover_folder
from launcher.train.cpu_memory_budget import Budget, MemoryBudget, Unlimited
from launcher.train.error_report import leave
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import HERE, first_cases, job, recipe
from saves import bits, different, everywhere, steps

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "fsdp": {},
    "zero1": {"sharding": "zero1"},
    "fsdp in 8 bit": {"optimizer": "adamw-8bit"},
    "states on the host": {"offload": "cpu-optimizer", "optimizer": "adam-mini"},
    "on NVMe in 8 bit": {"sharding": "ddp", "offload": "nvme-optimizer", "optimizer": "adamw-8bit"},
    "then on the host": {"then": {"offload": "cpu-optimizer", "activations": "checkpoint"}},
    "fsdp of bf16": {"precision": "bf16", "optimizer": "adamw-bf16"},
    "ddp in 8 bit": {"sharding": "ddp", "optimizer": "adamw-8bit"},
    "lion in 8 bit": {"optimizer": "lion-8bit"},
    "lion, then kept": {"optimizer": "lion", "then": {"sharding": "fsdp-keep"}},
    "adam-mini": {"optimizer": "adam-mini"},
    "then by layers": {"then": {"sharding": "fsdp-layers"}},
    "on the host": {"offload": "cpu"},
    "zero1 in 8 bit": {"sharding": "zero1", "optimizer": "adamw-8bit"},
    "zero1 with states on the host": {
        "sharding": "zero1",
        "offload": "cpu-optimizer",
        "optimizer": "adam-mini",
    },
}


def trainer(rank: Rank, folder: Path, budget: Budget | None = None, **choice: Any) -> Trainer:
    train = {"nvme_dir": str(folder.parent)}
    batch = {"global": 4 * rank.world}
    asked = job(task="normed:Normed", args={"dim": 96}, train=train, batch=batch)
    fields = {"recipe": recipe(micro=2, accumulation=2, **choice), "job": asked, "workdir": str(HERE)}
    return Trainer(replace(rank, run=RunDir(folder), **fields), Where(), budget or Unlimited())


def round_trip(rank: Rank, folder: Path, **choice: Any) -> dict[str, Any]:
    """Two steps, a third one in whose forward pass the state is given by another thread; then a new trainer
    that takes it up and repeats the third."""
    other = choice.pop("then", {})
    made = trainer(rank, folder, **choice)
    made.handover.resume()
    steps(made, 1, 2)
    before = bits(made)
    given = _in_the_next_forward(made, made.handover.give)
    losses = steps(made, 3, 3)
    again = trainer(rank, folder, **{**choice, **other})
    resumed = again.handover.resume()
    after = bits(again)
    return {
        "bytes": everywhere(given[0]),
        "resumed": [resumed.step, resumed.source],
        "different": everywhere(different(before, after)),
        "losses": [losses, steps(again, 3, 3)],
        "after the step": everywhere(different(bits(made), bits(again))),
        "left": everywhere(handover_folder(again.rank.run, rank.node).exists()),
    }


def counted(rank: Rank, folder: Path, offload: str) -> list[int]:
    """Bytes that taking up a handover adds to what is counted, at its end and at its peak, where neither the
    states nor what is read are the device's."""
    made = trainer(rank, folder, offload=offload)
    steps(made, 1, 1)
    made.handover.give()
    dist.barrier()
    with MemoryBudget(sys.maxsize) as budget:
        again = trainer(rank, folder, budget, offload=offload)
        before = budget.live
        budget.take_peak()
        assert again.handover.resume().source == "shared-memory"
        return [budget.live - before, budget.take_peak() - before]


RESHARDED: dict[str, list[dict[str, Any]]] = {
    "ddp, fsdp": [{"sharding": "ddp"}, {"sharding": "fsdp"}],
    "fsdp, zero1": [{"sharding": "fsdp"}, {"sharding": "zero1"}],
    "ddp on the host, fsdp": [
        {"sharding": "ddp", "optimizer": "adam-mini"},
        {"sharding": "fsdp-keep", "optimizer": "adam-mini", "offload": "cpu-optimizer"},
    ],
    "ddp, fsdp in 8 bit": [
        {"sharding": "ddp", "optimizer": "adamw-8bit"},
        {"sharding": "fsdp", "optimizer": "adamw-8bit"},
    ],
    "fsdp, ddp": [{"sharding": "fsdp"}, {"sharding": "ddp"}],
    "ddp, zero1": [{"sharding": "ddp"}, {"sharding": "zero1"}],
    "zero1, ddp": [{"sharding": "zero1"}, {"sharding": "ddp"}],
    "zero1 on the host, fsdp": [
        {"sharding": "zero1", "offload": "cpu-optimizer"},
        {"sharding": "fsdp"},
    ],
}
ON_TWO_NODES: dict[str, list[dict[str, Any]]] = {
    "hybrid, fsdp": [{"sharding": "hybrid"}, {"sharding": "fsdp"}],
    "ddp, hybrid": [{"sharding": "ddp"}, {"sharding": "hybrid"}],
    "fsdp, hybrid": [{"sharding": "fsdp"}, {"sharding": "hybrid"}],
    "zero1, zero1": [{"sharding": "zero1"}, {"sharding": "zero1"}],
    "zero1, ddp": [{"sharding": "zero1"}, {"sharding": "ddp"}],
}


def resharded(rank: Rank, folder: Path, first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Two steps, and what another sharding takes up of them."""
    made = trainer(rank, folder, **first)
    made.handover.resume()
    steps(made, 1, 2)
    made.handover.give()
    dist.barrier()
    again = trainer(rank, folder, **then)
    resumed = again.handover.resume()
    differ = everywhere(different(whole(made), whole(again))) if resumed.step else []
    random = torch.get_rng_state()
    undisturbed = steps(made, 3, 3)
    torch.set_rng_state(random)
    return {
        "resumed": [resumed.step, resumed.source, resumed.skipped],
        "different": differ,
        "losses": [undisturbed, steps(again, 3, 3)],
    }


def whole(made: Trainer) -> dict[str, Any]:
    """As `bits`, but of all ranks together."""
    found = {f"buffer {name}": buffer for name, buffer in made.model.named_buffers()}
    for name, p in made.model.named_parameters():
        found[name] = full(p.detach())
        found |= {f"{name} {key}": full(value) for key, value in made.optimizer.state[p].items()}
    return {name.replace("module.", ""): value.clone() for name, value in found.items()}


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _in_the_next_forward(made: Trainer, call: Any) -> list[Any]:
    """On another thread, while gathered parameters are in the model."""
    done: list[Any] = []

    def hook(*_: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=lambda: done.append(call()))
        thread.start()
        thread.join()

    inner = made.checkpoints.rank_state.model.layers[1][2]
    handle = inner.register_forward_hook(hook)
    return done


def refused(rank: Rank, folder: Path) -> dict[str, Any]:
    """What does not fit together is not taken, on no rank."""
    reasons = {}

    def attempt(name: str, spoil: Any = lambda made, path: None, **then: Any) -> None:
        made = trainer(rank, folder / name, sharding="ddp")
        steps(made, 1, 1)
        made.handover.give()
        spoil(made, handover_folder(made.rank.run, rank.node))
        dist.barrier()
        resumed = trainer(rank, folder / name, **{"sharding": "ddp", **then}).handover.resume()
        reasons[name] = [resumed.step, resumed.source, resumed.skipped]

    def one_step_more(made: Trainer, path: Path) -> None:
        steps(made, 2, 2)
        if not rank.first:
            made.handover.give()

    def remove(made: Trainer, path: Path) -> None:
        if not rank.first:
            (path / "rank-00001").unlink()

    attempt("other states", optimizer="lion", sharding="fsdp")
    attempt("other steps", one_step_more)
    attempt("rank 1 is missing", remove)
    attempt("as new", lambda made, path: made.checkpoints.save(1))
    return reasons


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    if rank.world == 4:
        rank = replace(rank, node=rank.number // 2, local=rank.number % 2, per_node=2)
    pairs = ON_TWO_NODES if rank.world == 4 else first_cases(RESHARDED, 4)
    result: dict[str, Any] = {
        "resharded": {name: resharded(rank, out.parent / name, *pair) for name, pair in pairs.items()}
    }
    if rank.world == 2:
        cases = first_cases(CASES, 7)
        result |= {
            "cases": {name: round_trip(rank, out.parent / name, **choice) for name, choice in cases.items()},
            "counted": {one: counted(rank, out.parent / one, one) for one in ("cpu", "cpu-optimizer")},
            "refused": refused(rank, out.parent / "refused"),
        }
    if rank.first:
        replace_json(out, result)
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))
