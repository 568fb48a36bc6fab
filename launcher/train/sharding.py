"""Sharding: how the ranks share one model, and how its gradients meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from launcher.spec.recipe import SHARDED
from launcher.train.precision import mixed_precision
from launcher.train.rank import Rank, SetupError

Fill = Callable[[nn.Module], None]
"Gives values to a model that was built on the meta device."


def shard(model: nn.Module, blocks: Iterable[nn.Module], rank: Rank, fill: Fill | None) -> nn.Module:
    """The model as this rank trains it, on its device. With `fill` it comes from the meta device."""
    if rank.recipe.sharding in SHARDED:
        return _filled(_fsdp(model, list(blocks), rank), fill, rank)
    model = _filled(model, fill, rank).to(rank.device)
    if rank.recipe.sharding == "ddp":
        # Gradients as views of the communication buckets: no second copy of them.
        return DistributedDataParallel(
            model,
            device_ids=[rank.local] if rank.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
    if rank.world > 1:
        raise SetupError(f"sharding: none is for one rank; {rank.world} ranks need ddp, fsdp or fsdp-keep")
    return model


def _filled(model: nn.Module, fill: Fill | None, rank: Rank) -> nn.Module:
    if fill is not None:
        model.to_empty(device=rank.device)
        fill(model)
    return model


def _fsdp(model: nn.Module, blocks: list[nn.Module], rank: Rank) -> nn.Module:
    """`fully_shard` moves what it shards to the device: a GPU never holds the whole model."""
    mesh = device_mesh(rank)
    keep = rank.recipe.sharding == "fsdp-keep"
    # The innermost first: a unit takes the parameters that no unit below it has.
    for block in reversed(blocks):
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=not keep,
            mp_policy=mixed_precision(rank.recipe, root=False),
        )
    # The root's parameters are needed again at once in the backward pass: FSDP2's default keeps them.
    fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=False if keep else None,
        mp_policy=mixed_precision(rank.recipe, root=True),
    )
    return model


def device_mesh(rank: Rank) -> DeviceMesh:
    """All ranks in one row; for hybrid a row for each node: replicas across, shards within.

    torchrun numbers the ranks of a node one after the other, so a row is a node.
    """
    if rank.recipe.sharding != "hybrid":
        return init_device_mesh(rank.device.type, (rank.world,))
    nodes, rest = divmod(rank.world, rank.per_node)
    if nodes < 2 or rest:
        raise SetupError(
            f"sharding: hybrid replicates over nodes and shards within one; {rank.world} ranks, "
            f"{rank.per_node} on a node, are not several full nodes; sharding: fsdp runs"
        )
    return init_device_mesh(rank.device.type, (nodes, rank.per_node), mesh_dim_names=("replicate", "shard"))


def accumulate(model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
    """Around one micro-batch's forward and backward.

    DDP adds up locally and communicates with the last micro-batch only. FSDP reduces after each one:
    waiting for the last would keep full unsharded fp32 gradients (4 bytes x all parameters per rank).
    """
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()
