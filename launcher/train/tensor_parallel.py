"""Tensor parallelism: several ranks compute each layer together, on the same samples.

A task's `parallel_plan` says how layers are cut, in torch's own styles. Here are the styles that torch lacks,
and what a model or a loss needs to work with values that are cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from launcher.train.cut_adapter import adapted, linear_of
from launcher.train.optimizers.state import local, offset_of
from launcher.train.own_numbers import LAST, OwnNumbers, draw_own_numbers
from launcher.train.rank import SetupError
from launcher.train.task import Task

SHOWN = 12
"Number of layers that a message names."


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
    """For an embedding, whose result is whole, and for an output layer, whose logits stay cut.

    The logits are a DTensor, from which launcher.train.loss computes the loss without gathering them. This
    style replaces `forward` and adds no hook: a hook would see a loss in parts instead of the logits.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut_rows(module, device_mesh, self.src_data_rank)
        forward: Any = _rows if isinstance(module, nn.Embedding) else _logits
        module.forward = partial(forward, module)
        return module


def _rows(embedding: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    assert isinstance(embedding.weight, DTensor)
    everywhere = DTensor.from_local(tokens, embedding.weight.device_mesh, [Replicate()], run_check=False)
    # A copy: FSDP warns about the view that a DTensor's values are.
    rows = whole(functional.embedding(everywhere, embedding.weight)).clone()
    if embedding.padding_idx is None:
        return rows
    return torch.where((tokens == embedding.padding_idx)[..., None], rows.detach(), rows)  # no gradient


def _logits(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden, head.weight, head.bias)


class ReplicatedInCutRegion(ParallelStyle):
    """For a layer with whole parameters whose input is cut, such as a norm of each rank's heads: its gradient
    is the sum over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters():
            whole = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()], run_check=False)
            setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.forward = partial(_with_own_values, module, module.forward)
        return module


class RowsOfHeads(ParallelStyle):
    """For a layer with a row of values for each attention head, such as a norm of heads: each rank keeps the
    rows of the heads that HeadsParallel gives it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _cut_rows(module, device_mesh, self.src_data_rank)
        module.forward = partial(_with_own_values, module, module.forward)
        return module


def _cut_rows(module: nn.Module, mesh: DeviceMesh, source: int | None) -> None:
    """Cut each parameter of the module by rows. `source`: see torch's distribute_tensor."""
    for name, parameter in module.named_parameters():
        cut = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=source)
        setattr(module, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _with_own_values(module: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    parameters: dict[str, Any] = module._parameters
    kept = dict(parameters)
    for name, parameter in kept.items():
        if isinstance(parameter, DTensor):
            gradient = [Partial() if one.is_replicate() else one for one in parameter.placements]
            parameters[name] = parameter.to_local(grad_placements=gradient)
    try:
        return forward(*args)
    finally:
        parameters.update(kept)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return torch's `linear`, also for a weight that is cut by rows while `x` is whole on each rank."""
    if isinstance(weight, DTensor) and not isinstance(x, DTensor):
        x = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
    return functional.linear(x, weight, bias)


def cut_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `whole`, which each rank has, cut as `like` is. Unchanged if `like` is not cut."""
    if not isinstance(like, DTensor):
        return whole
    same = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
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
    names = [name for name, _ in model.named_modules()]
    unknown = [pattern for pattern in plan if not any(matches(name, pattern) for name in names)]
    if unknown:
        raise SetupError(
            f"parallel_plan() of {type(task).__name__} names {', '.join(unknown)}, which the model does not "
            f"have. {_layers_of(model)}"
        )
    return {name: style for name in names for pattern, style in plan.items() if matches(name, pattern)}


def parallelize(
    model: nn.Module, task: Task, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh
) -> OwnNumbers:
    """Cut the model's layers over the ranks of `mesh`, as `styles_of` says. Return their random numbers.

    Each rank has the same whole layers, or those on the meta device, and keeps its part: nothing is sent.
    Raises SetupError for layers that cannot be cut.
    """
    of_modules = {model.get_submodule(name): style for name, style in styles.items()}
    _check_inputs(model, of_modules, mesh.size())
    ties, frozen = _tied(model), [name for name, p in model.named_parameters() if not p.requires_grad]
    around = {name: adapted(model.get_submodule(name), style, name) for name, style in styles.items()}
    parallelize_module(model, mesh, around, src_data_rank=None)
    for name in frozen:  # some of torch's styles forget it
        model.get_parameter(name).requires_grad_(False)
    numbers = draw_own_numbers(model, of_modules, mesh)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for first, *others in ties:
        for other in others:
            if parameters[other] is not parameters[first]:
                raise SetupError(
                    f"parallel_plan() of {type(task).__name__} cuts only one of {first} and {other}, which "
                    "are the same weight: leave both out"
                )
    _free_the_rest(model)
    return numbers


def _check_inputs(model: nn.Module, styles: Mapping[nn.Module, ParallelStyle], ranks: int) -> None:
    """Raise SetupError for a layer whose inputs would come in unequal parts, which torch cannot multiply."""
    for name, module in model.named_modules():
        style, layer = styles.get(module), linear_of(module)
        if not (isinstance(layer, nn.Linear) and isinstance(style, RowwiseParallel)):
            continue
        if style.input_layouts == LAST and layer.in_features % ranks:
            raise SetupError(
                f"tensor: {ranks}: {name} has {layer.in_features} inputs, which {ranks} ranks cannot share "
                f"equally: set tensor to a divisor of {layer.in_features}"
            )


def add_up_gradients(model: nn.Module) -> None:
    """Add up each gradient as soon as it is there, if each rank has computed it from its part of the
    activations. FSDP does so itself."""
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
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            shape, _ = offset_of(parameter)
            if shape != tuple(local(parameter).shape):
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
    return len(parts) == len(wanted) and all(map(fnmatch, parts, wanted))


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _how_to_plan(model: nn.Module, task: Task, tensor: int) -> str:
    return (
        f"tensor: {tensor}: {type(task).__name__} does not say how its layers are cut. {_layers_of(model)}. "
        "Return a plan from parallel_plan(model): {pattern of names: style of torch.distributed.tensor."
        'parallel}, such as {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()} for two '
        "layers that follow each other; see docs/tasks.md. Or use tensor: 1"
    )


def _layers_of(model: nn.Module) -> str:
    layers: dict[str, None] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            layers[re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+", "*", name)] = None
    return f"Its linear and embedding layers are {_listed(layers)}"


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{', '.join(found[:SHOWN])}{more}" if found else "none"
