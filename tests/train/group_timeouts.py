"""Run on every rank by test_mesh_failures.py: the timeout of each process group of several meshes, in s."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from launcher.rundir.files import replace_json
from launcher.train.error_report import leave
from launcher.train.mesh import meshes
from launcher.train.rank import Rank, join_ranks, this_place, this_rank
from runs import recipe


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    for asked in (recipe("hybrid"), recipe("zero1", tensor=2), recipe("fsdp", pipeline=2)):
        meshes(Rank(**{**vars(rank), "recipe": asked}))
    backends = {group.group_desc: group._get_backend(rank.device) for group in _world.pg_map}
    if rank.first:
        replace_json(out, {name: one.options._timeout.total_seconds() for name, one in backends.items()})
    dist.barrier()  # the first rank serves the store
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
