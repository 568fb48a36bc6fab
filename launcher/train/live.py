"""What lay in memory when it ran out: the largest pieces, and whose they are."""

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
"For looking through all objects of the process; the other ranks may be waiting for this one."
ROUNDING = 0.01
"Messages give sizes in MiB or GiB with two decimals."

_WRAPPERS = re.compile(r"\b(?:module|_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Piece:
    """One storage, or one block of the allocator. Numbers only: it keeps no tensor alive."""

    address: int
    size: int
    "Bytes."
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Moment:
    """Taken when an allocation failed, before the exception unwound the stack."""

    requested: int
    total: int | None
    free: int | None
    largest: tuple[Piece, ...]


def largest(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple(heapq.nlargest(SHOWN, pieces, key=lambda piece: piece.size))


def cuda_pieces() -> Iterator[Piece]:
    """What PyTorch's allocator has given out on the current device, activations included."""
    device = torch.cuda.current_device()
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    yield Piece(block["address"], block["size"])


def with_tensors(found: OutOfMemory, moment: Moment | None, snapshot: str | None) -> OutOfMemory:
    """`found` in a message, with what this process knows better. `moment`: of the last failed allocation,
    which need not be this failure's: a library may have failed beside PyTorch's allocator."""
    known: dict[str, Any] = {"snapshot": snapshot}
    pieces: tuple[Piece, ...] = ()
    if moment is not None and _is_of(moment, found):
        known |= {"requested": moment.requested, "total": moment.total, "free": moment.free}
        pieces = moment.largest
    elif found.kind == "gpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pieces = largest(cuda_pieces())
    return found.model_copy(update=known | {"largest": _named(pieces)})


def _is_of(moment: Moment, found: OutOfMemory) -> bool:
    return found.requested is not None and math.isclose(
        moment.requested, found.requested, rel_tol=ROUNDING, abs_tol=ROUNDING * 2**20
    )


def _named(pieces: tuple[Piece, ...]) -> tuple[LiveTensor, ...]:
    if not pieces:
        return ()
    seen = _Objects({piece.address for piece in pieces})
    names = seen.names()
    tensors = []
    for piece in pieces:
        tensor = seen.tensors.get(piece.address)
        shape, dtype = piece.shape, piece.dtype
        if shape is None and tensor is not None:
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


class _Objects:
    """Tensors at the addresses, and the models and optimizers of the process."""

    def __init__(self, addresses: set[int]) -> None:
        self.addresses = addresses
        self.tensors: dict[int, torch.Tensor] = {}
        self.optimizers: list[Optimizer] = []
        modules: list[nn.Module] = []
        deadline = time.monotonic() + SECONDS_TO_NAME
        for number, one in enumerate(gc.get_objects()):
            if number % 10_000 == 0 and time.monotonic() > deadline:
                break
            kind = type(one)  # isinstance() would ask lazy proxies of other libraries for their class
            if issubclass(kind, torch.Tensor):
                self._see(one)
            elif issubclass(kind, nn.Module):
                modules.append(one)
            elif issubclass(kind, Optimizer):
                self.optimizers.append(one)
        inner = {id(child) for module in modules for child in module.children()}
        self.roots = [module for module in modules if id(module) not in inner]

    def _see(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address in self.addresses:
            self.tensors.setdefault(address, tensor)

    def names(self) -> dict[int, str]:
        """By address. A parameter under FSDP is registered gathered or as its shard, whichever is in use."""
        found: dict[int | None, str] = {}
        of: dict[int, str] = {}
        for root in self.roots:
            for raw, parameter in root.named_parameters():
                name = of[id(parameter)] = _WRAPPERS.sub("", raw)
                found.setdefault(_address(parameter), name)
                if parameter.grad is not None:
                    found.setdefault(_address(parameter.grad), _of("gradient", parameter.grad, name))
            for raw, buffer in root.named_buffers():
                found.setdefault(_address(buffer), _WRAPPERS.sub("", raw))
        for optimizer in self.optimizers:
            for owner, states in optimizer.state.items():
                for key, state in states.items():
                    if isinstance(state, torch.Tensor):
                        whose = of.get(id(owner), "a parameter")
                        found.setdefault(_address(state), _of(key, state, whose))
        return {address: name for address, name in found.items() if address is not None}


def _of(what: str, tensor: torch.Tensor, name: str) -> str:
    """DDP's gradients are pieces of a few large buckets."""
    alone = isinstance(tensor, DTensor) or tensor.untyped_storage().nbytes() <= tensor.nbytes
    return f"{what} of {name}" + ("" if alone else " and others")


@torch.no_grad()
def _address(tensor: torch.Tensor) -> int | None:
    """As the budget's books and PyTorch's allocator know it; None for a tensor without memory of its own."""
    try:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
    except (RuntimeError, NotImplementedError):  # fake, sparse, a subclass that wraps several
        return None
    return storage._cdata if storage.device.type == "cpu" else storage.data_ptr()
