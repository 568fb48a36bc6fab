"""Run on every rank by test_styles.py: dropout of DTensors in parts of unequal sizes, and plain tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from launcher.train.rank import join_ranks, this_place, this_rank
from launcher.train.tensor.tensor_parallel_rng import draw_own_numbers


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    draw_own_numbers(nn.Linear(1, 1), {}, mesh)
    torch.manual_seed(0)
    part = torch.ones(64, 3 + rank.number, requires_grad=True)
    divided = DTensor.from_local(part, mesh, [Shard(1)], run_check=False, shape=(64, 7), stride=(7, 1))
    kept = checkpoint(lambda x: dropout(x, 0.5), divided, use_reentrant=False).to_local()
    kept.sum().backward()
    whole = DTensor.from_local(torch.ones(64), mesh, [Replicate()], run_check=False)
    found = {
        "divided": (kept != 0).tolist(),
        "recomputed": (part.grad != 0).tolist(),
        "whole": dropout(whole, 0.5).to_local().tolist(),
        "plain": dropout(torch.ones(64), 0.5).tolist(),
    }
    (out.parent / f"rank-{rank.number}.json").write_text(json.dumps(found))
    if rank.first:
        out.write_text("null")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
