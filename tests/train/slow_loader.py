"""Run on every rank by test_agreement.py: a loader is slow while another rank is out of memory."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.rundir.files import replace_json
from launcher.spec.events import Downgrade
from launcher.train.error_report import leave
from launcher.train.rank import join_ranks, this_place, this_rank
from launcher.train.recovery.deadline import Deadline
from lowers import Training
from ragged import Ragged
from runs import HERE, recipe

MET = "MET"
"Names the file that is there when rank 0 has met the others again."
SECONDS = 240.0


class Slow(Ragged):
    def data(self, split: str) -> Any:
        return Samples(super().data(split))


class Samples:
    """On rank 1, the first sample of the second micro-batch of step 3 comes when the ranks have met."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.fetched = samples, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        deadline = time.monotonic() + SECONDS
        if self.fetched == 2 * 8 + 4 + 1 and os.environ["RANK"] == "1":
            while not Path(os.environ[MET]).exists():
                assert time.monotonic() < deadline, "the ranks do not meet before the next batch is there"
                time.sleep(0.02)
        return self.samples[index]


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    os.environ[MET] = str(out.parent / "met")
    lift, was_set = Deadline.lift, []

    def told(deadline: Deadline) -> None:
        if deadline._timer is not None and rank.first:
            was_set.append(True)
            Path(os.environ[MET]).touch()
        lift(deadline)

    Deadline.lift = told  # type: ignore[method-assign]
    fails = "rank=first,step=3,phase=forward,allocation=2,micro_batch=4"
    batch = {"batch": {"global": 16}, "task": "slow_loader:Slow"}
    ours = Training(rank, out.parent / "ours", recipe("fsdp", 4, 2), fails, **batch, train={"probe": "never"})
    events = [[one.kind, one.step, one.in_process] for one in ours.events if isinstance(one, Downgrade)]
    if rank.first:
        replace_json(out, {"events": events, "steps": ours.steps, "waited": was_set})
    dist.barrier()
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    torch.manual_seed(0)
    main(Path(sys.argv[1]))
