"""Sharding: how the ranks share one model, and how its gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.spec.mesh import in_buckets
from launcher.spec.quantities import format_bytes
from launcher.spec.recipe import REPLICATED, SHARDED, Recipe
from launcher.train.ddp import DDP
from launcher.train.local_shards import WAIT_APART, groups_of, local
from launcher.train.mesh import Meshes
from launcher.train.pipeline_parts import chunks_of
from launcher.train.precision import cast_inputs_of_layers, mixed_precision, parametrize_in_fp32
from launcher.train.rank import Rank, SetupError
from launcher.train.sharding.fsdp_arguments import share_arguments
from launcher.train.sharding.gathered_weights import refuse_changes, refuse_gradients_of_shards
from launcher.train.sharding.layer_units import layer_units
from launcher.train.task import outermost

Fill = Callable[[nn.Module], None]
"Fills the parameters and buffers of a model that was built on the meta device."


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    outer: Iterable[nn.Module],
    rank: Rank,
    fill: Fill | None,
    mesh: Meshes,
) -> nn.Module:
    """Return the model as this rank trains it, on its device. A model on the meta device needs `fill`.

    `outer`: the FSDP units outside of the blocks.
    """
    if rank.recipe.sharding in SHARDED:
        model = _filled(fully_sharded(model, list(blocks), list(outer), rank, mesh.data), fill, rank)
        if rank.mesh.data > 1:
            refuse_gradients_of_shards(model)
        _report_gradient_bytes(model, rank)
        return model
    model = _on(rank.device, _filled(model, fill, rank))
    if in_buckets(rank.recipe):
        _report_gradient_bytes(model, rank)
        # Gradients are views of the communication buckets, which saves a second copy of them.
        return DDP(
            model,
            device_ids=[rank.local] if rank.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=rank.job.train.find_unused_parameters,
        )
    if rank.mesh.data > 1 and rank.recipe.sharding not in REPLICATED:
        raise SetupError(f"sharding: none is for one rank; use ddp, zero1 or fsdp for {rank.mesh.data} ranks")
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
    # A copy on another device would leave out the rest of a tensor that a parameter is a view of.
    for parameter in model.parameters():
        if local(parameter.detach()).untyped_storage().nbytes() > local(parameter.detach()).nbytes:
            parameter.data = parameter.data.clone()
    return model


def _buffers_to(device: torch.device, model: nn.Module) -> None:
    """Move the buffers to `device`: CPUOffloadPolicy moves only parameters there for the computation."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def fully_sharded(
    model: nn.Module, blocks: list[nn.Module], outer: list[nn.Module], rank: Rank, mesh: DeviceMesh
) -> nn.Module:
    """Apply FSDP2 to the blocks, to the units `outer` and to the rest of the model.

    Only shards are moved to the GPU, never the whole model. Raises SetupError.
    """
    check_shardable(model)
    shared, keep = shared_with_root(model, blocks), rank.recipe.sharding == "fsdp-keep"
    apply = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=mixed_precision(rank.recipe),
        offload_policy=offload_policy(rank),
    )
    roots = list(roots_of(model))
    # Innermost first: a unit takes the parameters that no unit inside it has taken.
    for block in reversed(blocks):
        if rank.recipe.sharding == "fsdp-layers":
            for layer in layer_units(block, shared):
                apply(layer)
        if block not in roots:
            apply(block, reshard_after_forward=not keep, ignored_params=shared)
    for unit in outer:
        # Looking up rows needs the weight only in the forward pass. Other units keep their parameters for the
        # backward pass, as the root does: a head needs them at once.
        looked_up = type(unit).forward is nn.Embedding.forward
        apply(unit, reshard_after_forward=looked_up and not keep)
        assert isinstance(unit, FSDPModule)
        if looked_up:
            unit.set_unshard_in_backward(False)
    for root in roots:
        own = any(True for _ in root.parameters(recurse=False))
        policy = mixed_precision(rank.recipe, cast_inputs=own)
        if not own:
            cast_inputs_of_layers(_layers_of_root(root), rank.recipe)
        # The backward pass needs a root's parameters first, so FSDP2's default keeps them after forward.
        apply(root, reshard_after_forward=False if keep else None, mp_policy=policy)
        # FSDP reduces only the gradients that a rank has. If ranks took different branches (experts,
        # modalities), it adds gradients of different parameters. torch 2.13 can send zeros for the rest; see
        # used_parameters.
        if isinstance(root, FSDPModule) and hasattr(root, "set_reduce_scatter_unused_params"):
            root.set_reduce_scatter_unused_params(True)
    parametrize_in_fp32(model, rank.recipe)
    for chunk in chunks_of(model):
        _gather_in_order(chunk)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            check_types(module)
            share_arguments(module)
            refuse_changes(module, name)
    return model


def check_types(unit: FSDPModule) -> None:
    """Raise SetupError if the unit trains parameters of several types, which FSDP cannot reduce together."""
    assert isinstance(unit, nn.Module)
    names = {module: f"{name}." if name else "" for name, module in unit.named_modules()}
    for group in groups_of(unit._get_fsdp_state()):
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        for p in trained[1:]:
            one, other = p.sharded_param.dtype, trained[0].sharded_param.dtype
            if one != other:
                place = p._module_info
                raise SetupError(
                    f"{names[place.module]}{place.param_name} of a block, or of the rest of the model, is "
                    f"{one}, but other parameters there are {other}: FSDP trains parameters of one type in a "
                    "unit. Use one type, return the module from blocks(), or use sharding: ddp"
                )


def _layers_of_root(module: nn.Module) -> Iterator[nn.Module]:
    """Return the modules outside of units that have their own parameters, except BatchNorm, which does
    its own casts."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            if any(True for _ in child.parameters(recurse=False)) and not isinstance(child, _BatchNorm):
                yield child
            yield from _layers_of_root(child)


def _gather_in_order(chunk: nn.Module) -> None:
    """Let each unit prefetch the previous one in the backward pass.

    FSDP otherwise records the order of the units in each forward pass, and forgets it in the next backward
    pass, while more micro-batches of a pipeline still wait for their backward pass.
    """
    units = list(dict.fromkeys(_in_forward_order(chunk)))
    for previous, unit in pairwise([units[0], *units]):  # the first unit names itself: it is gathered already
        unit.set_modules_to_backward_prefetch([previous])


def _in_forward_order(module: nn.Module) -> Iterator[FSDPModule]:
    for child in module.children():
        yield from _in_forward_order(child)
    if isinstance(module, FSDPModule):
        yield module


def roots_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules that are called as a whole: the model, or this rank's stages of a pipeline."""
    return chunks_of(model) or (model,)


def fsdp_roots(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of `roots_of` that FSDP shards."""
    return [root for root in roots_of(model) if isinstance(root, FSDPModule)]


NO_GRADIENT_SEEN = (
    "FSDP has not seen a gradient arrive at what the model returned: it must be in tuples, lists, "
    "dictionaries, dataclasses or objects of your own classes, and if it is a view, as the result of a "
    "linear layer often is, nothing may change it in place: write y = y / 2 for y /= 2"
)


def is_gathered(model: nn.Module) -> bool:
    """Return whether a unit still has gathered parameters: after a backward pass, that it saw none."""
    units = (unit for unit in model.modules() if isinstance(unit, FSDPModule))
    return any(group.is_unsharded for unit in units for group in groups_of(unit._get_fsdp_state()))


def reshard_units(model: nn.Module) -> None:
    """Free the gathered parameters of all units after a forward pass without a backward pass.

    Until then some units keep theirs, as in a training step. Kept any longer, they would add to the peak of
    the next pass, which would not gather them again one by one.
    """
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


DIFFERENT_PARAMETERS = (
    "the ranks used different parameters in a step (experts, branches, modalities), and FSDP in this version "
    "of torch would add gradients of different parameters: use torch 2.13 or newer, or sharding: ddp with "
    "train.find_unused_parameters: true, or let every parameter take part in each loss"
)


def used_parameters(model: nn.Module, used: Callable[[nn.Parameter], bool]) -> int:
    """Return a hash of the parameters that are `used` on this rank: that have a gradient. 0 without FSDP.

    It differs between ranks that used different parameters. A sum over 2^13 ranks is still exact in fp64.
    """
    if not fsdp_roots(model):
        return 0
    return hash(tuple(map(used, model.parameters()))) % 2**40


def has_scripted_parameters(module: nn.Module) -> bool:
    """Return whether this is a TorchScript module with parameters, which cannot be replaced."""
    return isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters())


def check_shardable(model: nn.Module) -> None:
    """Raise SetupError for a parameter that FSDP cannot shard along its first dimension: one without
    dimensions or elements, one with another order in memory, or one that tensor parallelism leaves empty on
    a rank. Also for TorchScript, whose parameters cannot be replaced by shards, and for an embedding with
    `max_norm`, whose forward changes gathered rows that FSDP discards."""
    for name, module in model.named_modules():
        if has_scripted_parameters(module):
            raise SetupError(
                f"{name or 'the model'} is TorchScript, whose parameters FSDP cannot replace by shards: use "
                "sharding: ddp or zero1, or the module before torch.jit.script"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise SetupError(
                f"{name} has max_norm, which rescales rows of its weight in the forward pass: under FSDP the "
                "change would be lost. Use sharding: ddp, or rescale the rows in the task"
            )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise SetupError(
                f"{name} is a parameter without dimensions, which FSDP cannot shard: make it a tensor of one "
                "element, torch.nn.Parameter(torch.zeros(1)), or use sharding: ddp"
            )
        if parameter.requires_grad and parameter.numel() == 0:
            raise SetupError(
                f"{name} is a parameter without elements, of shape {tuple(parameter.shape)}, whose gradient "
                "FSDP cannot reduce: leave it out, set requires_grad=False, or use sharding: ddp"
            )
        if not parameter.is_contiguous():
            raise SetupError(
                f"{name} is a parameter whose rows are not contiguous in memory (a transposed tensor?), "
                "which FSDP cannot shard: call .contiguous() on the tensor, or use sharding: ddp or zero1"
            )
        if isinstance(parameter, DTensor):
            ranks, [placement] = parameter.device_mesh.size(), parameter.placements
            size = parameter.shape[placement.dim] if isinstance(placement, Shard) else ranks
            other_ranks = -(-size // ranks) * (ranks - 1)  # torch makes the last rank's part the smallest
            if other_ranks >= size:
                raise SetupError(
                    f"tensor: {ranks}: {name} is cut along a dimension of size {size}, which leaves a rank "
                    "nothing, and FSDP cannot shard that: leave the layer out of parallel_plan(), or use "
                    "sharding: ddp or zero1"
                )


def shared_with_root(model: nn.Module, blocks: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return tied weights that are used in a block and outside of all blocks, such as an embedding's weight
    that is also an output head's. FSDP refuses a parameter in two units, so they belong to the root.

    Raises SetupError for weights that two blocks share and the root does not have.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    shared = set()
    for parameter, users in _users(model, {*outermost(blocks)}).items():
        if len(users) > 1 and None not in users:
            raise SetupError(
                f"{names[parameter]} is shared by {len(users)} of the units that the task's blocks() "
                "returns, but FSDP shards a parameter in only one unit. Return the modules that share it as "
                "one block, leave them out of blocks(), or use sharding: ddp"
            )
        if len(users) > 1:
            shared.add(parameter)
    return shared


def _users(model: nn.Module, blocks: Container[nn.Module]) -> dict[nn.Parameter, set[nn.Module | None]]:
    """Return the blocks that have each parameter, and None if it is also outside of all blocks. A module may
    be in several places."""
    users: dict[nn.Parameter, set[nn.Module | None]] = {}
    seen = set[tuple[nn.Module, nn.Module | None]]()
    waiting: list[tuple[nn.Module, nn.Module | None]] = [(model, None)]
    while waiting:
        module, block = waiting.pop()
        block = module if module in blocks else block
        if (module, block) not in seen:
            seen.add((module, block))
            for parameter in module.parameters(recurse=False):
                users.setdefault(parameter, set()).add(block)
            waiting += [(child, block) for child in module.children()]
    return users


def offload_policy(rank: Rank) -> OffloadPolicy:
    """Return FSDP's offload policy. `offload: cpu` keeps shards, gradients and optimizer states on the host.

    Host memory is pinned if there is a GPU to copy to; without a GPU, pinning raises.
    """
    if rank.recipe.offload != "cpu":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=rank.device.type == "cuda")


def accumulate(model: nn.Module, recipe: Recipe, *, last: bool) -> AbstractContextManager[object]:
    """Return a context for one micro-batch that decides whether its gradients are reduced at its end.

    `grad_sync: last` keeps whole gradients until the last micro-batch; `price_of_last` computes their size.
    """
    if recipe.grad_sync == "last":
        for root in fsdp_roots(model):
            root.set_requires_gradient_sync(last)
        if last and WAIT_APART:
            _complete_sums(model)
        if isinstance(model, DDP) and not last:
            return model.no_sync()
    return nullcontext()


def _complete_sums(model: nn.Module) -> None:
    """Give parameters zeros as gradients if other gradients of their unit wait for the last micro-batch.

    Waiting gradients are in the type of the reduction, in which FSDP reduces all gradients of a unit. One
    that first comes in the last micro-batch, or that FSDP makes of zeros, would be in the type of the
    computation.
    """
    for unit in model.modules():
        for group in groups_of(unit._get_fsdp_state()) if isinstance(unit, FSDPModule) else ():
            trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            if any(p.unsharded_accumulated_grad is not None for p in trained):
                for p in trained:
                    if p.unsharded_accumulated_grad is None:
                        zeros = torch.zeros_like(p._unsharded_param, dtype=p.reduce_dtype)
                        p.unsharded_accumulated_grad = zeros


@contextmanager
def in_forward(model: nn.Module) -> Iterator[None]:
    """Let a task differentiate in its forward pass, as in torch.autograd.grad(energy, positions) for forces.

    FSDP would treat this like the backward pass of the step: reduce gradients, and free weights that the
    derivative needs. Here the units that it gathers stay gathered until the step's backward pass.
    """
    roots: list[Any] = fsdp_roots(model)
    states = [root._get_fsdp_state() for root in roots]
    for state in states:
        state._lazy_init()  # otherwise the first forward pass does it, and the states below are unknown
    groups = [group for state in states for one in state._state_ctx.all_states for group in groups_of(one)]
    before = [(group.reduce_grads, group.reshard_after_backward) for group in groups]
    for group in groups:
        group.reduce_grads = group.reshard_after_backward = False
    for root in roots:
        root.set_is_last_backward(False)
    try:
        yield
    finally:
        for group, (reduces, reshards) in zip(groups, before, strict=True):
            group.reduce_grads, group.reshard_after_backward = reduces, reshards
        for root in roots:
            root.set_is_last_backward(True)


def reduces_gradients(recipe: Recipe, *, last: bool) -> bool:
    """Return True if gradients are reduced at the end of the micro-batch."""
    return last or recipe.grad_sync == "each"


def price_of_last(model: nn.Module, recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of gradients on this rank with `grad_sync: last` and with `each`, measured on the CPU.

    With `last`, FSDP keeps whole gradients instead of shards, in the type of the shards, in which they are
    reduced. Shards may leave for the host. DDP has whole gradients in its buckets and, until the last
    micro-batch, a second copy.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    whole, shards = sum(p.nbytes for p in trained), sum(local(p).nbytes for p in trained)
    shards = 0 if recipe.gradients_leave else shards
    return (whole, shards) if recipe.sharding in SHARDED else (2 * whole, whole)


def _report_gradient_bytes(model: nn.Module, rank: Rank) -> None:
    if rank.recipe.gradients_wait:
        last, each = price_of_last(model, rank.recipe)
        kind = "unsharded gradients" if rank.recipe.sharding in SHARDED else "gradients outside DDP's buckets"
        rank.say(
            f"grad_sync: last keeps the {kind} of all {sum(p.numel() for p in model.parameters()):,} "
            f"parameters: {format_bytes(last)} on each rank instead of {format_bytes(each)}"
        )
