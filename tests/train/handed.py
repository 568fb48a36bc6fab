"""Run on every rank by test_handover.py: states given in the middle of a step, and taken up."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher.runs.files import replace_json
from launcher.runs.layout import RunDir
from launcher.runs.shared import handover_folder
from launcher.train.budget import Unlimited
from launcher.train.failure import leave
from launcher.train.loop import Trainer
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from launcher.train.where import Where
from runs import HERE, job, recipe
from saves import bits, different, everywhere, steps

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "fsdp": {},
    "fsdp of bf16": {"precision": "bf16", "optimizer": "adamw-bf16"},
    "ddp in 8 bit": {"sharding": "ddp", "optimizer": "adamw-8bit"},
    "fsdp in 8 bit": {"optimizer": "adamw-8bit"},
    "lion in 8 bit": {"optimizer": "lion-8bit"},
    "lion, then kept": {"optimizer": "lion", "then": {"sharding": "fsdp-keep"}},
    "adam-mini": {"optimizer": "adam-mini"},
    "on the host": {"offload": "cpu"},
    "states on the host": {"offload": "cpu-optimizer", "optimizer": "adam-mini"},
    "on NVMe in 8 bit": {"sharding": "ddp", "offload": "nvme-optimizer", "optimizer": "adamw-8bit"},
    "then on the host": {"then": {"offload": "cpu-optimizer", "activations": "checkpoint"}},
}


def trainer(rank: Rank, folder: Path, **choice: Any) -> Trainer:
    train = {"nvme_dir": str(folder.parent)}
    asked = job(task="normed:Normed", args={"dim": 96}, train=train)
    fields = {"recipe": recipe(micro=2, accumulation=2, **choice), "job": asked, "workdir": str(HERE)}
    return Trainer(replace(rank, run=RunDir(folder), **fields), Where(), Unlimited())


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


def _in_the_next_forward(made: Trainer, call: Any) -> list[Any]:
    """On another thread, while gathered parameters are in the model."""
    done: list[Any] = []

    def hook(*_: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=lambda: done.append(call()))
        thread.start()
        thread.join()

    inner = made.checkpoints.own.model.layers[1][2]
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

    attempt("other layout", sharding="fsdp")
    attempt("other steps", one_step_more)
    attempt("rank 1 is missing", remove)
    attempt("as new", lambda made, path: made.checkpoints.save(1))
    return reasons


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    result: dict[str, Any] = {
        "cases": {name: round_trip(rank, out.parent / name, **choice) for name, choice in CASES.items()},
        "refused": refused(rank, out.parent / "refused"),
    }
    if rank.first:
        replace_json(out, result)
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(Path(sys.argv[1]))
