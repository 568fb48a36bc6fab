"""Tensor parallelism: several ranks compute each layer together, on the same samples.

A task's `parallel_plan` says how layers are cut, in torch's own styles. Here are the styles that torch lacks,
and what a model or a loss needs to work with values that are cut.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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

from launcher.spec.recipe import Recipe
from launcher.train.optimizers.state import local, offset_of
from launcher.train.own_numbers import LAST, draw_own_numbers
from launcher.train.precision import compute_type
from launcher.train.rank import SetupError
from launcher.train.task import Task, TaskError

TENSOR = "tensor"
"Name of the dimension of a mesh; see launcher.train.mesh."
SHOWN = 12
"Number of layers that a message names."
COMPARED = 3
"""Number of steps in which the ranks compare the gradients of a parameter, without steps that overflow and
those in which the gradient is only rounding. After such a step they wait for twice as many steps each time:
a gradient that stays so small costs some 20 comparisons in a million steps."""
APART = 0.05
"""Relative difference of two ranks' gradients that is no rounding: 16-bit kernels that add in another order
each time differ by about 1e-2."""


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
        for name, parameter in module.named_parameters():
            cut = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            setattr(module, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
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


def _with_own_values(module: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    parameters: dict[str, Any] = module._parameters
    kept = dict(parameters)
    for name, parameter in kept.items():
        if isinstance(parameter, DTensor):
            parameters[name] = parameter.to_local(grad_placements=[Partial()])
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


def parallelize(model: nn.Module, task: Task, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Cut the model's layers over the ranks of `mesh`, as `styles_of` says.

    Each rank has the same whole layers, or those on the meta device, and keeps its part: nothing is sent.
    Raises SetupError for layers that cannot be cut.
    """
    of_modules = {model.get_submodule(name): style for name, style in styles.items()}
    _check_inputs(model, of_modules, mesh.size())
    ties = _tied(model)
    parallelize_module(model, mesh, dict(styles), src_data_rank=None)
    draw_own_numbers(model, of_modules, mesh)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for first, *others in ties:
        for other in others:
            if parameters[other] is not parameters[first]:
                raise SetupError(
                    f"parallel_plan() of {type(task).__name__} cuts only one of {first} and {other}, which "
                    "are the same weight: leave both out"
                )
    _free_the_rest(model)


def _check_inputs(model: nn.Module, styles: Mapping[nn.Module, ParallelStyle], ranks: int) -> None:
    """Raise SetupError for a layer whose inputs would come in unequal parts, which torch cannot multiply."""
    for name, layer in model.named_modules():
        style = styles.get(layer)
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


@dataclass
class _Checked:
    """How far the gradients of one parameter have been compared."""

    times: int = 0
    "How often they have been compared, without those that were only rounding."
    pause: int = 0
    "Steps before the next comparison."
    last_pause: int = 0


class Copies:
    """The gradients of layers that stay whole, which each rank of a group computes from the same activations.

    They are averaged before they are used. Without that, kernels of a GPU that add in another order each time
    would let the copies of a parameter drift apart.
    """

    def __init__(self, mesh: DeviceMesh | None, task: Task, recipe: Recipe) -> None:
        """`mesh`: the ranks that compute each layer together; None if there is one."""
        self._group = mesh.get_group() if mesh is not None else None
        self._plan = f"parallel_plan() of {type(task).__name__}"
        # Where the true gradient is zero, as that of a bias of keys in attention, there is only rounding.
        self._rounding = max(torch.finfo(compute_type(recipe)).eps / 10, 1e-5)
        self._largest = 0.0
        "Largest norm of a gradient so far."
        self._checked: defaultdict[str, _Checked] = defaultdict(_Checked)
        "Name of a parameter -> how far it has been compared."

    @torch.no_grad()
    def average(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Average the gradients among `gradients` that are not cut. Each rank has the same ones, by name.

        Raises TaskError on the ranks that hold a parameter whose gradients differ by more than rounding.
        """
        if self._group is None:
            return
        if due := [name for name in gradients if self._is_due(self._checked[name])]:
            self._compare({name: gradients[name] for name in due})
        for gradient in gradients.values():
            if not _is_cut(gradient):
                dist.all_reduce(local(gradient), group=self._group)
                local(gradient).div_(self._group.size())

    def _is_due(self, checked: _Checked) -> bool:
        checked.pause -= 1
        return checked.times < COMPARED and checked.pause < 0

    def _compare(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Compare a few sums over each gradient: a copy of the gradient might not fit into memory."""
        assert self._group is not None
        found = torch.stack([_sums(local(gradient).flatten()) for gradient in gradients.values()])
        everyones = [torch.empty_like(found) for _ in range(self._group.size())]
        dist.all_gather(everyones, found, group=self._group)
        sums = torch.stack(everyones)  # (ranks, gradients, sums)
        if not sums.isfinite().all():
            return  # an overflow in fp16: the step is left out, and the next one is compared
        self._largest = max(self._largest, float(sums[..., 0].max()))
        scale = sums.abs().amax(dim=(0, 2))
        apart = (sums.amax(dim=0) - sums.amin(dim=0)).amax(dim=1)
        noise = self._rounding * self._largest
        above = scale > noise
        verdicts = torch.stack([above, above & (apart > APART * scale)], dim=1).tolist()
        for (name, gradient), (tells, differs) in zip(gradients.items(), verdicts, strict=True):
            checked = self._checked[name]
            if tells:
                checked.times += 1
            else:  # later: it may grow, as behind an output that begins at zero
                checked.pause = checked.last_pause = max(1, 2 * checked.last_pause)
            if differs and not _is_cut(gradient):
                raise TaskError(
                    f"{self._plan}: the ranks of a group have different gradients of {name}, which is whole "
                    "on each of them: it is used where a rank has a part of the activations. Cut it as well, "
                    "name its module in the plan with ReplicatedInCutRegion() of "
                    "launcher.train.tensor_parallel, or leave the cut layers around it out of the plan"
                )


def _sums(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norm and two sums in fp32. Parts of one gradient hardly agree in all of them."""
    half = len(gradient) // 2
    return torch.stack(
        [
            torch.linalg.vector_norm(gradient, dtype=torch.float32),
            gradient.sum(dtype=torch.float32),
            gradient[:half].sum(dtype=torch.float32),
        ]
    )


def _is_cut(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and TENSOR in (tensor.device_mesh.mesh_dim_names or ())


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
