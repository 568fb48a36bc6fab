"""Run on two ranks by test_initialise.py: parameters drawn whole, and drawn shard by shard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from launcher.train import initialise
from launcher.train.initialise import fan_in, initialise_parameters
from launcher.train.rank import join_ranks, this_place, this_rank


def model() -> nn.Module:
    """Uneven rows: 7 and 5 over two ranks, 1 row that only rank 0 has."""
    return nn.Sequential(
        nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Linear(11, 5), nn.LayerNorm(5), nn.Linear(5, 1)
    )


def main(out: Path) -> None:
    rank = this_rank(this_place())
    join_ranks(rank)
    initialise.GROUP = 33  # groups of 3 rows for one layer and 1 for another: shards begin inside of them
    with torch.device("meta"):
        whole, sharded = model(), model()
    for module in sharded:
        fully_shard(module, mesh=init_device_mesh("cpu", (rank.world,)))
    for one in (whole, sharded):
        one.to_empty(device="cpu")
        initialise_parameters(one, 5, fan_in)
    parameters = dict(sharded.named_parameters())
    result = {
        "equal": {
            name: torch.equal(parameter, parameters[name].full_tensor())  # type: ignore[attr-defined]
            for name, parameter in whole.named_parameters()
        },
        "std": float(whole[2].weight.std()) / fan_in("", whole[2].weight),
        "norm": [float(whole[1].weight.min()), float(whole[1].bias.max()), float(whole[1].running_var.min())],
        "alike": torch.equal(whole[0].weight.flatten()[:5], whole[2].weight.flatten()[:5]),
    }
    if rank.first:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
