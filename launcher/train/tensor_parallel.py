"""Tensor parallelism: several ranks compute each layer together, on the same samples.

A task's `parallel_plan` says how layers are cut, in torch's own styles and those of
launcher.train.tensor.styles. This module applies the plan, and has functions with which a model or a loss
works on cut values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from launcher.spec.listed_names import listed
from launcher.train.activations.in_place import changeable
from launcher.train.local_shards import local, offset_of
from launcher.train.rank import SetupError
from launcher.train.task import Task, TaskError
from launcher.train.tensor.cut_adapter import adapted, linear_of
from launcher.train.tensor.styles import HeadsParallel, ReplicatedInCutRegion, RowsOfHeads, VocabularyParallel
from launcher.train.tensor.tensor_parallel_rng import OwnNumbers, draw_own_numbers
from launcher.train.tensor.unequal_parts import watch_parts

__all__ = [
    "HeadsParallel",
    "ReplicatedInCutRegion",
    "RowsOfHeads",
    "VocabularyParallel",
    "add_up_gradients",
    "check_parts",
    "cut_like",
    "linear",
    "matches",
    "parallelize",
    "placed_like",
    "styles_of",
    "whole",
]

OF_LAYERS = (ColwiseParallel, RowwiseParallel, HeadsParallel, VocabularyParallel)
"Styles for linear layers and embeddings."
SHOWN = 12
"Number of layers that a message names."


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return torch's `linear`, also for a weight that is cut by rows while `x` is whole on each rank."""
    if isinstance(weight, DTensor) and not isinstance(x, DTensor):
        x = DTensor.from_local(x, weight.device_mesh, [Replicate()])
    return functional.linear(x, weight, bias)


def cut_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `whole`, which each rank has, cut as `like` is. Unchanged if `like` is not cut."""
    if not isinstance(like, DTensor):
        return whole
    same = DTensor.from_local(whole, like.device_mesh, [Replicate()])
    return same.redistribute(placements=like.placements)


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return a value that was computed from cut tensors as a plain tensor, complete on each rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def styles_of(model: nn.Module, task: Task, ranks: int) -> dict[str, ParallelStyle]:
    """Return how the task's `parallel_plan` cuts the model over `ranks` ranks: name of a layer -> style.

    Raises SetupError for a task without a plan, and for a plan that does not fit the model.
    """
    plan = task.parallel_plan(model)
    if plan is None:
        raise SetupError(_how_to_plan(model, task, ranks))
    name = f"parallel_plan() of {type(task).__name__}"
    if not isinstance(plan, Mapping):
        raise SetupError(f"{name} must return a dictionary of styles by name, not {type(plan).__name__}")
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise SetupError(
                f"{name}: {pattern}: must be a style such as ColwiseParallel(), not {style!r:.80}"
            )
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [pattern for pattern in plan if not any(matches(path, pattern) for path in modules)]
    if unknown:
        raise SetupError(
            f"{name} names {', '.join(unknown)}, which the model does not have. {_layers_of(model)}"
        )
    by_module: dict[nn.Module, tuple[str, ParallelStyle]] = {}  # a module may have several names
    for path, module in modules.items():
        for style in [style for pattern, style in plan.items() if matches(path, pattern)][-1:]:
            by_module.setdefault(module, (path, style))
    return dict(by_module.values())


def parallelize(
    model: nn.Module, task: Task, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh
) -> OwnNumbers:
    """Cut the model's layers over the ranks of `mesh`, as `styles_of` says. Return their random numbers.

    Each rank has the same whole layers, or those on the meta device, and keeps its part: nothing is sent.
    Raises SetupError for layers that cannot be cut.
    """
    of_modules = {model.get_submodule(name): style for name, style in styles.items()}
    plan = f"parallel_plan() of {type(task).__name__}"
    _check_layers(model, styles, plan)
    ties, frozen = _tied(model), [name for name, p in model.named_parameters() if not p.requires_grad]
    for name, style in styles.items():
        module = model.get_submodule(name)
        parallelize_module(module, mesh, adapted(module, style, name), src_data_rank=None)
    for name in frozen:  # some of torch's styles forget it
        model.get_parameter(name).requires_grad_(False)
    numbers = draw_own_numbers(model, of_modules, mesh)
    watch_parts(model, styles, mesh)
    for name in styles:
        model.get_submodule(name).register_forward_hook(partial(_as_of_a_plain_layer, name))
    _tie_again(model, ties, plan)
    _free_the_rest(model)
    return numbers


def _as_of_a_plain_layer(name: str, _: nn.Module, __: Any, result: Any) -> Any:
    """Let the model change in place what a layer returns, as a plain layer does.

    A gradient of a gradient would silently lack terms: torch's backward pass from a DTensor's local part has
    no graph. Compiled code refuses it anyway.
    """
    if not isinstance(result, torch.Tensor) or isinstance(result, DTensor):
        return result
    if result.requires_grad and not torch.compiler.is_compiling():
        result.register_hook(partial(_refuse_graph, name))  # type: ignore[no-untyped-call]
    return changeable(result)


def _refuse_graph(name: str, gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise TaskError(
            f"the task computes gradients with create_graph=True through {name}, which several ranks share. "
            "torch's DTensor cannot differentiate them again: use tensor: 1, or leave the layer out of "
            "parallel_plan()"
        )


def _check_layers(model: nn.Module, styles: Mapping[str, ParallelStyle], plan: str) -> None:
    """Raise SetupError for a module that its style cannot cut."""
    whole: list[str] = []
    for name, style in styles.items():
        kind, layer = type(style).__name__, linear_of(model.get_submodule(name))
        inside = [outer for outer in whole if name.startswith(f"{outer}." if outer else "")]
        if inside:
            raise SetupError(
                f"{plan} names {name or 'the model'} and also {inside[0] or 'the model'}, whose style holds "
                "for everything in it: leave one of them out"
            )
        if isinstance(style, ReplicatedInCutRegion | RowsOfHeads):
            whole.append(name)
        if type(style) not in OF_LAYERS:
            continue
        if not isinstance(layer, nn.Linear | nn.Embedding):
            raise SetupError(
                f"{plan} gives {name}, a {type(layer).__name__}, the style {kind}, which is for "
                "nn.Linear and nn.Embedding: leave it out, and it stays whole on each rank"
            )
        if not {"weight", "packed"} & layer._parameters.keys() or is_parametrized(layer):
            raise SetupError(
                f"{plan} gives {name} the style {kind}, which cannot cut it: its parameters are "
                "computed from others (weight_norm, spectral_norm or another parametrization). Leave it out, "
                "and it stays whole on each rank"
            )


def _tie_again(model: nn.Module, ties: Iterable[Sequence[str]], plan: str) -> None:
    """Let modules that shared a weight share their parts of it. Raises SetupError if the parts differ."""
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def placements(name: str) -> object:
        return getattr(parameters[name], "placements", None)

    for first, *others in ties:
        for other in others:
            if placements(other) != placements(first):
                raise SetupError(
                    f"{plan} cuts {first} and {other}, which are the same weight, in different ways, or only "
                    "one of them: give both a style that cuts them alike (VocabularyParallel for an "
                    "embedding and its output layer), or leave both out"
                )
            owner, _, name = other.rpartition(".")
            model.get_submodule(owner)._parameters[name] = parameters[first]


def add_up_gradients(model: nn.Module) -> None:
    """Sum each gradient over the ranks as soon as it is complete, if each rank has computed it from its part
    of the activations. FSDP does this itself."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_hook(partial(_placed, parameter.placements))  # type: ignore[no-untyped-call]


def placed_like(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor's gradient, cut as the tensor is and added up over the ranks that have parts of it."""
    return _placed(tensor.placements, gradient) if isinstance(tensor, DTensor) else gradient


def _placed(placements: Sequence[Placement], gradient: torch.Tensor) -> torch.Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.redistribute(placements=placements)


def check_parts(model: nn.Module) -> None:
    """Raise SetupError for a parameter whose part is not one piece of the whole: checkpoints need that."""
    checked = set[Any]()  # blocks repeat a few cuts, and torch lists every row of a cut
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        part = tuple(local(parameter).shape)
        cut = (part, parameter.shape, parameter.placements, parameter.device_mesh)
        if cut not in checked:
            checked.add(cut)
            shape, _ = offset_of(parameter)
            if shape != part:
                raise SetupError(
                    f"{name} of shape {tuple(parameter.shape)} cannot be cut by tensor parallelism and then "
                    "sharded: the ranks would get pieces that do not follow each other. Choose tensor so "
                    f"that it divides {parameter.shape[0]}"
                )


def _free_the_rest(model: nn.Module) -> None:
    """Copy parts that are views, so that the memory of the whole parameters is freed."""
    for parameter in model.parameters():
        part = local(parameter.detach())
        if isinstance(parameter, DTensor) and part.untyped_storage().nbytes() > part.nbytes:
            parameter._local_tensor = part.clone()


def matches(name: str, pattern: str) -> bool:
    """Return whether a module of this name is meant: `*` stands for any text between two dots."""
    parts, wanted = name.split("."), pattern.split(".")
    pairs = zip(wanted, parts, strict=False)
    return len(parts) == len(wanted) and all(
        want in ("*", part) or fnmatch(part, want) for want, part in pairs
    )


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _how_to_plan(model: nn.Module, task: Task, tensor: int) -> str:
    return (
        f"tensor: {tensor}: {type(task).__name__} does not say how its layers are cut, and none is so large "
        f"that it is cut without that. {_layers_of(model)}. "
        "Return a plan from parallel_plan(model): {pattern of names: style of torch.distributed.tensor."
        'parallel}, such as {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()} for two '
        "layers that follow each other; see docs/tasks.md. Or use tensor: 1"
    )


def _layers_of(model: nn.Module) -> str:
    layers: dict[str, None] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            layers[re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+", "*", name)] = None
    return f"Its linear and embedding layers are {listed([*layers], SHOWN) or 'none'}"
