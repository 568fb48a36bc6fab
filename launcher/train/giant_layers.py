"""How ranks share linear layers that are too large for one, in a task that brings no plan."""

from __future__ import annotations

from collections import Counter
from typing import TypeGuard

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.utils.parametrize import is_parametrized

GIANT = 2**28
"Weights of a layer that is cut. FSDP gathers it in half a GiB in bf16, and computes as large a gradient."


def giant_layers(model: nn.Module, least: int = GIANT) -> dict[str, ParallelStyle]:
    """Return a tensor-parallel plan for the linear layers with at least `least` weights: name -> style.

    Each of them takes and returns whole tensors, so the rest of the model stays as it is. Layers that share a
    parameter with another module are left out.

    Ranks that have parts of the outputs gather these, and sum up gradients of the inputs, which sends twice
    as much for each value. For ranks that have parts of the inputs it is the other way round. So the longer
    side is cut.
    """
    modules_with = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    plan: dict[str, ParallelStyle] = {}
    for name, layer in model.named_modules():
        if not _is_plain(layer) or layer.weight.numel() < least:
            continue
        if any(modules_with[p] > 1 for p in layer.parameters()):
            continue
        if layer.in_features <= layer.out_features:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        else:
            plan[name] = RowwiseParallel(input_layouts=Replicate())
    return plan


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether the layer computes what nn.Linear does, from parameters of its own."""
    return type(layer) is nn.Linear and "forward" not in vars(layer) and not is_parametrized(layer)
