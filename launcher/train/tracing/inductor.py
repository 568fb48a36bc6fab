"""The allocations and frees of a graph that torch.compile compiles, from inductor's own scheduler.

Inductor fuses operators into kernels, orders the kernels and decides which buffers exist. All of that happens
before it writes code, so it needs neither a compiler nor values. Names of inductor that are used here are
private: they are those of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch._guards import TracingContext
from torch._inductor import compile_fx, config, ir
from torch._inductor.codegen.wrapper import can_match_buffer_size
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    NopKernelSchedulerNode,
    SchedulerBuffer,
    SchedulerNode,
)
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from launcher.memory.peaks import Like
from launcher.train.tracing.storage_recorder import PRODUCTS

_PRODUCTS = {packet.__name__ for packet in PRODUCTS} | {"bias_addmm"}


class Tensor(NamedTuple):
    """The layout of a tensor in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Output(NamedTuple):
    """One output of a graph: a tensor over the buffer `name`, the input `name`, or a plain value."""

    name: str | None
    tensor: Tensor | None
    value: Any = None


@dataclass
class Kernel:
    """One call of a kernel: it allocates, then it frees."""

    new: list[tuple[str, Tensor]] = field(default_factory=list)
    same: list[tuple[str, str]] = field(default_factory=list)
    "(buffer, the buffer whose storage it has): views, mutations and results written over an input."
    freed: list[str] = field(default_factory=list)
    multiplies: bool = False
    "It is a matrix product of a library: cuBLAS on a GPU."


@dataclass
class Schedule:
    """The allocations of one compiled graph, in order."""

    inputs: tuple[str, ...]
    kernels: list[Kernel]
    outputs: list[Output]
    flops: float


def schedule_of(
    graph: fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool, is_inference: bool, like: Like
) -> Schedule:
    """Return the schedule of a graph that AOTAutograd has partitioned.

    `inputs`: fake tensors on the CPU. `like`: the device whose rules of fusion apply. The steps are those of
    compile_fx.py, `_InProcessFxCompile.codegen_and_compile`, without its code generation.
    """
    with preserve_rng_state():
        view_to_reshape(graph)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            fake = compile_fx.fake_tensor_prop(graph, inputs)
        compile_fx._recursive_record_original_output_strides(graph)
        backend = {"cpu_backend": "triton" if like == "cuda" else "cpp"}
        with V.set_fake_mode(fake), config.patch(backend):
            compile_fx._recursive_post_grad_passes(graph, is_inference=is_inference)
            lowered = GraphLowering(
                graph, example_inputs=inputs, is_backward=is_backward, is_inference=is_inference
            )
            with (
                V.set_graph_handler(lowered),
                V.set_extern_kernel_nodes([]),
                V.set_debug_handler(DebugContext()),
            ):
                lowered.run(*inputs)
                _report_strides(lowered)
                lowered.init_wrapper_code()
                lowered._update_scheduler()
                kernels = list(_KernelReader(lowered, like).kernels())
                outputs = [_output(output, lowered.graph_inputs) for output in lowered.graph_outputs]
    return Schedule(tuple(lowered.graph_inputs), kernels, outputs, _flops(graph))


def _report_strides(lowered: GraphLowering) -> None:
    """Tell AOTAutograd the strides of the outputs, which the backward graph then expects."""
    context = TracingContext.try_get()
    if context is None or context.output_strides is None or context.output_strides:
        return
    for output in lowered.graph_outputs:
        has_strides = isinstance(output, ir.IRNode) and output.has_tensor_output()
        context.output_strides.append(_layout(output).stride if has_strides else None)


def _output(output: Any, inputs: Container[str]) -> Output:
    if isinstance(output, ir.IRNode) and output.has_tensor_output():
        return Output(output.get_name(), _layout(output))
    if isinstance(output, ir.NonTensorObj) and output.get_name() in inputs:  # the mesh of a DTensor
        return Output(output.get_name(), None)
    return Output(None, None, getattr(output, "expr", None))


def _layout(node: Any) -> Tensor:
    layout = node.get_layout()
    return Tensor(
        tuple(int(n) for n in layout.size),
        tuple(int(n) for n in layout.stride),
        int(layout.offset),
        layout.dtype,
    )


def _multiplies(node: BaseSchedulerNode) -> bool:
    """Return whether a kernel is a matrix product of a library, such as `extern_kernels.mm`."""
    name = getattr(node.node, "python_kernel_name", None) or ""
    return node.is_extern() and not _PRODUCTS.isdisjoint(name.split("."))


class _KernelReader:
    """Reads the kernels of a graph's scheduler, as code generation would call them."""

    def __init__(self, lowered: GraphLowering, like: Like) -> None:
        self.lowered, self.scheduler = lowered, lowered.scheduler
        # C++ kernels between two calls of libraries are one function, which frees at its end.
        self.grouped = like == "cpu"
        self.made: set[str] = set()
        "Buffers that have a storage."
        self.run: set[str] = set()
        "Operations that have run."

    def kernels(self) -> Iterator[Kernel]:
        waiting: list[str] = []
        for node in self.scheduler.nodes:
            alone = node.is_extern() or node.is_template()
            if alone and waiting:
                yield Kernel(freed=waiting)
                waiting = []
            kernel = Kernel(multiplies=_multiplies(node))
            parts = node.get_nodes()
            names = OrderedSet(part.get_name() for part in parts)
            for part in parts:
                for buffer in part.get_outputs():
                    self._make(buffer, part, names, kernel)
            self.run |= names
            freed = [name for name in sorted(node.last_usage) if self._can_be_freed(name)]
            if self.grouped and not alone:
                waiting += freed
            else:
                kernel.freed = freed
            yield kernel
        yield Kernel(freed=waiting)

    def _make(
        self, buffer: SchedulerBuffer, part: BaseSchedulerNode, names: OrderedSet[str], kernel: Kernel
    ) -> None:
        name, node = buffer.get_name(), buffer.node
        layout = node.layout
        if name in self.made or isinstance(layout, ir.NoneLayout):
            return
        self.made.add(name)
        if isinstance(layout, ir.MultiOutputLayout):
            # An operator with several results allocates all of them.
            results = (
                result for user in buffer.users for result in getattr(user.node, "get_outputs", list)()
            )
            for result in results:
                if isinstance(result.node, ir.MultiOutput):
                    self._make(result, part, names, kernel)
            return
        shared = [*node.get_inputs_that_alias_output(), *node.get_mutation_names()]
        if isinstance(layout, ir.NonOwningLayout):  # a part of a concatenation is written in place
            base = _base(layout.view)
            if base.get_name() not in self.made:
                self.made.add(base.get_name())
                kernel.new.append((base.get_name(), _layout(base)))
            shared = [base.get_name()]
        if not shared and isinstance(part, SchedulerNode):
            if self.scheduler.can_buffer_be_removed_through_fusion(name, names):
                self.made.discard(name)  # it exists within the kernel only
                return
            shared = self._written_over(buffer, part)
        if shared:
            kernel.same.append((name, shared[0]))
        else:
            kernel.new.append((name, _layout(node)))

    def _written_over(self, buffer: SchedulerBuffer, part: SchedulerNode) -> list[str]:
        """Return the input whose memory the result takes: SchedulerNode.decide_inplace_update."""
        done = part.ancestors | self.run
        for read in part.read_writes.reads:
            source = self.scheduler.name_to_donated_buffer.get(read.name) or self.scheduler.name_to_buf.get(
                read.name
            )
            if source is None or source.node is None or read.name in self.lowered.never_reuse_buffers:
                continue
            if isinstance(source.defining_op, NopKernelSchedulerNode) or isinstance(
                source.node.layout, ir.NoneLayout | ir.MultiOutputLayout | ir.MutationLayoutSHOULDREMOVE
            ):
                continue
            if isinstance(source, SchedulerBuffer) and read.name not in self.made:
                continue
            remaining_users = [user for user in source.users if user.node.get_name() not in done]
            if (
                len(remaining_users) == 1
                and remaining_users[0].node is part
                and remaining_users[0].can_inplace
                and can_match_buffer_size(source.node, buffer.node)
                and self._read_at_one_index(source, part)
            ):
                return [read.name]
        return []

    def _read_at_one_index(self, source: Any, part: SchedulerNode) -> bool:
        """Return whether all parts of the kernel read and write `source` in the same order."""
        kernel = self.scheduler.get_fused_node(part)
        parts = (user.node for user in source.users if isinstance(user.node, BaseSchedulerNode))
        inside = (
            part for part in parts if self.scheduler.name_to_fused_node.get(part.get_first_name()) is kernel
        )
        dependencies = {dep for node in inside for dep in node.read_writes.reads_and_writes()}
        return len({dep for dep in dependencies if dep.name == source.get_name()}) <= 1

    def _can_be_freed(self, name: str) -> bool:
        buffer = self.scheduler.name_to_buf.get(name)
        return buffer is None or buffer.can_free()


def _base(view: Any) -> Any:
    """Return the buffer below views and boxes."""
    while not isinstance(view, ir.Buffer):
        view = view.data
    return view


def _flops(graph: fx.GraphModule) -> float:
    total = 0.0
    for node in graph.graph.nodes:
        if node.op != "call_function" or "val" not in node.meta:
            continue
        operator, args, out = node.target, node.args, node.meta["val"]
        if (name := getattr(operator, "__name__", "")) in _WITH_RANDOM_STATE:
            skipped = _WITH_RANDOM_STATE[name]
            operator, args = args[skipped], args[skipped + 1 :]
            out = out[1] if isinstance(out, tuple) and not skipped else out
        if (formula := flop_registry.get(getattr(operator, "overloadpacket", None))) is not None:
            args, kwargs = tree_map_only(fx.Node, lambda node: node.meta["val"], (args, node.kwargs))
            total += formula(*args, **kwargs, out_val=out)
    return total


_WITH_RANDOM_STATE = {"run_and_save_rng_state": 0, "run_with_rng_state": 1}
"Higher-order operators -> index of the operator that they run among their arguments."
