"""Reset of a model after a forward or backward pass that failed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from launcher.train.cpu_memory_budget import Budget
from launcher.train.local_shards import WAIT_APART, groups_of, parameter_groups

# Attributes with a leading underscore are private in FSDP2. `self_test` checks that they work as expected.
# torch 2.13 and newer have a public reset, which does not remove gradients.


def free_failed_pass(device: torch.device, budget: Budget) -> None:
    """Free what a failed pass held, apart from gradients and FSDP2's state, which `clean` drops.

    Call it in the thread of the pass and after the `except` block, which holds the exception and its frames.
    """
    with budget.host_side():
        _empty_autograd_queue()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _empty_autograd_queue() -> None:
    """Drop the tasks of a failed backward pass from this thread's queue.

    Autograd leaves them there until the thread's next backward pass: the branches of the graph that were
    ready to run, with their gradients and with everything that their part of the graph saved.
    """
    leaf = torch.zeros((), requires_grad=True)
    torch.autograd.grad(leaf.clone(), leaf)


def clean(model: nn.Module) -> None:
    """Drop gathered parameters and all gradients, whole or sharded. Under DDP there are only gradients."""
    if isinstance(model, FSDPModule):
        _clean_fsdp(model)
    for parameter in model.parameters():
        parameter.grad = None


def drop_partial_sums(model: nn.Module) -> None:
    """Drop gradients that are reduced within the node but not yet across nodes (hybrid sharding)."""
    for group in _groups(model):
        group._partial_reduce_output = None


def replication(model: nn.Module) -> tuple[dist.ProcessGroup | None, int]:
    """Return the group of the second gradient reduction, or None without hybrid sharding, and the number of
    shards.

    A parameter's `device_mesh` is no substitute: it may be an equal mesh of another model, with other groups.
    """
    mesh = next(_groups(model)).mesh_info
    return getattr(mesh, "replicate_process_group", None), mesh.shard_mesh_size


def partial_sums(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that `drop_partial_sums` would drop."""
    return [g._partial_reduce_output for g in _groups(model) if g._partial_reduce_output is not None]


def _clean_fsdp(model: Any) -> None:
    state = model._get_fsdp_state()
    if state._is_root is None:
        return  # no pass has reached this model yet
    if state._device.type != "cpu":
        state._device_handle.synchronize()  # all kernels are done, so pending events can be dropped
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        _reset(state)
    for group in _groups(model):
        if state._is_root:
            group.lazy_init()  # the first pass may have failed in it; a repeated call does nothing
        for parameter in group.fsdp_params:
            # After a gather that failed half-way, the group counts as sharded, but some parameters still have
            # gathered memory.
            if hasattr(parameter, "_unsharded_inner_tensors"):
                parameter.to_sharded()
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
                parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)
            if WAIT_APART:
                parameter.unsharded_accumulated_grad = None
            parameter.grad_offload_event = None
            parameter.sharded_param.grad = None


def _reset(root: Any) -> None:
    """Do the same as `FSDPModule.reset_iter_state` of torch 2.13, for torch 2.11 and 2.12."""
    context = root._comm_ctx
    context.all_gather_state = None
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states.clear()
    else:
        context.reduce_scatter_state = None
    if hasattr(context, "_last_post_reduce_events"):
        context._last_post_reduce_events.clear()
    context.post_forward_order.clear()
    idle = type(root._training_state).IDLE
    for state in root._state_ctx.all_states:
        state._training_state = idle
        if hasattr(state, "_modules_to_run_forward"):
            state._modules_to_run_forward.clear()
        for group in groups_of(state):
            group._all_gather_result = None
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from parameter_groups(module)
