"""The device meshes of a rank: the ranks that it exchanges gradients, activations and stages with."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launcher.spec.recipe import REPLICATED, Recipe
from launcher.train.rank import Rank, SetupError

REPLICATE, SHARD, TENSOR, PIPELINE = "replicate", "shard", "tensor", "pipeline"
"Names of the dimensions."

# Public since torch 2.14; the old name warns.
_set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


class Meshes(NamedTuple):
    data: DeviceMesh
    "The ranks that train on different samples: one dimension, or with `hybrid` (replicate, shard)."
    tensor: DeviceMesh | None = None
    "The ranks that compute each layer together; None if there is one."
    pipeline: DeviceMesh | None = None
    "The ranks with the other stages; None if there is one stage."


def meshes(rank: Rank) -> Meshes:
    """Return the meshes that contain this rank. Every rank must call this.

    Raises SetupError if `hybrid` does not get several full nodes.
    """
    pipeline, data, tensor = rank.mesh
    sizes = {PIPELINE: pipeline, SHARD: data, TENSOR: tensor}
    if rank.recipe.sharding == "hybrid":
        per_node = rank.per_node // tensor
        nodes, rest = divmod(data, per_node)
        if nodes < 2 or rest:
            raise SetupError(
                f"sharding: hybrid replicates over nodes and shards within one; {data * tensor} ranks with "
                f"{rank.per_node} per node are not several full nodes; use sharding: fsdp"
            )
        sizes = {PIPELINE: pipeline, REPLICATE: nodes, SHARD: per_node, TENSOR: tensor}
    over_data = tuple(name for name in (REPLICATE, SHARD) if name in sizes)
    # A dimension of one rank would only cost a process group. The data-parallel ones are always there.
    used = {name: size for name, size in sizes.items() if name in over_data or size > 1}
    whole = init_device_mesh(rank.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
    if rank.world > 1 and dist.get_backend() != "fake":  # one rank, and the ranks of a plan, never wait
        timeout = timedelta(seconds=rank.job.train.collective_timeout)
        for group in whole.get_all_groups():  # torch's default is 10 minutes (NCCL) or 30 (gloo)
            _set_timeout(timeout, group)
    if len(used) == len(over_data):
        return Meshes(whole)
    return Meshes(
        whole[over_data if len(over_data) > 1 else over_data[0]],
        whole[TENSOR] if tensor > 1 else None,
        whole[PIPELINE] if pipeline > 1 else None,
    )


def replicas_of(mesh: Meshes, recipe: Recipe) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold the same parameters as this rank, and train on other samples.

    None if each rank that trains on other samples has its own shard, or if there are no such ranks.
    """
    if recipe.sharding == "hybrid":
        return mesh.data.get_group(REPLICATE)
    return mesh.data.get_group() if recipe.sharding in REPLICATED else None
