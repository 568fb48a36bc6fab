"""Styles for a task's `parallel_plan` that torch lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from launcher.train.local_shards import from_part
from launcher.train.rank import SetupError


class HeadsParallel(ColwiseParallel):
    """ColwiseParallel for a projection to attention heads: each rank gets whole heads. The model must find
    the number of its heads from the width of what it gets: `.unflatten(-1, (-1, head_dim))`.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Raises SetupError if the ranks would not have equally many heads."""
        if self.heads % device_mesh.size():
            raise SetupError(
                f"tensor: {device_mesh.size()}: the model has a projection to {self.heads} attention heads "
                f"(of queries, or of keys and values), which {device_mesh.size()} ranks cannot share "
                f"equally: set tensor to a divisor of {self.heads}"
            )
        return super()._apply(module, device_mesh)


class VocabularyParallel(ParallelStyle):
    """For an embedding (its result is whole) and for an output layer (its logits stay cut).

    The logits are a DTensor, from which launcher.train.loss computes the loss without gathering them. This
    style replaces `forward` and adds no hook: a hook would see a loss in parts instead of the logits.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut_rows(module, device_mesh, self.src_data_rank)
        forward = module.forward
        module.forward = (
            partial(_rows, module)
            if isinstance(module, nn.Embedding)
            else partial(_logits, device_mesh, forward)
        )
        return module


def _rows(embedding: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    assert isinstance(embedding.weight, DTensor)
    everywhere = DTensor.from_local(input, embedding.weight.device_mesh, [Replicate()])
    # A copy, because FSDP warns about views, and a DTensor's values are one.
    result: Any = functional.embedding(everywhere, embedding.weight)
    rows: torch.Tensor = result.full_tensor().clone()
    if embedding.padding_idx is None:
        return rows
    return torch.where((input == embedding.padding_idx)[..., None], rows.detach(), rows)  # no gradient


def _logits(mesh: DeviceMesh, forward: Callable[..., Any], input: torch.Tensor) -> Any:
    if not isinstance(input, DTensor):
        input = DTensor.from_local(input, mesh, [Replicate()])
    return forward(input)


class ReplicatedInCutRegion(ParallelStyle):
    """For a module with whole parameters whose input is cut, such as a norm of each rank's heads: its
    gradient is the sum over the ranks. A frozen parameter is not changed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    whole = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()])
                    part._parameters[name] = nn.Parameter(whole)
        return _compute_with_own_values(module)


class RowsOfHeads(ParallelStyle):
    """For a module with a row of values for each attention head, such as a norm of heads: each rank keeps the
    rows of the heads that HeadsParallel gives it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut_rows(module, device_mesh, self.src_data_rank)
        return _compute_with_own_values(module)


def _cut_rows(module: nn.Module, mesh: DeviceMesh, source: int | None) -> None:
    """Cut each parameter of the module by rows. `source`: see torch's distribute_tensor."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                cut = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=source)
                part._parameters[name] = nn.Parameter(cut, requires_grad=parameter.requires_grad)


def _compute_with_own_values(module: nn.Module) -> nn.Module:
    """Let the module, and each module in it, compute with this rank's values as plain tensors.

    Each module is changed separately, because FSDP may gather a single one, and a recomputation may call a
    single one.
    """
    for part in module.modules():
        part.forward = partial(_with_own_values, part, part.forward)
    return module


def _with_own_values(module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    cut: list[tuple[dict[str, Any], str, Any]] = [
        (part._parameters, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    for parameters, name, parameter in cut:
        gradient = [Partial() if each.is_replicate() else each for each in parameter.placements]
        parameters[name] = parameter.to_local(grad_placements=gradient)
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    try:
        args, kwargs = tree_map_only(DTensor, partial(_own_part, module), (args, kwargs))
        result = forward(*args, **kwargs)
    finally:
        for parameters, name, parameter in cut:
            parameters[name] = parameter
    return tree_map_only(torch.Tensor, partial(_cut_as, given[0], module), result) if given else result


def _own_part(module: nn.Module, x: DTensor) -> torch.Tensor:
    if not all(isinstance(placement, Shard) for placement in x.placements):
        raise SetupError(
            f"parallel_plan() gives a {type(module).__name__} the style of a module with a cut input, but "
            f"its input is {x.placements}: leave the module out of the plan, and it stays whole on each rank"
        )
    return x.to_local(grad_placements=x.placements)


def _cut_as(given: DTensor, module: nn.Module, result: torch.Tensor) -> DTensor:
    """Return what the module computed from this rank's part of `given`, cut in the same dimensions."""
    dims, part = {each.dim for each in given.placements if isinstance(each, Shard)}, given.to_local()
    if result.ndim != part.ndim or any(result.shape[dim] != part.shape[dim] for dim in dims):
        raise SetupError(
            f"parallel_plan() cuts a {type(module).__name__}, which returns {tuple(result.shape)} for "
            f"{tuple(part.shape)}, the rank's part of its input: the size of the whole is not known. Give "
            "the previous layer use_local_output=True"
        )
    shape = [given.shape[dim] if dim in dims else size for dim, size in enumerate(result.shape)]
    return from_part(result, given.device_mesh, given.placements, shape)
