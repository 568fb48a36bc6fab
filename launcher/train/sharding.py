"""Sharding: how the ranks share one model, and how its gradients meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from launcher.spec.base import format_bytes
from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.activations import outermost
from launcher.train.optimizers.state import local
from launcher.train.precision import mixed_precision
from launcher.train.rank import Rank, SetupError

Fill = Callable[[nn.Module], None]
"Gives values to a model that was built on the meta device."


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    rank: Rank,
    fill: Fill | None,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """The model as this rank trains it, on its device. With `fill` it comes from the meta device."""
    if rank.recipe.sharding in SHARDED:
        model = _filled(fully_sharded(model, list(blocks), rank, mesh or device_mesh(rank)), fill, rank)
        _say_price(model, rank)
        return model
    model = _on(rank.device, _filled(model, fill, rank))
    if rank.recipe.sharding == "ddp":
        _say_price(model, rank)
        # Gradients as views of the communication buckets: no second copy of them.
        return DistributedDataParallel(
            model,
            device_ids=[rank.local] if rank.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=rank.job.train.find_unused_parameters,
        )
    if rank.world > 1:
        raise SetupError(f"sharding: none is for one rank; {rank.world} ranks need ddp, fsdp or fsdp-keep")
    return model


def _filled(model: nn.Module, fill: Fill | None, rank: Rank) -> nn.Module:
    if fill is not None:
        on_host = rank.recipe.offload == "cpu"
        model.to_empty(device="cpu" if on_host else rank.device)
        if on_host:
            _buffers_to(rank.device, model)
        fill(model)
    return model


def _on(device: torch.device, model: nn.Module) -> nn.Module:
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        return model.to(device)
    return model


def _buffers_to(device: torch.device, model: nn.Module) -> None:
    """CPUOffloadPolicy keeps parameters on the host; buffers take part in the computation where they are."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def fully_sharded(model: nn.Module, blocks: list[nn.Module], rank: Rank, mesh: DeviceMesh) -> nn.Module:
    """`fully_shard` moves what it shards to the device: a GPU never holds the whole model."""
    check_dimensions(model)
    offload, shared = offload_policy(rank), shared_with_root(model, blocks)
    keep = rank.recipe.sharding == "fsdp-keep"
    # The innermost first: a unit takes the parameters that no unit below it has.
    for block in reversed(blocks):
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=not keep,
            mp_policy=mixed_precision(rank.recipe),
            offload_policy=offload,
            ignored_params=shared,
        )
    # The root's parameters are needed again at once in the backward pass: FSDP2's default keeps them.
    fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=False if keep else None,
        mp_policy=mixed_precision(rank.recipe),
        offload_policy=offload,
    )
    # By itself FSDP adds up the gradients that a rank has: of ranks that took different branches (experts,
    # modalities) those of different parameters. torch 2.13 can send zeros for the rest; see used_parameters.
    if isinstance(model, FSDPModule) and hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
    return model


UNLIKE = (
    "the ranks took different parameters in a step (experts, branches, modalities), and FSDP of this torch "
    "adds up gradients of different ones: take torch 2.13 or newer, or sharding: ddp with "
    "train.find_unused_parameters: true; or let every parameter take part in each loss"
)


def used_parameters(model: nn.Module) -> int:
    """A number that differs between ranks whose gradients are of different parameters; 0 where nobody asks.

    Exact in fp64 also as a sum over 2^13 ranks.
    """
    if not isinstance(model, FSDPModule):
        return 0
    return hash(tuple(p.grad is None for p in model.parameters())) % 2**40


def check_dimensions(model: nn.Module) -> None:
    """FSDP cuts each parameter by its first dimension. Raises SetupError for one that has none."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise SetupError(
                f"{name} is a parameter without dimensions, which FSDP cannot shard: give it one element, "
                "torch.nn.Parameter(torch.zeros(1)), which computes the same; sharding: ddp runs as it is"
            )


def shared_with_root(model: nn.Module, blocks: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Tied weights that stand in a block and outside of all blocks, such as an output head's that are the
    embedding's. FSDP refuses a parameter in two units: the root takes them. Raises SetupError for weights
    that two blocks share and the root does not have.
    """
    units = {module for block in blocks for module in block.modules()}
    roots = {p for module in model.modules() if module not in units for p in module.parameters(recurse=False)}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for block in outermost(blocks):
        for parameter in block.parameters():
            owners.setdefault(parameter, set()).add(block)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, those in owners.items():
        if len(those) > 1 and parameter not in roots:
            raise SetupError(
                f"{names[parameter]} is shared by {len(those)} of the units that blocks() of the task gives: "
                "FSDP shards a parameter in one unit. Give the modules that share it as one block, or leave "
                "them out of blocks(); sharding: ddp runs as it is"
            )
    return roots & owners.keys()


def offload_policy(rank: Rank) -> OffloadPolicy:
    """With `offload: cpu` shards and their gradients live in host memory, and so do the optimizer's states.

    Pinned where there is a GPU to copy to; without one, pinning raises.
    """
    if rank.recipe.offload != "cpu":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=rank.device.type == "cuda")


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


def accumulate(model: nn.Module, recipe: Recipe, *, last: bool) -> AbstractContextManager[object]:
    """Around one micro-batch's forward and backward: whether gradients meet at its end.

    `grad_sync: last` waits for the last micro-batch and keeps whole gradients until then: `price_of_last`.
    """
    if recipe.grad_sync == "last":
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        elif isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
    return nullcontext()


def meets(recipe: Recipe, *, last: bool) -> bool:
    """Whether gradients meet at the end of a micro-batch."""
    return last or recipe.grad_sync == "each"


def price_of_last(model: nn.Module, recipe: Recipe) -> tuple[int, int]:
    """Bytes of gradients on this rank with `grad_sync: last`, and with `each`; measured as such on the CPU.

    FSDP keeps them whole instead of its shard, in the type they are reduced in, which is the shards'; DDP has
    them whole in its buckets, and until the last micro-batch a second time.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    whole, mine = sum(p.nbytes for p in trained), sum(local(p).nbytes for p in trained)
    return (whole, mine) if recipe.sharding in SHARDED else (2 * whole, whole)


def _say_price(model: nn.Module, rank: Rank) -> None:
    if rank.recipe.grad_sync == "last" and rank.recipe.grad_accum > 1:
        last, each = price_of_last(model, rank.recipe)
        kind = "unsharded gradients" if rank.recipe.sharding in SHARDED else "gradients beside DDP's buckets"
        rank.say(
            f"grad_sync: last keeps the {kind} of all {sum(p.numel() for p in model.parameters()):,} "
            f"parameters: {format_bytes(last)} on each rank instead of {format_bytes(each)}"
        )
