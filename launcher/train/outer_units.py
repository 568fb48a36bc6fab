"""FSDP units outside of the blocks: modules that are gathered on their own instead of with the root."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from launcher.train.rank import SetupError
from launcher.train.task import outermost

LARGE = 0.25
"""Least size of an embedding or head that is an FSDP unit of its own, as a share of the largest block. Two
more units are four more collectives: with 0.17 of a block of 0.2 million parameters, a step of 0.27 s on two
CPU ranks took 3 % longer."""


def embedding_and_head(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the embedding and the output layer of a language model, or nothing.

    A module with a hook of the model's own stays with the root: the hook would see the sum of a loss in parts
    instead of the layer's output.

    They are the only `nn.Embedding` and `nn.Linear` outside of the blocks whose weights have the same shape,
    are not tied, and have at least LARGE of the parameters of the largest block. A model without such a pair
    may use an embedding's weight directly for its logits, or only some of its output layers in a step. Then
    the root gathers them, since FSDP needs each unit in each step, through a call of the module.
    """
    outer = outermost(blocks)
    inside = {module for block in outer for module in block.modules()}
    least = LARGE * max((sum(p.numel() for p in block.parameters()) for block in outer), default=0)
    owners = owners_of(model)
    embeddings, linear = list[nn.Module](), list[nn.Module]()
    for name, module in model.named_modules():
        kind = embeddings if isinstance(module, nn.Embedding) else linear
        # peft keeps a layer that has an adapter as the child `base_layer` of the adapter.
        if not isinstance(module, nn.Embedding | nn.Linear) or name.endswith("base_layer"):
            continue
        if module._forward_hooks or module._forward_pre_hooks:
            continue
        weight = module._parameters.get("weight")  # None if it is computed, e.g. by weight_norm
        if weight is None or module in inside or len(owners[weight]) > 1 or weight.numel() < least:
            continue
        kind.append(module)
    pairs = [[e, head] for e in embeddings for head in linear if e.weight.shape == head.weight.shape]
    return pairs[0] if len(pairs) == 1 else []


def check_outer_units(model: nn.Module, blocks: Sequence[nn.Module], units: Iterable[nn.Module]) -> None:
    """Raise SetupError for a unit that overlaps with another unit or shares a weight with another module."""
    names, owners = {module: name for name, module in model.named_modules()}, owners_of(model)
    taken = {module for block in blocks for module in block.modules()}
    for unit in units:
        parts = set(unit.modules())
        if unit is model:
            raise SetupError("outer_units() of the task returned the whole model: return modules in it")
        name = names[unit]
        if unit._forward_hooks or unit._forward_pre_hooks:
            raise SetupError(
                f"outer_units() of the task returned {name}, which has a forward hook: with a loss in parts, "
                "the hook would see their sum; leave the module out, so that the root has it"
            )
        if parts & taken:
            raise SetupError(
                f"outer_units() of the task returned {name}, which overlaps with a block or with another of "
                "these units: return modules outside of blocks() that do not contain each other"
            )
        taken |= parts
        for parameter in unit.parameters():
            if not owners[parameter] <= parts:
                raise SetupError(
                    f"outer_units() of the task returned {name}, which shares a weight with another module, "
                    "but FSDP shards a parameter in only one unit: leave it out, so that the root has it"
                )


def owners_of(model: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    """Return the modules that hold each parameter directly."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    return owners
