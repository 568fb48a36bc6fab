"""The largest pieces of memory at an OOM, and the parameters, gradients and states they belong to."""

from __future__ import annotations

import gc
import heapq
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from launcher.spec.verdict import LiveTensor, OutOfMemory

SHOWN = 5
SECONDS_TO_NAME = 1.0
"Time limit for the search through all objects of the process; other ranks may be waiting for this one."
ROUNDING = 0.01
"Tolerance for sizes in messages, which are in MiB or GiB with two decimals."

_WRAPPERS = re.compile(r"\b(?:module|_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Piece:
    """A storage or a block of the allocator. It holds only numbers, so it keeps no tensor alive."""

    address: int
    size: int
    "Bytes."
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Moment:
    """The state of memory when an allocation failed, before the exception unwound the stack."""

    requested: int
    total: int | None
    "Capacity in bytes; None in a fire drill without a budget."
    free: int | None
    largest: tuple[Piece, ...]


def largest(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple(heapq.nlargest(SHOWN, pieces, key=lambda piece: piece.size))


def cuda_pieces() -> Iterator[Piece]:
    """Yield the blocks that PyTorch's allocator has in use on the current device."""
    device = torch.cuda.current_device()
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    yield Piece(block["address"], block["size"])


def with_tensors(failure: OutOfMemory, moment: Moment | None, snapshot: str | None) -> OutOfMemory:
    """Return `failure`, which was read from a message, with the largest pieces and exact sizes added.

    `moment` describes the last failed allocation. It is used only if its size matches `failure`: this failure
    may come from a library that does not use PyTorch's allocator.
    """
    details: dict[str, Any] = {"snapshot": snapshot}
    pieces: tuple[Piece, ...] = ()
    if moment is not None and _matches(moment, failure):
        details |= {"requested": moment.requested, "total": moment.total, "free": moment.free}
        pieces = moment.largest
    elif failure.kind == "gpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pieces = largest(cuda_pieces())
    return failure.model_copy(update=details | {"largest": _named(pieces)})


def _matches(moment: Moment, failure: OutOfMemory) -> bool:
    return failure.requested is not None and math.isclose(
        moment.requested, failure.requested, rel_tol=ROUNDING, abs_tol=ROUNDING * 2**20
    )


def _named(pieces: tuple[Piece, ...]) -> tuple[LiveTensor, ...]:
    if not pieces:
        return ()
    live = _LiveObjects({piece.address for piece in pieces})
    names = live.names()
    tensors = []
    for piece in pieces:
        tensor = live.tensors.get(piece.address)
        shape, dtype = piece.shape, piece.dtype
        if shape is None and tensor is not None and not tensor.is_nested:
            shape, dtype = tuple(tensor.shape), tensor.dtype
        tensors.append(
            LiveTensor(
                bytes=piece.size,
                shape=shape,
                dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,
                name=names.get(piece.address),
            )
        )
    return tuple(tensors)


class _LiveObjects:
    """The live tensors at some addresses, and the models and optimizers of the process."""

    def __init__(self, addresses: set[int]) -> None:
        self.addresses = addresses
        self.tensors: dict[int, torch.Tensor] = {}
        self.optimizers: list[Optimizer] = []
        modules: list[nn.Module] = []
        deadline = time.monotonic() + SECONDS_TO_NAME
        for number, value in enumerate(gc.get_objects()):
            if number % 10_000 == 0 and time.monotonic() > deadline:
                break
            cls = type(value)  # isinstance() would make lazy proxies of other libraries load their class
            if issubclass(cls, torch.Tensor):
                self._see(value)
            elif issubclass(cls, nn.Module):
                modules.append(value)
            elif issubclass(cls, Optimizer):
                self.optimizers.append(value)
        inner = {id(child) for module in modules for child in module.children()}
        self.roots = [module for module in modules if id(module) not in inner]

    def _see(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address in self.addresses:
            self.tensors.setdefault(address, tensor)

    def names(self) -> dict[int, str]:
        """Return names by address. With FSDP, `named_parameters` yields gathered parameters or shards."""
        names: dict[int | None, str] = {}
        parameter_names: dict[int, str] = {}
        for root in self.roots:
            for raw, parameter in root.named_parameters():
                name = parameter_names[id(parameter)] = _WRAPPERS.sub("", raw)
                names.setdefault(_address(parameter), name)
                if parameter.grad is not None:
                    names.setdefault(_address(parameter.grad), _described("gradient", parameter.grad, name))
            for raw, buffer in root.named_buffers():
                names.setdefault(_address(buffer), _WRAPPERS.sub("", raw))
        for optimizer in self.optimizers:
            for owner, states in optimizer.state.items():
                for key, state in states.items():
                    if isinstance(state, torch.Tensor):
                        parameter_name = parameter_names.get(id(owner), "a parameter")
                        names.setdefault(_address(state), _described(key, state, parameter_name))
        return {address: name for address, name in names.items() if address is not None}


def _described(what: str, tensor: torch.Tensor, name: str) -> str:
    """Return "gradient of NAME", with "and others" if the storage is shared, as DDP's buckets are."""
    alone = isinstance(tensor, DTensor) or tensor.untyped_storage().nbytes() <= tensor.nbytes
    return f"{what} of {name}" + ("" if alone else " and others")


@torch.no_grad()
def _address(tensor: torch.Tensor) -> int | None:
    """Return the address used by the budget or PyTorch's allocator, or None for a tensor without storage."""
    try:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        return storage._cdata if storage.device.type == "cpu" else storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # fake, sparse, or a subclass that wraps several tensors
        return None
