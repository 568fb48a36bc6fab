"""Records when storages are allocated and freed, with their module and pass."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import graph
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from launcher.memory.trace import (
    ACTIVATIONS,
    ALL_GATHER,
    ALL_REDUCE,
    BATCH,
    COMMUNICATION,
    COMPLETE,
    COMPUTE,
    GATHERED,
    GRADIENTS,
    PRODUCT,
    REDUCE_SCATTER,
    TEMPORARIES,
    Storage,
)
from launcher.memory.unroll import NotUniformError, Recorded, Run, Segment
from launcher.train.activations.activations import ON_HOST
from launcher.train.local_shards import local
from launcher.train.sharding.sharding import fsdp_roots
from launcher.train.tracing.kernels import KERNELS

LOSS = "loss"
"Module name for operators outside all modules."
_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor
_aten = torch.ops.aten
PRODUCTS = frozenset([_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._scaled_mm])
"Operators that cuBLAS computes on a GPU."
_WRAPPERS = ("torch._dynamo.eval_frame", "torch._compile")
"Modules of the functions that torch wraps around a mode's __torch_dispatch__."
_ENTER, _EXIT = "profiler::_record_function_enter_new", "profiler::_record_function_exit"
# FSDP2's labels for the profiler. The first match counts.
_LABELS = (
    ("FSDP::all_gather", GATHERED),
    ("FSDP::post_backward_reduce", COMMUNICATION),
    ("FSDP::post_backward_accumulate", GRADIENTS),
)
_STREAMS = {
    "all_gather_copy_in_stream": ALL_GATHER,
    "all_gather_stream": ALL_GATHER,
    "reduce_scatter_stream": REDUCE_SCATTER,
    "all_reduce_stream": ALL_REDUCE,
}
"Attributes of FSDP2's FSDPCommContext."
_TIMES = {
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_reduce": 2,
    "all_reduce_": 2,
    "all_to_all_single": 1,
}
"Collective of DTensor -> how often its bytes count; the others, such as waiting, exchange nothing."
OTHER = "other"
"Streams of the user's code share one pool here."


class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that an operator allocates while this mode is on, with sizes in bytes.

    `names` has the names of the modules in the whole model, and `units` its blocks. `blocks` has (index of
    the run, index of the kept block) for blocks whose passes are separate segments.

    With `sums_in_place`, the sum of a tensor's gradients is recorded as autograd computes it without a mode:
    into the first of them, if nothing else refers to it, it is not a DTensor, and the sum has no graph
    (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp). With a mode, each sum is a new tensor.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        units: Collection[nn.Module],
        blocks: Mapping[nn.Module, tuple[int, int]],
        runs: tuple[Run, ...],
        *,
        sums_in_place: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums_in_place = sums_in_place
        self._sum: tuple[int, int] | None = None
        "Addresses of the last sum's first gradient and of the sum, until the next allocation or free."
        self._adds_dtensors = False
        "The next sum is that of two DTensors' shards."
        self.recorded = Recorded(runs=runs)
        self._names, self._units, self._blocks = names, units, blocks
        self._numbers: dict[int, int | None] = {}
        "Address of a storage -> its number; None if it is not counted."
        self._finalizers: dict[int, weakref.ref[Any]] = {}
        self._modules: list[str] = []
        self._in_backward = LOSS
        self._labels: list[str] = []
        self._born_in_forward: list[int] = []
        self._alive: set[int] = set()
        self._with_product: Segment | None = None
        "The last segment that has a matrix product."
        self.phase = ""
        self._compute = torch.cpu.current_stream()
        self._communication: Any = None

    @property
    def module(self) -> str:
        """Name of the running module, or LOSS."""
        return self._modules[-1] if self._modules else self._in_backward

    def begin(self, phase: str) -> None:
        """Begin a phase. Temporaries that survive a forward pass become activations."""
        if self.phase.startswith("forward"):
            for number in self._born_in_forward:
                if number in self._alive and self.recorded.storages[number].category == TEMPORARIES:
                    self._set_category(ACTIVATIONS, number)
        self.phase, self._in_backward, self._modules = phase, LOSS, []
        self._born_in_forward = []
        self.recorded.segments.append(Segment(phase))

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these tensors: parameters and states are counted elsewhere."""
        for tensor in tensors:
            self._numbers[local(tensor).untyped_storage()._cdata] = None

    def learn_streams(self, model: nn.Module) -> None:
        """Read the streams of a sharded model."""
        for root in fsdp_roots(model):
            self._communication = root._get_fsdp_state()._comm_ctx

    def arrive(self, batch: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            self._record(tensor)  # no operator of the trace made the tensors with known values
        self._categorize(BATCH, tensors)

    def follow_gradients(self, model: nn.Module) -> list[str]:
        """Free each gradient when it is complete, which launcher.memory.trace describes. Return the names of
        the trained parameters."""
        followed, completed = dict[torch.Tensor, str](), set[torch.Tensor]()

        def complete(name: str, p: torch.Tensor) -> None:
            if p not in completed:  # later ones are added to the first
                completed.add(p)
                self._categorize(GRADIENTS, [p.grad] if p.grad is not None else [])
            self._mark_moment(COMPLETE, name)
            p.grad = None

        for module in model.modules():
            prefix = "" if module is model else f"{self._names.get(module, '')}."
            for name, p in module.named_parameters(recurse=False):
                if p.requires_grad and p not in followed:
                    followed[p] = prefix + name
                    hook = partial(complete, followed[p])
                    p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return [*followed.values()]

    def _mark_moment(self, category: str, name: str) -> None:
        number = self._new(0, category, name)
        self.recorded.segments[-1].events.append(~number)

    def multiply(self) -> None:
        """Mark the first matrix product of a segment."""
        if self._with_product is not self.recorded.segments[-1]:
            self._with_product = self.recorded.segments[-1]
            self._mark_moment(PRODUCT, self.module)

    def _categorize(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            number = self._numbers.get(local(tensor).untyped_storage()._cdata)
            if number is not None:
                self._set_category(category, number)

    def _set_category(self, category: str, number: int) -> None:
        self.recorded.storages[number] = self.recorded.storages[number]._replace(category=category)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self._adds_dtensors = func is _ADD
            return NotImplemented  # DTensor then calls its operators on the local shard, which come here
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # as FakeTensorMode answers; half of all calls ask this
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            self._follow_labels(func, args)
            return func(*args, **kwargs)
        out = KERNELS.get(func, func)(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            self._exchange(func, args, out)
        new = False
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                new |= self._record(leaf)
        if self._sums_in_place and func is _ADD:
            self._sum = self._sum_of_gradients(args[0], args[1], out)
        if new or func._schema.is_mutable:
            segment = self.recorded.segments[-1]
            segment.traffic += sum(
                leaf.numel() * leaf.itemsize
                for leaf in tree_leaves((args, kwargs, out))
                if isinstance(leaf, torch.Tensor)
            )
            if (formula := flop_registry.get(func._overloadpacket)) is not None:
                segment.flops += formula(*args, **kwargs, out_val=out)
            if func._overloadpacket in PRODUCTS:
                self.multiply()
        return out

    def _sum_of_gradients(
        self, first: torch.Tensor, second: torch.Tensor, total: torch.Tensor
    ) -> tuple[int, int] | None:
        """Return the addresses of the first gradient and of the sum, if autograd may add them up in place."""
        of_dtensors, self._adds_dtensors = self._adds_dtensors, False
        if of_dtensors or torch.is_grad_enabled() or first._is_view() or not _called_by_autograd():
            return None
        addresses = [tensor.untyped_storage()._cdata for tensor in (first, second, total)]
        return None if addresses[0] == addresses[1] else (addresses[0], addresses[2])

    def send(self, tensor: torch.Tensor | None) -> None:
        """Count a message to another stage."""
        if tensor is not None:
            self.recorded.segments[-1].sent += local(tensor.detach()).nbytes

    def _exchange(self, func: Any, args: Any, out: Any) -> None:
        """Count a collective of DTensor. FSDP calls torch.distributed's own."""
        times = _TIMES.get(func._schema.name.partition("::")[2], 0)
        whole = max((args[0], out), key=lambda tensor: tensor.numel())
        self.recorded.segments[-1].exchanged += times * whole.numel() * whole.itemsize

    def _follow_labels(self, func: Any, args: Any) -> None:
        if func._schema.name == _ENTER:
            self._labels.append(str(args[0]))
        elif func._schema.name == _EXIT and self._labels:
            self._labels.pop()

    def _record(self, tensor: torch.Tensor) -> bool:
        """Record the tensor's storage. Return whether it is new and takes memory."""
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta":
            return False  # a model asks for a shape or a stride with it
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._numbers:
            return False
        self._finalizers[address] = weakref.ref(storage, self._releaser(address))
        self._allocate(address, storage.nbytes())
        return True

    def _allocate(self, address: int, size: int) -> None:
        if self._labels and self._labels[-1] == ON_HOST:
            self._numbers[address] = None
            return
        number = self._new(size, self._category(), self.module)
        self._numbers[address] = number
        self._alive.add(number)
        if self.phase.startswith("forward"):
            self._born_in_forward.append(number)

    def _new(self, size: int, category: str, module: str) -> int:
        number = len(self.recorded.storages)
        self.recorded.storages.append(Storage(size, 0, category, module, self._stream()))
        self.recorded.segments[-1].events.append(number)
        return number

    def _stream(self) -> str:
        """Return the stream that would be current on a GPU.

        FSDP2 also switches streams on the CPU, where this has no effect.
        """
        current = torch.cpu.current_stream()
        if current is self._compute:
            return COMPUTE
        for attribute, stream in _STREAMS.items():
            if getattr(self._communication, attribute, None) is current:
                return stream
        return OTHER

    def _category(self) -> str:
        for label in reversed(self._labels):
            for prefix, category in _LABELS:
                if label.startswith(prefix):
                    return category
        return TEMPORARIES

    def _free(self, address: int) -> None:
        number = self._numbers.pop(address)
        if self._sum is not None:
            (first, total), self._sum = self._sum, None
            if address == first and number is not None and self._undo_allocation(total):
                self._numbers[total] = number
                return
        if number is not None and number in self._alive:
            self._alive.remove(number)
            self.recorded.segments[-1].events.append(~number)

    def _undo_allocation(self, address: int) -> bool:
        """Remove the last event if it is the allocation of this storage. Return whether it was."""
        recorded, number = self.recorded, self._numbers.get(address)
        events = recorded.segments[-1].events
        if number is None or not events or events[-1] != number:
            return False
        events.pop()
        recorded.storages.pop()
        self._alive.remove(number)
        return True

    def _releaser(self, address: int) -> Callable[[Any], None]:
        def release(_: Any) -> None:
            del self._finalizers[address]
            self._free(address)

        return release

    @contextmanager
    def following(self) -> Iterator[None]:
        """Record a whole step: operators, the running module, and storages that FSDP2 frees and reallocates
        by resizing, which is not an operator."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            address = storage._cdata
            if self._numbers.get(address) is not None:
                self._free(address)
                if size:
                    self._allocate(address, size)
                else:
                    # The storage stays known, so it does not count as new when it is resized again.
                    self._numbers[address] = -1
            return resize(storage, size)

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
            stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
            stack.enter_context(self)
            yield

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._modules.append(self._names.get(module, ""))
        if module in self._blocks:
            if "backward" in self.phase:
                raise NotUniformError("a block is recomputed in the backward pass by its own code")
            self._mark(module, backward=False)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        leaf = next((t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad), None)
        if leaf is not None and (module in self._units or not any(module.children())):
            leaf.register_hook(self._backward_of(module))  # type: ignore[no-untyped-call]
        if module in self._blocks and self._is_last(module):
            self.recorded.segments.append(Segment(self.phase))

    def _backward_of(self, module: nn.Module) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            self._in_backward = self._names.get(module, "")
            if module in self._blocks:
                self._mark(module, backward=True)

        return hook

    def begin_weights(self, module: nn.Module) -> None:
        """Begin to compute the weight gradients of a module that the backward pass has postponed."""
        self._in_backward = self._names.get(module, "")
        if module in self._blocks:
            self._mark(module, backward=True)
        else:
            self.recorded.segments.append(Segment(self.phase))

    def _is_last(self, module: nn.Module) -> bool:
        run, block = self._blocks[module]
        return block == self.recorded.runs[run].kept - 1

    def _mark(self, module: nn.Module, *, backward: bool) -> None:
        run, block = self._blocks[module]
        self.recorded.segments.append(Segment(self.phase, run, block, backward))


def _called_by_autograd() -> bool:
    """Return whether autograd's engine, which is not written in Python, called the operator itself."""
    frame: FrameType | None = sys._getframe(3)  # that called __torch_dispatch__, which called the caller
    while frame is not None and frame.f_globals.get("__name__") in _WRAPPERS:
        frame = frame.f_back
    return frame is not None and frame.f_code is graph._engine_run_backward.__code__
