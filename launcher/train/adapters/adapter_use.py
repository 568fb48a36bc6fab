"""Adapters where a model reads the weight of a layer without calling it, and adapters that take no part."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from launcher.spec.listed import listed
from launcher.train.rank import Rank
from launcher.train.shards import local

_by_weight: WeakSet[nn.Module] = WeakSet()
"Layers whose adapter got a gradient through the attribute `weight`."


def use_as_linear(layer: nn.Module) -> None:
    """Let a model use peft's layer as it used the linear layer: call it with `input=`, read its `weight`.

    The weight is W + alpha / rank x B A. peft's own is W. A model that reads it, as torch's fused encoder
    layer and fused kernels do, would compute without the adapter. Here the adapter is trained through it,
    without the adapter's dropout.
    """
    kind: Any = type(layer)
    layer.__class__ = _like_linear(kind)


@functools.cache
def _like_linear(kind: Any) -> Any:
    def forward(layer: nn.Module, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = kind.forward(layer, input)
        return result

    return type(kind.__name__, (kind,), {"weight": property(_whole_weight), "forward": forward})


def _whole_weight(layer: Any) -> torch.Tensor:
    weight: torch.Tensor = layer.base_layer.weight
    for name in layer.active_adapters:
        product = layer.lora_B[name].weight @ layer.lora_A[name].weight
        weight = weight + (layer.scaling[name] * product).to(weight.dtype)
    if weight.requires_grad and not torch.compiler.is_compiling():
        weight.register_hook(lambda _: _by_weight.add(layer))  # type: ignore[no-untyped-call]
    return weight


UNCHANGED = (
    "the first step did not change the adapters of {names}: no gradient reached them. A layer that the step "
    "did not use (an expert) may get one later. If the task uses a parameter or a module that it keeps "
    "elsewhere, such as in a list, then its adapter is never trained: leave it out of adapter.targets"
)
BY_WEIGHT = (
    "the model uses the weight of {names} without calling the layer. launcher trains the adapter there, "
    "without its dropout; peft does not apply it. Export the model with `launcher export --merge`, or leave "
    "the layers out of adapter.targets"
)


def warnings_about(
    model: nn.Module, parameters: Iterable[tuple[str, torch.Tensor]], rank: Rank
) -> Iterator[tuple[list[str], str]]:
    """Yield names of layers and what their users should know, after the first update of an attempt.

    Every rank must call this.
    """
    mine = {  # whether B, which begins with zeros, has changed
        name.partition(".lora_B.")[0]: bool(local(parameter.detach()).any())
        for name, parameter in parameters
        if ".lora_B." in name
    }
    by_weight = [name for name, one in model.named_modules() if one in _by_weight]
    everyones = rank.all_values((mine, by_weight))
    changed = dict[str, bool]()
    for theirs, _ in everyones:
        for name, value in theirs.items():
            changed[name] = changed.get(name, False) or value
    unchanged = [name for name, value in changed.items() if not value]
    for names, words in (
        (unchanged, UNCHANGED),
        (list(dict.fromkeys(name for _, each in everyones for name in each)), BY_WEIGHT),
    ):
        if names:
            yield names, words.format(names=listed(names))
