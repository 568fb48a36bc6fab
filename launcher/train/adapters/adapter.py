"""Adapters on a task's model: peft's LoRA layers, over frozen weights in 16 or 4 bits."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.spec.adapter import Adapter
from launcher.spec.listed_names import listed
from launcher.spec.recipe import Recipe
from launcher.spec.similar import did_you_mean
from launcher.train.adapters.adapter_use import use_as_linear
from launcher.train.adapters.nf4 import NF4Linear
from launcher.train.initialise import draw_normal
from launcher.train.precision import compute_type
from launcher.train.rank import SetupError
from launcher.train.task import Task, TaskError, blocks_of, outermost

CONFIG = "adapter_config.json"
"peft's file next to the weights of an adapter."
NAME = "default"
"peft's name for a model's only adapter."


def with_adapter(model: nn.Module, task: Task, recipe: Recipe) -> nn.Module:
    """Freeze the model and add the task's adapter, in place. The model may be on the meta device.

    The frozen weights get the type that the recipe computes in. The adapter is in fp32; with `precision:
    bf16` it is in bf16. Raises TaskError if a target is not a linear layer, or not the same one for
    peft, or has a hook; SetupError if a library is missing.
    """
    adapter, peft = task.adapter, _peft()
    assert adapter is not None
    linear = linear_layers(task, model)
    config = peft_config(adapter, task, model)
    targets = set(config.target_modules)
    peft.inject_adapter_in_model(config, model, adapter_name=NAME)
    if getattr(config, "target_parameters", None):  # peft does the same when it loads the adapter
        kept = set(config.target_modules)
        raise TaskError(
            f"adapter.targets: in {type(model).__name__} peft takes {', '.join(sorted(targets - kept))} for "
            "weights of the experts, not for the linear layers of these names: name others, such as "
            f"[{', '.join(sorted(kept))}]"
        )
    layers = adapted_layers(model)
    replaced = {name: layer.base_layer for name, layer in layers.items()}
    _check_hooks(replaced | linear if adapter.kind == "qlora" else replaced)
    for layer in layers.values():
        use_as_linear(layer)
    # peft replaces a module under one name only.
    _replace(model, {layer.base_layer: layer for layer in layers.values()})
    if adapter.kind == "qlora":
        _replace(model, {layer: NF4Linear(layer, compute_type(recipe)) for layer in {*linear.values()}})
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(
                torch.bfloat16 if recipe.precision == "bf16" else torch.float32
            )
        elif parameter.is_floating_point():
            parameter.data = parameter.data.to(compute_type(recipe))
    return model


def _check_hooks(layers: Mapping[str, nn.Module]) -> None:
    """Raise TaskError if a hook would not see what an adapter adds to its layer, or would be lost with the
    weight that is stored in 4 bits."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    hooked = dict[nn.Module, str]()  # a layer may have several names
    for name, layer in layers.items():
        # A hook of weight_norm is none: it computes the weight, which is then no parameter.
        if "weight" in layer._parameters and any(getattr(layer, kind) for kind in kinds):
            hooked.setdefault(layer, name)
    if hooked:
        raise TaskError(
            f"adapter: {listed([*hooked.values()])} has a hook, which would not see what the adapter adds: "
            "do in forward() of the module around it what the hook does"
        )


def linear_layers(task: Task, model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers inside the blocks, under each of their names. Raises TaskError if there are
    none."""
    inside = {child for block in outermost(blocks_of(task, model)) for child in block.modules()}
    modules = model.named_modules(remove_duplicate=False)
    layers = {name: module for name, module in modules if type(module) is nn.Linear and module in inside}
    if not layers:
        raise TaskError(
            "adapter: there is no torch.nn.Linear inside the task's blocks(), so an adapter has no place"
        )
    return layers


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers by the name of the layer that each one wraps."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "base_layer")}


def peft_config(adapter: Adapter, task: Task, model: nn.Module) -> Any:
    """Return the peft.LoraConfig of the adapter on a model that has none yet. Raises TaskError."""
    modules = dict(model.named_modules())  # peft finds a module only under its first name
    linear = linear_layers(task, model).keys() & modules.keys()
    if not adapter.targets:
        # peft matches the end of a name. If a layer outside the blocks has the same end, give the whole name.
        ends = {name: name.rpartition(".")[2] for name in linear}
        ends_outside = {name.rpartition(".")[2] for name in modules.keys() - linear}
        targets = sorted({name if end in ends_outside else end for name, end in ends.items()})
    else:
        targets = sorted(set(adapter.targets))
        for target in targets:
            _check_target(target, modules)
    return _peft().LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
        base_model_name_or_path=getattr(task, "path", None),
    )


def _check_target(target: str, modules: Mapping[str, nn.Module]) -> None:
    matches = {name: m for name, m in modules.items() if name == target or name.endswith(f".{target}")}
    for name, module in matches.items():
        if type(module) is not nn.Linear:
            kind = type(module).__name__
            raise TaskError(
                f"adapter.targets: {target} is {name}, a {kind}; adapters are for torch.nn.Linear"
            )
    if not matches:
        ends = {name.rpartition(".")[2] for name, module in modules.items() if type(module) is nn.Linear}
        hint = did_you_mean(target, ends)
        raise TaskError(
            f"adapter.targets: the model has no layer {target!r}{hint and f' ({hint})'}; its linear layers "
            f"are {', '.join(sorted(ends))}"
        )


def initialise_with_adapter(task: Task, model: nn.Module, device: torch.device, seed: int) -> None:
    """Fill the parameters and buffers of a sharded model with an adapter that was built on the meta device.

    `task.initialise` sees the model without the adapter. Weights stored in 4 bits are filled one at a time:
    `task.initialise` is called again for each, and sees only that parameter.
    """
    with _without_adapters(model):
        packed = [module for module in model.modules() if isinstance(module, NF4Linear)]
        with hidden(packed, {"packed"}):
            task.initialise(model, seed)
        for layer in packed:
            whole = nn.Linear(
                layer.in_features, layer.out_features, bias=False, device=device, dtype=layer.packing.dtype
            )
            _replace(model, {layer: whole})
            with hidden([m for m in model.modules() if m is not whole]):
                task.initialise(model, seed)
            _replace(model, {whole: layer})
            layer.fill(whole.weight)
    initialise_adapter(model, seed)


@torch.no_grad()
def initialise_adapter(model: nn.Module, seed: int) -> None:
    """Draw every A with the variance of peft's default (Kaiming, uniform in +-1 / sqrt(in)); set every B to
    zero. The values do not depend on the sharding."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            draw_normal(parameter, 1 / math.sqrt(3 * parameter.shape[1]), seed, name)
        elif ".lora_B." in name:
            parameter.zero_()


def write_config(model: Any, folder: Path) -> None:
    """Write peft's configuration of the adapter that `model` has into `folder`, for `launcher export`."""
    config = copy.copy(model.peft_config[NAME])
    config.inference_mode = True
    config.save_pretrained(str(folder))


def peft_name(name: str) -> str:
    """Return the name that peft gives to a parameter of an adapter in a file."""
    return "base_model.model." + name.replace(f".{NAME}.", ".")


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    layers = adapted_layers(model).values()
    _replace(model, {layer: layer.base_layer for layer in layers})
    try:
        yield
    finally:
        _replace(model, {layer.base_layer: layer for layer in layers})


@contextmanager
def hidden(modules: Sequence[nn.Module], only: set[str] | None = None) -> Iterator[None]:
    """Take the modules' own parameters out of the model for a while: all, or those named in `only`."""
    kept = [module._parameters for module in modules]
    for module in modules:
        module._parameters = {
            name: value for name, value in module._parameters.items() if only is not None and name not in only
        }
    try:
        yield
    finally:
        for module, parameters in zip(modules, kept, strict=True):
            # to_empty() replaces parameters: keep the new ones of those that were not taken out.
            module._parameters = parameters if only is None else parameters | module._parameters


def _replace(model: nn.Module, modules: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules (old -> new) under each of their names, except inside the new modules."""
    for owner in list(model.modules()):
        for name, child in owner._modules.items():
            new = modules.get(child) if child is not None else None
            if new is not None and new is not owner:
                owner._modules[name] = new


def _peft() -> Any:
    """Import peft, which takes seconds. Raises SetupError if it is not installed."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise SetupError(
            f"`adapter:` needs peft ({error}): install launcher's checkout with the extra `tasks` "
            "(pip install '.[tasks]' in it)"
        ) from None
