"""A memory budget on the CPU: it stands in for a GPU's memory, exact to the byte and deterministic.

`TRAIN_MEMORY_BUDGET=64MiB` counts every storage that an operator returns, until it is freed: parameters,
gradients, activations, optimizer states, FSDP's gathered parameters. It does not count scratch memory inside
a kernel, gloo's staging buffers, and tensors that a GPU run keeps in host memory (`host_side`).
On a GPU the same variable limits PyTorch's allocator.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from launcher.spec.fire_drill import BUDGET, DRILLS, parse_budget
from launcher.train.drill import Drills
from launcher.train.phase import Where
from launcher.train.rank import SetupError

MIB = 2**20
aten = torch.ops.aten
CPU = torch.device("cpu")


class Unlimited:
    """No budget, at no cost."""

    def __enter__(self) -> Unlimited:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def host_side(self) -> AbstractContextManager[None]:
        """Return a context whose tensors are never counted, since a GPU run keeps them in host memory."""
        return nullcontext()

    def track(self, tree: Any) -> None:
        """Count the tensors in `tree` that no operator returned, such as a batch arriving on the device."""

    def report(self) -> str | None:
        """Return a line about the peak, or None without a limit."""
        return None


class Held(NamedTuple):
    """A counted storage, and where it was allocated."""

    size: int
    "Current size in bytes."
    dtype: torch.dtype
    shape: torch.Size
    "Shape of the first tensor that used the storage."
    phase: str
    step: int | None
    reference: weakref.ref[Any]
    "Its callback stops counting the storage when it is freed."


class MemoryBudget(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises torch.OutOfMemoryError when live bytes on the device would exceed `limit` or a drill is due.

    `limit` is in bytes; None means no limit.
    """

    def __init__(
        self,
        limit: int | None,
        where: Where | None = None,
        drills: Drills | None = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.drills, self.device = limit, drills, device
        self.where = where or Where()
        self.live = 0
        self.on_oom: Callable[[int], None] | None = None
        "Called with the requested bytes before the error is raised."
        self._earlier_peak = self._peak = 0
        self._counting = True
        self._storages: dict[int, Held] = {}  # by address
        self._on_host: dict[int, weakref.ref[Any]] = {}
        "Storages that are not counted, by address."
        self._recording = False
        self._at_peak: tuple[Held, ...] = ()
        self._resize = torch.UntypedStorage.resize_

    def __deepcopy__(self, _: object) -> MemoryBudget:
        return self  # blocks refer to it, and a task may copy a block

    def __enter__(self) -> MemoryBudget:
        torch.UntypedStorage.resize_ = self._resizer()  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches operators on the local shard, which arrive here again
        out = func(*args, **(kwargs or {}))
        # DTensor computes output shapes on fake tensors of the global size, which hold no memory.
        # A split allocates nothing; a split of an uncounted tensor is gloo's, on its staging buffer.
        if func is not aten.split.Tensor and active_fake_mode() is None:
            if type(out) is torch.Tensor and out.layout is torch.strided:
                self._see(out)
            else:
                for tensor in _tensors(out):
                    self._see(tensor)
        return out

    @contextmanager
    def host_side(self) -> Iterator[None]:
        before, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = before

    def track(self, tree: Any) -> None:
        for tensor in _tensors(tree):
            self._on_host.pop(tensor.untyped_storage()._cdata, None)
            self._count(tensor)

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Return whether `storage` is counted."""
        return storage._cdata in self._storages

    @property
    def peak(self) -> int:
        """Peak since the start, in bytes."""
        return max(self._earlier_peak, self._peak)

    def take_peak(self) -> int:
        """Return the peak since the last call, in bytes."""
        peak, self._earlier_peak = self._peak, self.peak
        self._peak = self.live
        return peak

    def record(self, on: bool) -> None:
        """Start or stop recording the live storages at each new peak, which copies their table each time."""
        self._recording, self._at_peak = on, ()

    def contents(self) -> tuple[Held, ...]:
        """Return the storages alive at the recorded peak, or those alive now if none was recorded."""
        return self._at_peak or self._live_storages()

    def _live_storages(self) -> tuple[Held, ...]:
        # Copy first: garbage collection may remove storages while the tuple is built.
        return tuple(self._storages.copy().values())

    def report(self) -> str | None:
        if self.limit is None:
            return None
        return f"memory budget: peak {self.peak / MIB:.1f} MiB of {self.limit / MIB:.1f} MiB"

    def _see(self, tensor: torch.Tensor) -> None:
        """Count a tensor that an operator returned, unless it belongs in host memory."""
        if tensor.device.type != self.device.type:
            return
        if self._counting:
            self._count(tensor)
        elif (storage := tensor.untyped_storage())._cdata not in self._storages:
            self._forget(storage)

    def _forget(self, storage: torch.UntypedStorage) -> None:
        """Never count `storage` while it is alive."""
        address = storage._cdata
        if address not in self._on_host:
            self._on_host[address] = weakref.ref(storage, lambda _: self._on_host.pop(address, None))

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self.device.type:
            return
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        held = self._storages.get(address)
        if address in self._on_host or (held is not None and held.size == size):
            return
        self._reserve(size - (held.size if held is not None else 0))
        reference = held.reference if held is not None else weakref.ref(storage, self._releaser(address))
        shape = torch.Size([tensor.numel()]) if tensor.is_nested else tensor.shape
        self._keep(address, Held(size, tensor.dtype, shape, "", None, reference))

    def _reserve(self, size: int) -> None:
        if size > 0:
            if self.limit is not None and self.live + size > self.limit:
                self._refuse(
                    size,
                    f"The budget ({BUDGET}) has a total capacity of {_format(self.limit)} "
                    f"of which {_format(self.limit - self.live)} is free.",
                )
            if self.drills is not None and (drill := self.drills.strikes()):
                self._refuse(size, f"This is a drill ({DRILLS}: {drill}).")
        self.live += size

    def _refuse(self, size: int, reason: str) -> NoReturn:
        if self.on_oom is not None:
            self._at_peak = ()  # contents() must show the storages that are alive now
            self.on_oom(size)
        device = self.device.type.upper()
        raise torch.OutOfMemoryError(
            f"Out of memory on the {device}. Tried to allocate {_format(size)}. {reason}"
        )

    def _keep(self, address: int, held: Held) -> None:
        self._storages[address] = held._replace(phase=self.where.phase, step=self.where.step)
        if self.live > self._peak:
            self._peak = self.live
            if self._recording:
                self._at_peak = self._live_storages()

    def _releaser(self, address: int) -> Callable[[Any], None]:
        def release(_: Any) -> None:
            self.live -= self._storages.pop(address).size

        return release

    def _resizer(self) -> Callable[..., Any]:
        """Return a `resize_` that counts: FSDP2 resizes storages to free and allocate gathered parameters,
        and a resize is not an operator."""

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            held = self._storages.get(storage._cdata)
            if held is None:
                return self._resize(storage, size)
            self._reserve(size - held.size)
            self._keep(storage._cdata, held._replace(size=size))
            return self._resize(storage, size)

        return resize


Budget = Unlimited | MemoryBudget


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a tensor consists of on this rank: a shard, codes and scales, the result of a
    collective, indices and values of a sparse tensor. A wrapper also has a storage of that size, but no
    memory."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        if value.layout is torch.strided or value.is_nested:
            yield value
        else:
            yield from (getattr(value, part)() for part in _PARTS.get(value.layout, ()))


_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
"Methods of a sparse tensor that return its parts."


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        yield from plain_tensors(leaf)


def _format(size: int) -> str:
    """Format bytes as PyTorch's allocator does."""
    for unit, name in ((2**30, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def open_budget(device: torch.device, where: Where | None = None, drills: Drills | None = None) -> Budget:
    """Return the budget that the environment asks for. Raises SetupError for an invalid size."""
    limit = _limit()
    if device.type == "cuda" and limit is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        limit = None  # PyTorch's own allocator counts
    if limit is None and drills is None:
        return Unlimited()
    return MemoryBudget(limit, where, drills, device)


def _limit() -> int | None:
    try:
        return parse_budget(os.environ.get(BUDGET, ""))
    except ValueError as error:
        raise SetupError(f"{BUDGET}: {error}") from None
