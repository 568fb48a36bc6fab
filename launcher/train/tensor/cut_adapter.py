"""Adapters under tensor parallelism: the matrices of LoRA are cut with the layer that they are added to.

Over a layer that is cut by rows (outputs), A is whole and B is cut by rows. Over one that is cut by columns
(inputs), A is cut by columns and B is whole: the ranks' results are summed together with the layer's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from torch.nn import functional

from launcher.train.adapters.adapter import NAME
from launcher.train.adapters.nf4 import BLOCK, NF4Linear
from launcher.train.local_shards import slices_of
from launcher.train.rank import SetupError
from launcher.train.tensor.styles import ReplicatedInCutRegion

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
OF_ANY_MODULE = (ReplicatedInCutRegion, PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
"Styles that cut no parameter: they are applied to a layer and its adapter as to any other module."
PARTIAL_GRADIENTS = "grad_placements" in inspect.signature(DTensor.from_local).parameters
"torch 2.11 adds up the gradient of each plain tensor that becomes a DTensor."
Forward = Callable[..., torch.Tensor]


def adapted(layer: nn.Module, style: ParallelStyle, name: str) -> ParallelStyle:
    """Return `style` for a layer that may be packed in 4 bits, may have an adapter, or both. `name`: the
    layer's, for messages."""
    if isinstance(style, OF_ANY_MODULE):
        return style
    if isinstance(linear_of(layer), NF4Linear):
        style = Packed(style, name)
    return WithAdapter(style, name) if has_adapter(layer) else style


def linear_of(layer: nn.Module) -> nn.Module:
    """Return the linear layer inside peft's layer, or the layer itself."""
    return layer.base_layer if has_adapter(layer) else layer  # type: ignore[return-value]


class Packed(ParallelStyle):
    """Cuts a linear layer that is packed in 4 bits, as `style` cuts one that is not."""

    def __init__(self, style: ParallelStyle, name: str) -> None:
        super().__init__()
        self.style, self.name = style, name

    def _apply(self, layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Raises SetupError if a part would not consist of whole blocks."""
        assert isinstance(layer, NF4Linear)
        shape = (layer.out_features, layer.in_features)
        packed = layer._parameters.pop("packed")
        # The style finds a parameter of this name as in any linear layer.
        layer._parameters["weight"] = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        self.style.src_data_rank = self.src_data_rank
        self.style._apply(layer, mesh)
        weight: torch.Tensor | None = layer._parameters.pop("weight")
        layer._parameters["packed"] = packed
        if not isinstance(weight, DTensor):
            return layer
        [placement], (rows, columns) = weight.placements, slices_of(weight)
        if not placement.is_replicate() and not layer.cut(placement, rows, columns):
            raise SetupError(
                f"tensor: {mesh.size()}: {self.name} of shape {shape} is packed in blocks of {BLOCK} values, "
                "and its parts would not be whole blocks: choose tensor so that they are, or kind: lora"
            )
        return layer


class WithAdapter(ParallelStyle):
    """Cuts peft's layer around a linear layer, as `style` cuts the linear layer. The style's operations on
    inputs and outputs, such as gathering or adding up, run once for both."""

    def __init__(self, style: ParallelStyle, name: str) -> None:
        super().__init__()
        self.style, self.name = style, name

    def _apply(self, layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Raises SetupError if the style does not cut the layer's weight."""
        base = linear_of(layer)
        assert isinstance(base, nn.Linear)
        before = {key for hooks_name in _HOOKS for key in getattr(base, hooks_name)}
        self.style.src_data_rank = self.src_data_rank
        self.style._apply(base, mesh)
        _move_hooks(base, layer, keep=before)
        placement = base.placement if isinstance(base, NF4Linear) else Replicate()
        weight: torch.Tensor | None = base._parameters.get("weight")
        if isinstance(weight, DTensor):
            [placement] = weight.placements
        if placement.is_replicate():
            raise SetupError(
                f"parallel_plan() names {self.name} but does not cut it, so its adapter "
                "cannot be cut: leave the layer out of adapter.targets, or use tensor: 1"
            )
        a, b = _matrices(layer)
        by_rows = placement == Shard(0)
        _cut(a, mesh, Replicate() if by_rows else placement)
        _cut(b, mesh, placement if by_rows else Replicate())
        if "forward" in vars(base):  # of VocabularyParallel, whose input is a plain tensor
            a.forward = partial(_apply_a, a)  # type: ignore[method-assign]
        if not by_rows:
            b.forward = partial(_apply_b, b)  # type: ignore[method-assign]
        for dropout in dropouts_of(layer):
            dropout.forward = partial(_drop_parts, dropout.forward)  # type: ignore[method-assign]
        return layer


def has_adapter(layer: nn.Module) -> bool:
    """Return whether this is peft's layer around a linear layer."""
    return hasattr(layer, "base_layer") and hasattr(layer, "lora_A")


def dropouts_of(layer: nn.Module) -> Iterator[nn.Dropout]:
    """Yield the dropouts of an adapter's inputs."""
    if has_adapter(layer):
        yield from (module for module in layer.lora_dropout.values() if isinstance(module, nn.Dropout))  # type: ignore[operator]


def drops_parts(layer: nn.Module) -> bool:
    """Return whether each rank has a different part of the adapter's inputs."""
    a, _ = _matrices(layer)
    return isinstance(a.weight, DTensor) and not a.weight.placements[0].is_replicate()


def _move_hooks(layer: nn.Module, to: nn.Module, keep: Collection[int] = ()) -> None:
    for hooks_name in _HOOKS:
        hooks = getattr(layer, hooks_name)
        for key in [key for key in hooks if key not in keep]:
            getattr(to, hooks_name)[key] = hooks.pop(key)


def _matrices(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    return layer.lora_A[NAME], layer.lora_B[NAME]


def _cut(matrix: nn.Linear, mesh: DeviceMesh, placement: Placement) -> None:
    weight = distribute_tensor(matrix.weight.detach(), mesh, [placement], src_data_rank=None)
    matrix.weight = nn.Parameter(weight)


def _apply_a(a: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Apply A to a plain tensor that is whole on each rank."""
    assert isinstance(a.weight, DTensor)
    x = DTensor.from_local(x, a.weight.device_mesh, [Replicate()])
    return functional.linear(x, a.weight)


def _apply_b(b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Apply B to partial sums. The result is partial sums again, so nothing is exchanged."""
    assert isinstance(x, DTensor) and isinstance(b.weight, DTensor)
    part = x.to_local(grad_placements=[Replicate()])
    result = functional.linear(part, b.weight.to_local(grad_placements=[Partial()]))
    return DTensor.from_local(result, x.device_mesh, [Partial()])


def _drop_parts(drop: Forward, x: torch.Tensor) -> torch.Tensor:
    """Drop inputs with torch's random numbers of this rank instead of DTensor's."""
    if not isinstance(x, DTensor):
        return drop(x)
    gradient, options = x.placements, dict[str, Any]()
    if PARTIAL_GRADIENTS and x.placements == (Replicate(),):  # it is added up with that of the layer itself
        gradient = (Partial(),)
        options = {"grad_placements": gradient}
    part = drop(x.to_local(grad_placements=gradient))
    return DTensor.from_local(part, x.device_mesh, x.placements, shape=x.shape, stride=x.stride(), **options)
