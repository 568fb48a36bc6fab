"""Values of the first of the data-parallel ranks, for the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from launcher.train.cpu_memory_budget import Budget
from launcher.train.local_shards import local


@torch.no_grad()
def copy_from_first(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Write the values of the group's first rank into `tensor`. Every rank of the group must call this."""
    values = local(tensor.detach())
    same = values.contiguous()
    # As bytes: backends do not know all types, such as complex ones.
    dist.broadcast(same.view(-1).view(torch.uint8), group=group, group_src=0)
    if same is not values:
        values.copy_(same)


@contextlib.contextmanager
def buffers_of_first_rank(model: nn.Module, data: DeviceMesh, budget: Budget) -> Iterator[None]:
    """Give the buffers of `model` the values that an export has, and in the end this rank's own again.

    Each rank changes buffers, such as BatchNorm's statistics, from its own samples, and an exported model has
    those of the first data-parallel rank. A buffer that has another shape or type on this rank keeps its
    values. Every rank of `data` must call this, under `torch.no_grad()`.
    """
    here, replaced = _persistent_buffers(model), dict[str, torch.Tensor]()
    with budget.host_side():
        for group in data.get_all_groups():  # with `hybrid` first between the nodes, then within each
            layout = [[(name, buffer.shape, buffer.dtype) for name, buffer in here.items()]]
            dist.broadcast_object_list(layout, group=group, group_src=0)
            for name, shape, dtype in layout[0]:
                own = here.get(name)
                if own is not None and (own.shape, own.dtype) != (shape, dtype):
                    own = None
                device = data.device_type
                values = torch.empty(shape, dtype=dtype, device=device) if own is None else own.clone()
                copy_from_first(values, group)
                if own is not None and not torch.equal(
                    own, values
                ):  # most buffers are the same constants on all ranks
                    replaced.setdefault(name, own.to("cpu", copy=True))
                    own.copy_(values)
    try:
        yield
    finally:
        for name, values in replaced.items():
            here[name].copy_(values)


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{name}": local(buffer.detach())
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
