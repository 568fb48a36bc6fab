"""Blocks under torch.compile in a trace: captured as in a run, and run as a sequence of allocations.

Dynamo, AOTAutograd, the partitioner and inductor's scheduler are those of a run. Only the generated code is
missing: launcher.train.tracing.inductor returns what it would allocate. Equal blocks share one graph, because
Dynamo decides it, as in a run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from launcher.memory.peaks import Like
from launcher.spec.errors import first_line
from launcher.train.compiling.graph_pass import graph_options
from launcher.train.tracing.as_cuda import as_compiled
from launcher.train.tracing.storage_recorder import StorageRecorder

if TYPE_CHECKING:
    from launcher.train.tracing.inductor import Output, Schedule

MANY = 2**16
"Graphs per function: a planner asks for more of them than a run compiles."
_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)


class NotCapturedError(Exception):
    """torch.compile cannot capture a block as one graph."""


class _CurrentTrace:
    """The current trace."""

    fake: FakeTensorMode
    recorder: StorageRecorder


@contextmanager
def compiling(fake: FakeTensorMode, recorder: StorageRecorder) -> Iterator[None]:
    """Let blocks of `compiled` run in this trace."""
    with patch.multiple(_CurrentTrace, create=True, fake=fake, recorder=recorder):
        yield


def compiled(forward: Callable[..., Any], like: Like) -> Callable[..., Any]:
    """Return a forward that allocates like the compiled one. It runs within `compiling`."""
    from torch._dynamo.exc import TorchDynamoException

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        backend = _backend(like, functorch_config.activation_memory_budget)
        captured = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
        with _as_in_a_run():
            try:
                return captured(*args, **kwargs)
            except TorchDynamoException as error:
                raise NotCapturedError(str(error).splitlines()[0]) from error

    return run


@contextmanager
def _as_in_a_run() -> Iterator[None]:
    """Disable the modes, hooks and replacements of a trace, which a graph would capture."""
    from torch._dynamo import config as dynamo_config

    from launcher.train.compiling.compiled_dtensors import compiled_dtensors  # imports inductor

    with ExitStack() as stack:
        for name in _HOOKS:
            hooks = getattr(modules, name)
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()
        stack.enter_context(_disable_current_modes())
        stack.enter_context(_CurrentTrace.fake)
        stack.enter_context(as_compiled())
        stack.enter_context(compiled_dtensors())
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)  # torch's warnings about compiling matter only in a run
        stack.enter_context(dynamo_config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield


@functools.cache
def _backend(like: Like, budget: float) -> Callable[..., Any]:
    """Return one backend per device and budget: Dynamo shares graphs between blocks with the same one."""
    from torch._inductor.compile_fx import compile_fx  # imports for a second

    def inner(graph: fx.GraphModule, inputs: Any, **options: Any) -> _Player:
        with _disable_current_modes():  # a backward graph is compiled in the backward pass
            try:
                from launcher.train.tracing.inductor import schedule_of

                return _Player(
                    schedule_of(
                        graph,
                        inputs,
                        is_backward=options.get("is_backward", False),
                        is_inference=options.get("is_inference", False),
                        like=like,
                    )
                )
            except Exception as error:
                raise NotCapturedError(first_line(error)) from error

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=inner, config_patches=graph_options())  # type: ignore[arg-type]

    return backend


class _Player:
    """Allocates and frees as a compiled graph does. Values are never computed."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._boxed_call = True
        "AOTAutograd passes a list of arguments, which is emptied so that they can be freed."

    def __call__(self, args: list[Any]) -> list[Any]:
        schedule, recorder = self.schedule, _CurrentTrace.recorder
        tensors: dict[str, Any] = dict(zip(schedule.inputs, args, strict=True))
        args.clear()
        recorder.recorded.segments[-1].flops += schedule.flops
        followed = recorder in _get_current_dispatch_mode_stack()
        with nullcontext() if followed else recorder:
            for kernel in schedule.kernels:
                for name, base in kernel.same:
                    if base in tensors:
                        tensors[name] = tensors[base]
                for name, new in kernel.new:
                    tensors[name] = torch.empty_strided(new.size, new.stride, dtype=new.dtype)
                if kernel.multiplies:
                    recorder.multiply()
                for name in kernel.freed:
                    tensors.pop(name, None)
            return [_output_tensor(output, tensors) for output in schedule.outputs]


def _output_tensor(output: Output, tensors: dict[str, Any]) -> Any:
    if output.name is None:
        return output.value
    tensor, wanted = tensors[output.name], output.tensor
    if wanted is None or not isinstance(tensor, torch.Tensor) or tensor.dtype != wanted.dtype:
        return tensor
    if (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == wanted[:3]:
        return tensor
    with torch._C._AutoDispatchBelowADInplaceOrView():  # so that autograd does not treat it as a view
        return tensor.as_strided(wanted.size, wanted.stride, wanted.offset)
