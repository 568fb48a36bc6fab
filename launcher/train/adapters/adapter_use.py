"""Adapters of layers whose weight a model reads without a call, and adapters that get no gradient."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from launcher.spec.listed_names import listed
from launcher.train.local_shards import local
from launcher.train.rank import Rank

_by_weight: WeakSet[nn.Module] = WeakSet()
"Layers whose adapter got a gradient through the attribute `weight`."


def use_as_linear(layer: nn.Module) -> None:
    """Let a model use peft's layer as it used the linear layer: call it with `input=`, read its `weight`.

    The weight is W + alpha / rank x B A. peft's own is W. A model that reads it, as torch's fused encoder
    layer and fused kernels do, would compute without the adapter. With this weight the adapter is trained,
    too, but without its dropout.
    """
    cls: Any = type(layer)
    layer.__class__ = _like_linear(cls)


@functools.cache
def _like_linear(cls: Any) -> Any:
    def forward(layer: nn.Module, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = cls.forward(layer, input)
        return result

    return type(cls.__name__, (cls,), {"weight": property(_whole_weight), "forward": forward})


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
    """After the first update of an attempt, yield names of layers and a warning about them.

    Every rank must call this.
    """
    b_changed = {  # B starts as zeros
        name.partition(".lora_B.")[0]: bool(local(parameter.detach()).any())
        for name, parameter in parameters
        if ".lora_B." in name
    }
    by_weight = [name for name, module in model.named_modules() if module in _by_weight]
    answers = rank.all_values((b_changed, by_weight))
    changed = dict[str, bool]()
    for changed_on_rank, _ in answers:
        for name, value in changed_on_rank.items():
            changed[name] = changed.get(name, False) or value
    unchanged = [name for name, value in changed.items() if not value]
    for names, words in (
        (unchanged, UNCHANGED),
        (list(dict.fromkeys(name for _, layers in answers for name in layers)), BY_WEIGHT),
    ):
        if names:
            yield names, words.format(names=listed(names))
