"""FSDP units inside a block, so that a large block is never gathered as a whole, nor are its gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator

from torch import nn

LARGE = 1 / 16
"""Least size of a layer that is a unit of its own, as a share of its block. Each unit adds collectives.
Smaller layers, such as keys and values of grouped-query attention, stay with the rest of the block."""


def layer_units(block: nn.Module, shared: Container[nn.Parameter]) -> list[nn.Module]:
    """Return the large linear layers in a block.

    FSDP gathers a unit when it is called. So these are plain `nn.Linear` layers only: nn.MultiheadAttention,
    for example, uses the weight of its last layer without a call. Members of an nn.ModuleList or
    nn.ModuleDict are left out, since a rank may call only some of them, such as experts, and so are layers
    in several places and those that share a weight. `shared`: parameters of which the root has the weight.
    """
    least = LARGE * sum(parameter.numel() for parameter in block.parameters())
    uses = Counter(p for _, p in block.named_parameters(remove_duplicate=False))
    return [
        layer
        for layer in _always_called(block)
        if type(layer) is nn.Linear
        and all(uses[p] == 1 and p not in shared for p in layer.parameters())
        and sum(p.numel() for p in layer.parameters()) >= least
    ]


def _always_called(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
            yield from _always_called(child)
