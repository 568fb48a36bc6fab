"""Copies of all state other than trained parameters, so that a failed step can be undone."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from launcher.spec.errors import described
from launcher.spec.quantities import format_bytes
from launcher.train.ddp import without_ddp
from launcher.train.extra_states import extra_states, modules_with_extra_state
from launcher.train.host_memory import free_on_host
from launcher.train.rng import random_state, set_rng_state
from launcher.train.state_names import left_out
from launcher.train.task import Task, TaskError
from launcher.train.undo.fingerprint import bits, fingerprint
from launcher.train.undo.objects import MOST_DATA, SMALL, content
from launcher.train.undo.state_finder import FoundState, StateFinder

HASHING_THREADS = 4
"Threads per rank that hash large tensors in host memory, at about 1.5 GB/s each."


WATCHED = 2
"First steps in which trained parameters are compared before and after the passes."
MOST_TRAINED = 2**30
"Maximum bytes of trained parameters per rank that are copied before the first step."


class Restored(NamedTuple):
    """The result of `Undo.restore`."""

    followed: bool
    "A large tensor changed for the first time. From the next `take` on, it is copied on its device."
    lost: tuple[str, ...]
    "Large tensors that changed for the first time and had no copy: they keep the changed content."


class Undo:
    """Copies of random state, buffers, parameters without gradient, the task's `state()`, and attributes.

    Create it when the model is complete and restored. `take` copies tensors of up to 1 MiB at each step.
    Larger tensors are mostly constants (a mask, a frozen weight): `take` compares their fingerprints, and
    once such a tensor has changed, copies it at each step. `secure` covers the step of the first change.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, task: Task | None = None, data: Any = None
    ) -> None:
        others = [] if task is None else [("task", task), *_module_of(task), ("data", data)]
        self._finder, self._device = StateFinder(without_ddp(model), others), device
        self._task = task if task is not None and type(task).state is not Task.state else None
        self._with_extra = modules_with_extra_state(without_ddp(model))
        self._others = tuple(f"{name}." for name, _ in others)
        self._saves_frozen = task is None or task.adapter is None
        whole = without_ddp(model)
        self._left_out = {id(p) for p in left_out(whole, whole.state_dict().keys()).values()}
        "Ids of parameters that no checkpoint holds, because `state_dict()` of the model leaves them out."
        self._slots: dict[int, Slot] = {}
        self._secured: list[Slot] = []
        "The slots of which `secure` made a copy."
        self._lock = threading.Lock()
        self._taken = FoundState()
        self.rng: dict[str, Any] = {}
        "Random state at the last `take`. Use `launcher.train.rng.packed` before writing it to a file."
        self.task_state: Any = None
        "The result of `Task.state` at the last `take`; None if the task does not define it."
        self.extra: dict[str, Any] = {}
        "The extra states of the model's modules at the last `take`, by name."
        self._watched = 0
        "Number of steps in which `find_written` compared trained parameters."
        self.take()

    @torch.no_grad()
    def take(self, *, loaded: bool = False) -> None:
        """Copy the current state, without gradients. Waits for the device if there are large tensors.
        `loaded`: the state was just loaded, so differences from before do not count as changes."""
        with self._lock:
            found = self._finder()
            earlier, slots = {} if loaded else self._slots, {}
            by_version = self._watched == WATCHED
            contents: list[tuple[Slot, torch.Tensor]] = []
            for key, (name, tensor) in found.tensors.items():
                if (now := content(tensor)) is not None:
                    slot = earlier.get(key)
                    if slot is None:
                        by_content, trained = key in found.of_model, key in found.trained
                        slot = Slot(name, tensor, now.nbytes, by_content=by_content, trained=trained)
                        if slot.is_copied and self._is_unsaved(key, slot, found):
                            slot.first_fingerprint = fingerprint(now)
                    if by_version and slot.trained:
                        slot.by_content = False
                    slots[key] = slot
                    contents.append((slot, now))
            _find_changes(contents)
            # Allocate all before copying any: after an OOM here the old copies are still valid.
            copies = [slot.planned_copy(now) for slot, now in contents if slot.is_copied]
            state, extra = self._state_of_task(), _copied(extra_states(self._with_extra))
            self._slots, self._taken = slots, found
            _copy(copies)
            for copy in copies:
                copy.slot.values = copy.into
            self.rng, self.task_state, self.extra = random_state(self._device), state, extra

    @torch.no_grad()
    def secure(self, share: float = 1.0) -> str | None:
        """Copy every large tensor that `take` does not copy into host memory; `release` drops the copies.

        `share` is the fraction of free host memory that this rank may use. Return why no copy was made, or
        None.
        """
        with self._lock:
            slots = [slot for slot in self._slots.values() if slot.can_be_secured]
            needed = sum(slot.tensor.nbytes for slot in slots)
            if needed > share * free_on_host():
                size = format_bytes(needed)
                return f"not enough host memory for a copy of frozen parameters and buffers ({size})"
            if self._watched < WATCHED:
                trained = [slot for slot in self._slots.values() if slot.trained and slot.values is None]
                size_of_trained = sum(slot.tensor.nbytes for slot in trained)
                if size_of_trained <= min(MOST_TRAINED, share * free_on_host() - needed):
                    slots += trained
            self._secured += slots
            for slot in slots:
                slot.secure()
            return None

    @torch.no_grad()
    def find_written(self) -> None:
        """Find trained parameters that the passes have written; they are copied at each step from now on.

        Call this between the passes and the update. After two steps only torch's version counter is compared.
        """
        with self._lock:
            if self._watched < WATCHED:
                self._watched += 1
                for slot in self._slots.values():
                    if slot.trained and not slot.is_copied and slot.has_changed():
                        slot.is_copied, slot.values, slot.last_mark = True, None, None

    def follow(self, is_written: Callable[[torch.Tensor], bool]) -> None:
        """Copy these trained parameters at each step from the next `take` on: a pass writes them, even if it
        takes the change back."""
        with self._lock:
            for slot in self._slots.values():
                if slot.trained and is_written(slot.holder):
                    slot.is_copied = True

    def release(self) -> None:
        """Drop the copies made by `secure`."""
        with self._lock:
            for slot in self._secured:
                slot.release()
            self._secured = []

    @torch.no_grad()
    def restore(self, *, skipped: bool = False) -> Restored:
        """Restore the state of the last `take`. May be repeated, from any thread, and may wait for the device
        in the caller's stream. `skipped` is for a step that is skipped, whose values may be NaN: numbers,
        modes and hooks of the task and its data, random number generators and the task's `state()` stay as
        they are now."""
        with self._lock:
            for entries in self._taken.buffers.values():
                entries.restore()
            for at, place in enumerate(self._taken.places):
                if skipped and at >= self._taken.places_of_model:
                    place.restore_state()
                else:
                    place.restore()
            for array in self._taken.arrays:
                array.restore()
            for switches in self._taken.switches.values():
                switches.restore_state() if skipped else switches.restore()
            before = [slot.is_copied for slot in self._slots.values()]
            lost = tuple(slot.name for slot in self._slots.values() if not slot.restore())
            followed = before != [slot.is_copied for slot in self._slots.values()]
            if not skipped:
                for generator in self._taken.generators:
                    generator.restore()
                set_rng_state(self.rng, self._device)
                self._load_state_of_task()
            return Restored(followed, lost)

    @torch.no_grad()
    def lost(self) -> list[str]:
        """Return the names of large tensors whose content at the last `take` is lost."""
        with self._lock:
            return [slot.name for slot in self._slots.values() if slot.is_lost()]

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the names of state that has changed since the last `take` and is in no checkpoint."""
        if self._task is not None:
            return []
        with self._lock:
            places = [*self._taken.places, *self._taken.arrays, *self._taken.generators]
            names = [name for place in places for name in place.changed(numbers=True)]
            names = [name for name in names if ".__" not in name]  # Python's own, such as what has warned
            for key, slot in self._slots.items():
                if key not in self._taken.in_checkpoints and slot.has_changed():
                    names.append(slot.name)
            return [name for name in names if not self._is_extra(name)]

    def _is_extra(self, name: str) -> bool:
        """Return whether an attribute belongs to a module with an extra state, which checkpoints hold."""
        owners = tuple(f"{module}." if module else "" for module in self._with_extra)
        return name.startswith(owners) and not name.startswith(self._others)

    @torch.no_grad()
    def rewritten(self) -> list[str]:
        """Return the names of the frozen parameters that no checkpoint holds, because of an adapter or of the
        model's `state_dict()`, and that have changed since the first `take` of this attempt."""
        with self._lock:
            return [
                slot.name
                for key, slot in self._slots.items()
                if self._is_unsaved(key, slot, self._taken) and slot.is_rewritten()
            ]

    def _is_unsaved(self, key: int, slot: Slot, found: FoundState) -> bool:
        frozen = isinstance(slot.holder, nn.Parameter) and not slot.trained
        unsaved = not self._saves_frozen or key in self._left_out
        return frozen and unsaved and key in found.in_checkpoints

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers as at the last `take`: copies, except of large unchanged ones."""
        with self._lock:
            return {
                f"{prefix}{key}": self._kept(buffer)
                for prefix, entries in self._taken.buffers.items()
                for key, buffer in entries.kept.items()
                if buffer is not None
            }

    def kept(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter without gradient as at the last `take`; other parameters unchanged."""
        with self._lock:
            return self._kept(parameter)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        slot = self._slots.get(id(tensor))
        return tensor if slot is None or slot.values is None else slot.values

    def _load_state_of_task(self) -> None:
        if self._task is None:
            return
        try:
            self._task.load_state(_copied(self.task_state))
        except Exception as error:
            words = f"load_state() of {type(self._task).__name__}: {described(error)}"
            raise TaskError(words) from error

    def _state_of_task(self) -> Any:
        if self._task is None:
            return None
        try:
            return _copied(self._task.state())
        except Exception as error:
            raise TaskError(f"state() of {type(self._task).__name__}: {described(error)}") from error


Mark = torch.Tensor | tuple[int, ...]
"A fingerprint of the content, or torch's version counter with address and shape."


class Copy(NamedTuple):
    slot: Slot
    tensor: torch.Tensor
    into: torch.Tensor


class Slot:
    """The content of one tensor at the last `take`. Keeps the tensor alive, so that it can be restored."""

    def __init__(
        self, name: str, holder: torch.Tensor, size: int, *, by_content: bool, trained: bool
    ) -> None:
        """`size`: bytes of the content. `trained`: the optimizer changes the tensor between two takes.

        `by_content`: compare the content of a large tensor. Otherwise compare torch's version counter, which
        misses writes through `.data`: a data set is too large to be read at each step.
        """
        self.name, self.holder, self.by_content, self.trained = name, holder, by_content, trained
        self.values: torch.Tensor | None = None
        "Copy of the content: on the tensor's device if made by `take`, on the host if made by `secure`."
        self.last_mark: Mark | None = None
        "`mark` of the content if `take` makes no copy."
        self.is_copied = size <= SMALL and not trained
        "Each `take` makes a copy."
        self.first_fingerprint: torch.Tensor | None = None
        "Fingerprint of the first content, if the tensor is small and no checkpoint will hold it."

    @property
    def tensor(self) -> torch.Tensor:
        tensor = content(self.holder)
        assert tensor is not None
        return tensor

    def mark(self, now: torch.Tensor) -> Mark:
        """Return a value that changes with the content `now`."""
        if self.by_content:
            return fingerprint(now)
        return (-1 if now.is_inference() else now._version, now.data_ptr(), *now.shape)

    @property
    def can_be_secured(self) -> bool:
        small = self.by_content or self.tensor.nbytes <= MOST_DATA
        return self.values is None and small and not self.trained

    def planned_copy(self, now: torch.Tensor) -> Copy:
        """Return the copy of the content `now` to make in this `take`."""
        fits = self.values is not None and _same_form(self.values, now)
        return Copy(self, now, self.values if fits else torch.empty_like(now, requires_grad=False))  # type: ignore[arg-type]

    def secure(self) -> None:
        self.values = self.tensor.detach().to("cpu", copy=True)

    def release(self) -> None:
        if not self.is_copied:
            self.values = None

    def is_lost(self) -> bool:
        return self.values is None and self.has_changed()

    def is_rewritten(self) -> bool:
        """Return whether the content has changed since the first `take`: `take` copies a large tensor from
        its first change on."""
        if self.first_fingerprint is None:
            return self.is_copied
        return (now := content(self.holder)) is None or not torch.equal(
            self.first_fingerprint, fingerprint(now)
        )

    def has_changed(self) -> bool:
        if (now := content(self.holder)) is None:
            return False
        if self.values is None:
            return self.last_mark is None or not _same(self.last_mark, self.mark(now))
        same = now.shape == self.values.shape and now.dtype == self.values.dtype
        return not same or not torch.equal(bits(now.to(self.values.device)), bits(self.values))

    def restore(self) -> bool:
        """Restore the content. Return False if no copy of it exists."""
        if not self.has_changed():
            return True
        if self.values is None:
            return False
        self.is_copied = True
        now = self.tensor
        if now.shape == self.values.shape and now.dtype == self.values.dtype:
            with torch.inference_mode() if now.is_inference() else nullcontext():
                _unexpanded(now, now).copy_(_unexpanded(self.values, now))
        else:  # the tensor was resized in place, or `.data` was replaced
            now.data = self.values.to(now.device, copy=True)
        return True


def _find_changes(contents: Iterable[tuple[Slot, torch.Tensor]]) -> None:
    """Let `take` copy the tensors that have changed since the last time; update the marks of the others.

    `contents`: each slot with its content.
    """
    unfollowed = [(slot, now) for slot, now in contents if not slot.is_copied]
    hashed = [(slot, now) for slot, now in unfollowed if slot.by_content and now.device.type == "cpu"]
    marks: dict[int, Mark] = {}
    if hashed:
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            results = pool.map(Slot.mark, *zip(*hashed, strict=True))
            marks = {id(slot): mark for (slot, _), mark in zip(hashed, results, strict=True)}
    for slot, now in unfollowed:
        new = marks[id(slot)] if id(slot) in marks else slot.mark(now)
        if slot.trained or slot.last_mark is None or _same(slot.last_mark, new):
            slot.last_mark = new
        else:
            slot.is_copied, slot.values, slot.last_mark = True, None, None


def _same(one: Mark, other: Mark) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or (isinstance(one, tuple) and one == other)


def _unexpanded(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one element of each dimension in which `like` is expanded: its elements share their memory, so
    they cannot be written."""
    for dimension, stride in enumerate(like.stride()):
        if stride == 0 and like.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _copied(state: Any) -> Any:
    return tree_map(_copied_leaf, state)


def _copied_leaf(leaf: Any) -> Any:
    """Return a copy, also of a container that is a leaf of torch's trees, such as a set or a Counter."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else deepcopy(leaf)


def _module_of(task: Task) -> list[tuple[str, Any]]:
    module = sys.modules.get(type(task).__module__)
    return [] if module is None else [(module.__name__, vars(module))]


def _copy(copies: list[Copy]) -> None:
    """Make the copies, in one kernel per dtype and device."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Copy]] = defaultdict(list)
    for copy in copies:
        by_type[copy.tensor.dtype, copy.tensor.device].append(copy)
    for alike in by_type.values():
        torch._foreach_copy_([copy.into for copy in alike], [copy.tensor for copy in alike])
