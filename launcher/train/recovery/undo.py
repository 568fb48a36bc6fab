"""Random state and module buffers as they are between two steps: what a repetition begins with."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launcher.train.rng import random_state, set_rng_state

SMALL = 2**20
"Bytes of a buffer."


class Undo:
    """Of one rank. Create it when the model is whole and restored, with `budget.host_side()`: it copies every
    buffer once into host memory.

    A small one is copied on its device in each step. Of a large one, most often a constant (a mask, rotary
    angles), a second copy on the device would be wasted until it is seen to change: by torch's count of
    changes in place, which does not count everything (`buffer.data.mul_()`, BatchNorm's statistics), or by
    the comparison in `restore`, which the probe calls before the first step.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        whole = model.module if isinstance(model, DistributedDataParallel) else model
        self._device = device
        self._homes = [(name, module._buffers) for name, module in whole.named_modules()]
        self._slots: dict[tuple[int, str], Slot] = {}
        self._lock = threading.Lock()
        self._find()
        for slot in self._slots.values():
            slot.keep_on_host()
        self._rng = random_state(device)

    def take(self) -> None:
        """A step is done, and the next one begins with this. Waits for no device. Gradients are not kept."""
        with self._lock:
            self._find()
            # All are allocated before the first is copied: out of memory here, the copies before stay.
            copies = [copy for slot in self._slots.values() if (copy := slot.due()) is not None]
            _copy(copies)
            for copy in copies:
                copy.slot.done(copy)
            self._rng = random_state(self._device)

    @torch.no_grad()
    def restore(self) -> bool:
        """As at the last `take`, any number of times, from any thread. It may wait for the device, in the
        stream of its caller. True: a buffer had changed for the first time, and the next `take` copies it on
        the device."""
        with self._lock:
            followed = self._restore_buffers()
            set_rng_state(self._rng, self._device)
            return not followed

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """As at the last `take`; random numbers go on."""
        with self._lock:
            self._restore_buffers()

    def _restore_buffers(self) -> bool:
        """False: one had changed for the first time."""
        for _, home in self._homes:
            for name in [name for name in home if (id(home), name) not in self._slots]:
                del home[name]  # registered since
        changed = [slot for slot in self._slots.values() if slot.restore()]
        return all(slot.follows for slot in changed)

    @property
    def rng(self) -> dict[str, Any]:
        """At the last `take`; for a file, `launcher.train.rng.packed`."""
        return self._rng

    def buffers(self) -> dict[str, torch.Tensor]:
        """At the last `take`: this object's own copies, on the device or the host."""
        with self._lock:
            prefixes = {id(home): f"{name}." if name else "" for name, home in self._homes}
            return {
                prefixes[home] + name: slot.values
                for (home, name), slot in self._slots.items()
                if slot.values is not None
            }

    def _find(self) -> None:
        """A module may register buffers, and delete them, as it runs."""
        known, self._slots = self._slots, {}
        for _, home in self._homes:
            for name in home:
                key = id(home), name
                self._slots[key] = known.get(key) or Slot(home, name)


class Copy(NamedTuple):
    slot: Slot
    tensor: torch.Tensor
    into: torch.Tensor


class Slot:
    """One buffer of one module."""

    def __init__(self, home: dict[str, torch.Tensor | None], name: str) -> None:
        self.home, self.name = home, name
        self.tensor: torch.Tensor | None = None
        "What was registered at the last take: kept alive, so that it can be put back."
        self.values: torch.Tensor | None = None
        "A copy of it."
        self.follows = False
        "The buffer changes: the copy is on its device, and made anew."
        self._always = False
        "It may change without being counted, or be replaced."
        self._state: tuple[int, ...] = ()

    def keep_on_host(self) -> None:
        self.tensor = self.home[self.name]
        if self.tensor is not None:
            self.values = self.tensor.detach().to("cpu", copy=True)
            self._state = _state(self.tensor)
            self._always = self.tensor.nbytes <= SMALL

    def due(self) -> Copy | None:
        """The copy that is to be made, None when the one before holds."""
        now = self.home[self.name]
        if now is None:
            self.tensor = self.values = None
            return None
        if now is self.tensor and _state(now) == self._state and not self._always:
            return None
        reusable = self.follows and self.values is not None and _alike(self.values, now)
        return Copy(self, now, self.values if reusable else torch.empty_like(now, requires_grad=False))  # type: ignore[arg-type]

    def done(self, copy: Copy) -> None:
        self.tensor, self.values, self.follows = copy.tensor, copy.into, True
        self._state = _state(copy.tensor)

    def restore(self) -> bool:
        """Whether it had changed."""
        replaced = self.home.get(self.name) is not self.tensor
        self.home[self.name] = self.tensor
        if self.tensor is None or self.values is None:
            return False
        fits = self.tensor.shape == self.values.shape and self.tensor.dtype == self.values.dtype
        changed = not fits or not torch.equal(self.tensor.detach().to(self.values.device), self.values)
        self._always |= replaced or (changed and _state(self.tensor) == self._state)
        if not fits:  # resized in place, or given other data
            self.tensor.data = self.values.to(self.tensor.device, copy=True)
        elif changed:
            self.tensor.copy_(self.values)
        # Else the next take sees that it changes, and begins to follow it.
        if self.follows or not changed:
            self._state = _state(self.tensor)
        return replaced or changed


def _state(tensor: torch.Tensor) -> tuple[int, ...]:
    """Another one when the values are others, as far as torch counts."""
    version = -1 if tensor.is_inference() else tensor._version
    return (version, tensor.data_ptr(), *tensor.shape)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


@torch.no_grad()
def _copy(copies: list[Copy]) -> None:
    """In as few kernels as there are types."""
    by_type: dict[torch.dtype, list[Copy]] = defaultdict(list)
    for copy in copies:
        by_type[copy.tensor.dtype].append(copy)
    for alike in by_type.values():
        torch._foreach_copy_([copy.into for copy in alike], [copy.tensor for copy in alike])
