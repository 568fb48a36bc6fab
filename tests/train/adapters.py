"""Run on every rank by test_adapters.py: the losses of an adapter's training under several recipes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from launcher.rundir.layout import RunDir
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.local_shards import local
from launcher.train.loop import Trainer
from launcher.train.phase import Where
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import job, recipe

STEPS, BATCH = 5, 8
LLAMA: dict[str, Any] = {
    "task": "launcher.tasks.llama:LanguageModel",
    "args": {"shape": "tiny", "context": 32},
    "batch": {"global": BATCH},
    "steps": 2 * STEPS,
    "train": {"lr": 1e-2, "clip_norm": 1.0, "probe": "never"},
}


def made(rank: Rank, case: dict[str, Any], run: RunDir) -> Trainer:
    case = dict(case)
    train = {**LLAMA["train"], **({"clip_norm": None} if case.pop("unclipped", False) else {})}
    asked = job(**{**LLAMA, "train": train, "adapter": case.pop("adapter"), **case.pop("job", {})})
    accumulation = case.pop("accumulation", 2)
    chosen = recipe(micro=BATCH // rank.world // accumulation, accumulation=accumulation, **case)
    return Trainer(Rank(**{**vars(rank), "job": asked, "recipe": chosen, "run": run}), Where(), Unlimited())


def trained(rank: Rank, folder: Path, number: int, case: dict[str, Any]) -> dict[str, Any]:
    """Five steps, a checkpoint, five more; and the last five again from the checkpoint."""
    run = RunDir(folder / f"case-{number}")
    run.path.mkdir(exist_ok=True)
    one = made(rank, case, run)
    steps = [one.train_step(step) for step in range(1, STEPS + 1)]
    saved = one.checkpoints.save(STEPS)
    assert saved is not None and saved.problem is None, saved
    steps += [one.train_step(step) for step in range(STEPS + 1, 2 * STEPS + 1)]
    again = made(rank, case, run)
    assert again.checkpoints.restore() == STEPS
    resumed = [again.train_step(step) for step in range(STEPS + 1, 2 * STEPS + 1)]
    parameters = list(one.model.parameters())
    return {
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "resumed": [step.loss for step in resumed],
        "frozen": sum(local(p).nbytes for p in parameters if not p.requires_grad),
        "trained": sorted({str(p.dtype) for p in parameters if p.requires_grad}),
    }


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    cases = json.loads((out.parent / "cases.json").read_text())
    found = [trained(rank, out.parent, number, case) for number, case in enumerate(cases)]
    (out.parent / f"rank-{rank.number}.json").write_text(json.dumps(found))
    if rank.first:
        out.write_text("null")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]))
