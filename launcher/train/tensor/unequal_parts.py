"""Plain tensors that are parts of a whole tensor, one on each rank, if the parts have unequal sizes.

torch's styles assume that the whole is this rank's part times the number of ranks. Ranks with unequal parts
would then send each other messages of different sizes, which aborts them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from launcher.train.local_shards import from_part
from launcher.train.rank import SetupError
from launcher.train.tensor.cut_adapter import linear_of

Layouts = Iterable[Placement | None]


def watch_parts(model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Make linear layers state the width of their whole input. Make the model's forward raise SetupError if a
    style gets an unequal part of an unknown whole size. `styles` has the names of the modules as keys."""
    parts = _Parts(mesh)
    for name, style in styles.items():
        module = model.get_submodule(name)
        for simple in _simple(style):
            if isinstance(simple, PrepareModuleOutput):
                module.register_forward_hook(partial(_after_preparing, parts, name, simple), prepend=True)
                continue
            if isinstance(simple, PrepareModuleInput):
                before = partial(_before_preparing, parts, name, simple)
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                continue
            of_sequence = isinstance(simple, SequenceParallel)
            [input_layout] = simple.sequence_sharding if of_sequence else simple.input_layouts
            [output_layout] = simple.sequence_sharding if of_sequence else simple.output_layouts
            first = list(inspect.signature(type(module).forward).parameters.values())[1]
            module.register_forward_pre_hook(partial(_before_layer, parts, name, input_layout), prepend=True)
            module.register_forward_pre_hook(
                partial(_by_position, first.name), prepend=True, with_kwargs=True
            )
            if first.kind == inspect.Parameter.KEYWORD_ONLY:
                module.register_forward_pre_hook(partial(_by_name, first.name), with_kwargs=True)
            if isinstance(layer := linear_of(module), nn.Linear):
                module.register_forward_pre_hook(_lay_out_input)
                module.register_forward_hook(_lay_out_gradient, prepend=True)
            if simple.use_local_output:
                if (
                    isinstance(layer, nn.Linear)
                    and output_layout == Shard(-1)
                    and layer.out_features % mesh.size()
                ):
                    parts.cut.setdefault((layer.out_features, -1), name)
                module.register_forward_hook(partial(_after_layer, parts, name, output_layout), prepend=True)


class _Parts:
    """The dimensions that are cut into unequal parts, which ranks have as plain tensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.cut: dict[tuple[int, int], str] = {}
        """(size, dimension) that was cut unequally -> the module that cut it. Each dimension has two entries,
        counted from the first and from the last dimension: a module may add or remove others."""

    def record_output(self, name: str, layout: Placement | None, shape: torch.Size) -> None:
        """Record that a dimension of `shape` leaves the module as plain parts. Recomputed compiled code
        cannot record anything, but the cuts of linear layers are known before."""
        if isinstance(layout, Shard) and (size := shape[layout.dim]) % self.mesh.size():
            first, last = _dimensions(layout, len(shape))
            if torch.compiler.is_compiling() and (size, last) in self.cut:
                return
            self.cut[size, first] = self.cut[size, last] = name

    def check_input(self, name: str, layout: Placement | None, x: torch.Tensor) -> None:
        """Raise SetupError if x is a plain part of a size that was cut unequally."""
        if isinstance(layout, Shard) and not isinstance(x, DTensor):
            for (size, dimension), source in self.cut.items():
                if dimension in _dimensions(layout, x.ndim) and x.shape[layout.dim] == self._part(size):
                    raise SetupError(
                        f"tensor: {self.mesh.size()}: {source} cuts a dimension of size {size}, which "
                        f"{self.mesh.size()} ranks cannot share equally, and returns a plain tensor, so "
                        f"{name} cannot know the size of the whole: set use_local_output=False in the styles "
                        f"of parallel_plan() from {source} to {name}, or change the size"
                    )

    def _part(self, size: int) -> int:
        """Return the size of this rank's part of `size`."""
        ranks = self.mesh.size()
        each = -(-size // ranks)
        return min(each, max(0, size - each * self.mesh.get_local_rank()))


def _dimensions(layout: Shard, count: int) -> tuple[int, int]:
    return layout.dim % count, layout.dim % count - count


def _simple(style: ParallelStyle) -> Iterator[Any]:
    if isinstance(style, PrepareModuleInputOutput):
        yield from (style.prepare_module_input, style.prepare_module_output)
    elif isinstance(
        style, ColwiseParallel | RowwiseParallel | SequenceParallel | PrepareModuleInput | PrepareModuleOutput
    ):
        yield style


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _by_position(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Move an input that is given by its name to the place of the first argument, which a style prepares."""
    if args or name not in kwargs:
        return args, kwargs
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


def _by_name(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Undo `_by_position` for a forward that takes its input by name alone."""
    return args[1:], {name: args[0], **kwargs}


def _before_layer(
    parts: _Parts, name: str, layout: Placement, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Check the input of a layer, before the style's own hook. Return a linear layer's as a DTensor."""
    (x, *rest), layer = args, linear_of(module)
    by_columns = layout in (Shard(-1), Shard(x.ndim - 1))
    if isinstance(x, DTensor) or not (by_columns and isinstance(layer, nn.Linear)):
        parts.check_input(name, layout, x)
        return None
    return from_part(x, parts.mesh, [layout], (*x.shape[:-1], layer.in_features)), *rest


def _lay_out_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Remove gaps. A tensor gathered from unequal parts has gaps in memory, which torch's linear layers do
    not support for DTensors. Compiled code has no such hooks."""
    return args if torch.compiler.is_compiling() else (without_gaps(args[0]), *args[1:])


def _lay_out_gradient(_: nn.Module, __: Any, result: Any) -> None:
    if not torch.compiler.is_compiling() and isinstance(result, DTensor) and result.requires_grad:
        result.register_hook(without_gaps)  # type: ignore[no-untyped-call]


def without_gaps(x: Any) -> Any:
    """Return x, without the gaps in memory that a DTensor's part may have. It is then contiguous."""
    if not isinstance(x, DTensor) or (part := x.to_local(grad_placements=x.placements)).is_contiguous():
        return x
    return from_part(part.contiguous(), x.device_mesh, x.placements, x.shape)


def _after_layer(parts: _Parts, name: str, layout: Placement, _: nn.Module, __: Any, result: DTensor) -> None:
    parts.record_output(name, layout, result.shape)


def _before_preparing(
    parts: _Parts,
    name: str,
    style: PrepareModuleInput,
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    layouts, wanted = style.input_layouts or (), style.desired_input_layouts or ()
    given = [kwargs.get(key) for key in style.input_kwarg_layouts]
    wanted_by_name = [style.desired_input_kwarg_layouts.get(key) for key in style.input_kwarg_layouts]
    _check_and_record(parts, name, args, layouts, wanted, style.use_local_output)
    _check_and_record(
        parts, name, given, style.input_kwarg_layouts.values(), wanted_by_name, style.use_local_output
    )


def _after_preparing(
    parts: _Parts, name: str, style: PrepareModuleOutput, _: nn.Module, __: Any, results: Any
) -> None:
    many = results if isinstance(results, tuple) else (results,)
    _check_and_record(
        parts, name, many, style.output_layouts, style.desired_output_layouts, style.use_local_output
    )


def _check_and_record(
    parts: _Parts, name: str, tensors: Iterable[Any], layouts: Layouts, wanted: Layouts, returns_plain: bool
) -> None:
    """For a style that only prepares tensors: check its inputs in `layouts`, and record its outputs in
    `wanted`. `returns_plain`: it returns plain tensors."""
    for x, layout, output_layout in zip(tensors, layouts, wanted, strict=False):
        if isinstance(x, torch.Tensor):
            parts.check_input(name, layout, x)
            if returns_plain and (isinstance(x, DTensor) or layout == Replicate()):
                parts.record_output(name, output_layout, x.shape)
