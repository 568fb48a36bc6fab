"""Everything that changes in a step but the trained parameters, as it is between two steps."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from launcher.spec.base import format_bytes
from launcher.train.recovery.fingerprint import fingerprint
from launcher.train.recovery.holdings import MOST_DATA, SMALL, Holdings, Look, Names, content
from launcher.train.recovery.room import free_on_host
from launcher.train.rng import random_state, set_rng_state
from launcher.train.task import Task, TaskError

HASHING_THREADS = 4
"Threads of a rank that hash large tensors in host memory, at about 1.5 GB/s each."


WATCHED = 2
"Steps in which the content of trained parameters is compared before and after the passes."
MOST_TRAINED = 2**30
"Bytes of trained parameters on a rank that are copied before the first step."


class Restored(NamedTuple):
    """What `Undo.restore` did."""

    followed: bool
    "A large tensor had changed for the first time. The next `take` copies it on its device."
    lost: tuple[str, ...]
    "Large tensors that changed for the first time while there was no copy of them: they stay as they are."


class Undo:
    """Random state, buffers, parameters without gradient, the task's `state()`, and attributes.

    Create it when the model is whole and restored. `take` copies what is small, up to 1 MiB, at each step. A
    large tensor, most often a constant (a mask, a frozen weight), is compared with a fingerprint of itself,
    and is copied at each step from the first change on. `secure` makes a step before that first change safe.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, task: Task | None = None, data: Any = None
    ) -> None:
        whole = model.module if isinstance(model, DistributedDataParallel) else model
        beside = [] if task is None else [("task", task), *_module_of(task), ("data", data)]
        self._look, self._device = Look(whole, beside), device
        self._task = task if task is not None and type(task).state is not Task.state else None
        self._slots: dict[int, Slot] = {}
        self._lock = threading.Lock()
        self._taken = Holdings()
        self._rng: dict[str, Any] = {}
        self._state: Any = None
        self._watched = 0
        "Steps in which it was seen which trained parameters a pass writes."
        self.take()

    @torch.no_grad()
    def take(self, *, anew: bool = False) -> None:
        """Copy all as it is now, but gradients. Waits for the device where there are large tensors. `anew`:
        what was there before was loaded over, and says nothing of what changes."""
        with self._lock:
            found = self._look()
            known, slots = {} if anew else self._slots, {}
            for key, (name, tensor) in found.tensors.items():
                if content(tensor) is not None:
                    by_content, trained = key in found.of_model, key in found.trained
                    slots[key] = known.get(key) or Slot(name, tensor, by_content=by_content, trained=trained)
            for slot in slots.values():
                slot.by_content &= not (slot.trained and self._watched >= WATCHED)
            _find_changes(slots.values())
            # All are allocated before the first is copied: out of memory here, the copies before stay.
            copies = [copy for slot in slots.values() if (copy := slot.due()) is not None]
            state = self._state_of_task()
            self._slots, self._taken = slots, found
            _copy(copies)
            for copy in copies:
                copy.slot.values = copy.into
            self._rng, self._state = random_state(self._device), state

    @torch.no_grad()
    def secure(self, share: float = 1.0) -> str | None:
        """Copy into host memory every large tensor that is not copied at each step, until `release`.

        `share`: of the host's free memory, what this rank may use. Returns why a copy could not be made.
        """
        with self._lock:
            slots = [slot for slot in self._slots.values() if slot.can_be_secured]
            needed = sum(slot.tensor.nbytes for slot in slots)
            if needed > share * free_on_host():
                size = format_bytes(needed)
                return f"host memory has no room for a copy of {size} of frozen parameters and buffers"
            if self._watched < WATCHED:
                trained = [slot for slot in self._slots.values() if slot.trained and slot.values is None]
                size_of_trained = sum(slot.tensor.nbytes for slot in trained)
                if size_of_trained <= min(MOST_TRAINED, share * free_on_host() - needed):
                    slots += trained
            for slot in slots:
                slot.secure()
            return None

    @torch.no_grad()
    def see_written(self) -> None:
        """Call this after the passes of a step and before its update. Trained parameters that the passes have
        written are copied at each step from now on. After two steps only torch's count of changes tells."""
        with self._lock:
            if self._watched < WATCHED:
                self._watched += 1
                for slot in self._slots.values():
                    if slot.trained and not slot.follows and slot.has_changed():
                        slot.follows, slot.values, slot.print = True, None, None

    def release(self) -> None:
        """Give up the copies that `secure` made."""
        with self._lock:
            for slot in self._slots.values():
                slot.release()

    @torch.no_grad()
    def restore(self, *, tensors_alone: bool = False) -> Restored:
        """Put all back as at the last `take`, any number of times, from any thread. It may wait for the
        device, in the stream of its caller. `tensors_alone`: for a step that is left out and not repeated,
        whose values may be NaN. Counters, generators of random numbers and the task's `state()` go on."""
        with self._lock:
            for names in self._taken.buffers.values():
                names.restore()
            for place in self._taken.places:
                if not tensors_alone:
                    place.restore()
                elif isinstance(place, Names):
                    place.restore_tensors()
            for owner, on in self._taken.switches:
                if isinstance(owner, nn.Module):
                    owner.training = on
                elif owner.requires_grad != on:
                    owner.requires_grad_(on)
            before = [slot.follows for slot in self._slots.values()]
            lost = tuple(slot.name for slot in self._slots.values() if not slot.restore())
            followed = before != [slot.follows for slot in self._slots.values()]
            if not tensors_alone:
                for generator in self._taken.generators:
                    generator.restore()
                set_rng_state(self._rng, self._device)
                self._load_state_of_task()
            return Restored(followed, lost)

    @torch.no_grad()
    def lost(self) -> list[str]:
        """Return names of large tensors whose content of the last `take` is not known any more."""
        with self._lock:
            return [slot.name for slot in self._slots.values() if slot.is_lost()]

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return names of what has changed since the last `take` and is in no checkpoint."""
        if self._task is not None:
            return []
        with self._lock:
            places = [*self._taken.places, *self._taken.generators]
            names = [name for place in places for name in place.changed()]
            for key, slot in self._slots.items():
                if key not in self._taken.in_checkpoints and slot.has_changed():
                    names.append(slot.name)
            return names

    @property
    def rng(self) -> dict[str, Any]:
        """At the last `take`; for a file, `launcher.train.rng.packed`."""
        return self._rng

    @property
    def task_state(self) -> Any:
        """What `Task.state` returned at the last `take`; None where the task has no such method."""
        return self._state

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers as at the last `take`: copies, but for large ones that have not
        changed."""
        with self._lock:
            return {
                f"{prefix}{key}": self._kept(buffer)
                for prefix, names in self._taken.buffers.items()
                for key, buffer in names.kept.items()
                if buffer is not None
            }

    def kept(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the content of a parameter without gradient as at the last `take`; others as they are."""
        with self._lock:
            return self._kept(parameter)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        slot = self._slots.get(id(tensor))
        return tensor if slot is None or slot.values is None else slot.values

    def _load_state_of_task(self) -> None:
        if self._task is None:
            return
        try:
            self._task.load_state(_copied(self._state))
        except Exception as error:
            words = f"load_state() of {type(self._task).__name__}: {type(error).__name__}: {error}"
            raise TaskError(words) from error

    def _state_of_task(self) -> Any:
        if self._task is None:
            return None
        try:
            return _copied(self._task.state())
        except Exception as error:
            raise TaskError(
                f"state() of {type(self._task).__name__}: {type(error).__name__}: {error}"
            ) from error


Mark = torch.Tensor | tuple[int, ...]
"A fingerprint of the content, or torch's count of its changes and where and how large it is."


class Copy(NamedTuple):
    slot: Slot
    tensor: torch.Tensor
    into: torch.Tensor


class Slot:
    """The content of one tensor at the last take. It keeps the tensor alive, so that it can be put back."""

    def __init__(self, name: str, holder: torch.Tensor, *, by_content: bool, trained: bool) -> None:
        """`trained`: the optimizer changes it between two takes. `by_content`: look at the content of a large
        tensor for changes. Without, at torch's count of changes, which writing through `.data` does not move:
        a data set is too large to be read at each step."""
        self.name, self.holder, self.by_content, self.trained = name, holder, by_content, trained
        self.values: torch.Tensor | None = None
        "A copy of the content: on its device if it is made at each take, on the host if it is of `secure`."
        self.print: Mark | None = None
        "`mark` of the content, where no copy is made at each take."
        self.follows = self.tensor.nbytes <= SMALL and not trained
        "A copy is made at each take."

    @property
    def tensor(self) -> torch.Tensor:
        found = content(self.holder)
        assert found is not None
        return found

    def mark(self) -> Mark:
        """Return another value when the content is another."""
        now = self.tensor
        if self.by_content:
            return fingerprint(now)
        return (-1 if now.is_inference() else now._version, now.data_ptr(), *now.shape)

    @property
    def can_be_secured(self) -> bool:
        small = self.by_content or self.tensor.nbytes <= MOST_DATA
        return self.values is None and small and not self.trained

    def due(self) -> Copy | None:
        """Return the copy that is to be made at this take."""
        if not self.follows:
            return None
        now = self.tensor
        fits = self.values is not None and _alike(self.values, now)
        return Copy(self, now, self.values if fits else torch.empty_like(now, requires_grad=False))  # type: ignore[arg-type]

    def secure(self) -> None:
        self.values = self.tensor.detach().to("cpu", copy=True)

    def release(self) -> None:
        if not self.follows:
            self.values = None

    def is_lost(self) -> bool:
        return self.values is None and self.has_changed()

    def has_changed(self) -> bool:
        if (now := content(self.holder)) is None:
            return False
        if self.values is None:
            return self.print is None or not _same(self.print, self.mark())
        same = now.shape == self.values.shape and now.dtype == self.values.dtype
        return not same or not torch.equal(_bits(now.to(self.values.device)), _bits(self.values))

    def restore(self) -> bool:
        """Return False where the content is not known."""
        if not self.has_changed():
            return True
        if self.values is None:
            return False
        self.follows = True
        now = self.tensor
        if now.shape == self.values.shape and now.dtype == self.values.dtype:
            now.copy_(self.values)
        else:  # resized in place, or given other data
            now.data = self.values.to(now.device, copy=True)
        return True


def _find_changes(slots: Iterable[Slot]) -> None:
    """Let what has changed since the last take be followed, and keep the marks of the rest."""
    unfollowed = [slot for slot in slots if not slot.follows]
    hashed = [slot for slot in unfollowed if slot.by_content and slot.tensor.device.type == "cpu"]
    marks: dict[int, Mark] = {}
    if hashed:
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            marks = dict(zip(map(id, hashed), pool.map(Slot.mark, hashed), strict=True))
    for slot in unfollowed:
        new = marks[id(slot)] if id(slot) in marks else slot.mark()
        if slot.trained or slot.print is None or _same(slot.print, new):
            slot.print = new
        else:
            slot.follows, slot.values, slot.print = True, None, None


def _same(one: Mark, other: Mark) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or (isinstance(one, tuple) and one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN equals NaN, and 0 does not equal -0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _copied(state: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), state)


def _module_of(task: Task) -> list[tuple[str, Any]]:
    module = sys.modules.get(type(task).__module__)
    return [] if module is None else [(module.__name__, vars(module))]


def _copy(copies: list[Copy]) -> None:
    """In as few kernels as there are types."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Copy]] = defaultdict(list)
    for copy in copies:
        by_type[copy.tensor.dtype, copy.tensor.device].append(copy)
    for alike in by_type.values():
        torch._foreach_copy_([copy.into for copy in alike], [copy.tensor for copy in alike])
