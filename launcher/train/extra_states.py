"""Extra states: what `get_extra_state()` of a model's modules returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have an extra state, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def extra_states(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the extra state of each of these modules."""
    return {name: module.get_extra_state() for name, module in modules.items()}


def load_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Set the extra states of the modules that `model` has. Their tensors go to the devices of those that the
    modules have now."""
    for name, module in modules_with_extra_state(model).items():
        if name in states:
            module.set_extra_state(_placed(states[name], like=module.get_extra_state()))


def _placed(state: Any, like: Any) -> Any:
    leaves, form = tree_flatten(state)
    there, same_form = tree_flatten(like)
    if form != same_form:
        return state
    return tree_unflatten(
        [
            leaf.to(now.device) if isinstance(leaf, torch.Tensor) and isinstance(now, torch.Tensor) else leaf
            for leaf, now in zip(leaves, there, strict=True)
        ],
        form,
    )
