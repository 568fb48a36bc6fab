"""State that each rank saves for itself: random state, buffers, extra states, and the state of the task."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from launcher.train.ddp import without_ddp
from launcher.train.extra_states import extra_states, load_extra_states, modules_with_extra_state
from launcher.train.pipeline.cut import is_elsewhere
from launcher.train.rng import packed, random_state, set_rng_state
from launcher.train.state_names import EXTRA, is_extra_state, state_names
from launcher.train.task import Task, TaskError


def rank_file_name(rank: int) -> str:
    return f"rank-{rank:03d}.pt"


class RankState:
    """State of one rank. Create it when the model is complete and before it trains.

    BatchNorm's statistics come from the rank's own micro-batches, so each rank saves its own. A
    non-persistent buffer is saved if training has changed it. Other such buffers are constants computed by
    the model's code (a mask, rotary angles) and are not saved.
    """

    def __init__(self, model: nn.Module, device: torch.device, task: Task | None = None) -> None:
        """Raises TaskError if the task's state, or the model's, cannot be saved to a file."""
        self.task = task
        self.model = without_ddp(model)
        self.device = device
        self.persistent = state_names(self.model)
        adapted = task is not None and task.adapter is not None
        self._initial = {
            name: _on_host(buffer)
            for name, buffer in self.model.named_buffers()
            if adapted or name not in self.persistent
        }
        self._with_extra = modules_with_extra_state(self.model)
        self._shapes = {name: [*tensor.shape] for name, tensor in self._own_tensors()}
        for name, state in extra_states(self._with_extra).items():
            owner = f"{name} of the model" if name else "the model"
            _check_storable(state, f"get_extra_state() of {owner}", "get_extra_state()")
        if task is not None and (state := task.state()) is not None:
            _check_storable(state, f"state() of {type(task).__name__}", "state()")

    def _check_parts(self, state: Any, *, same_mesh: bool) -> None:
        """Raise TaskError if the state has parts of weights that this attempt does not share between ranks
        in the same way."""
        leaves, _ = tree_flatten_with_path(state)
        parts = [path for path, value in leaves if isinstance(value, DTensor)]
        if parts and not (same_mesh and any(isinstance(p, DTensor) for p in self.model.parameters())):
            raise TaskError(
                f"{keystr(parts[0])} of what state() of {type(self.task).__name__} returned is the part of a "
                "weight that one rank had, which only as many ranks with the same sharding can use: resume "
                "with those. To change them, leave such parts out of state(), or keep whole tensors "
                "(`full_tensor()`)"
            )

    def pack(self) -> bytes:
        """Return the content of the rank's file, a copy that later changes of buffers do not affect."""
        content = {
            "rng": packed(random_state(self.device)),
            "buffers": self._buffers(),
            "not_persistent": not_persistent(self.model),
        }
        if self._with_extra:
            content["extra"] = extra_states(self._with_extra)
        if self.task is not None and (state := self.task.state()) is not None:
            content["task"] = state
        file = io.BytesIO()
        torch.save(content, file)
        return file.getvalue()

    def shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the model's `state` without its buffers and extra states. If the number of ranks changes,
        every rank takes those of rank 0."""
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        own = {name for name in state if name in buffers or is_extra_state(name)}
        return {name: value for name, value in state.items() if name not in own}

    def restore(self, path: Path, *, rng: bool) -> None:
        """Load a rank's file. Raises OSError, TaskError and the exceptions of torch.load, such as
        UnpicklingError."""
        self.load(torch.load(path, weights_only=True, map_location="cpu"), rng=rng)

    @torch.no_grad()
    def load(self, content: dict[str, Any], *, rng: bool) -> None:
        """Load the content of a rank's file: "rng" as in launcher.train.rng, "buffers" by name, "extra" by
        module if there are extra states (earlier launchers did not write them), and "task" if the task has a
        state. `rng`: the mesh is that of the checkpoint, so each rank goes on drawing. Raises
        TaskError for a state of another mesh."""
        here = dict(self.model.named_buffers(remove_duplicate=False))  # two modules may share a buffer
        for name, value in content["buffers"].items():
            if is_elsewhere(self.model, name):
                continue
            if name in here and here[name].shape == value.shape and here[name].dtype == value.dtype:
                here[name].copy_(value)
            else:  # training has replaced the buffer, such as a cache that grows, or registered it
                persistent = name not in content.get("not_persistent", ())
                _put_buffer(self.model, name, value.to(self.device), persistent=persistent)
        load_extra_states(self.model, content.get("extra", {}))
        if self.task is not None and "task" in content:
            self._check_parts(content["task"], same_mesh=rng)
            self.task.load_state(content["task"])
        if rng:
            set_rng_state(content["rng"], self.device)

    def reshaped(self) -> dict[str, list[int]]:
        """Return the first shape of each persistent buffer or extra state that has another one now."""
        return {
            name: self._shapes[name]
            for name, tensor in self._own_tensors()
            if self._shapes.get(name, [*tensor.shape]) != [*tensor.shape]
        }

    def _own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers and extra states that `state_dict()` returns, under each of their names."""
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if name in self.persistent:
                yield name, buffer
        for name, state in extra_states(self._with_extra).items():
            if isinstance(state, torch.Tensor):
                yield f"{name}.{EXTRA}" if name else EXTRA, state

    def changed(self) -> list[str]:
        """Return the names of the persistent buffers of a model with an adapter that training has changed."""
        buffers = self.model.named_buffers()
        return [
            name for name, buffer in buffers if name in self.persistent and self._has_changed(name, buffer)
        ]

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            name: _on_host(buffer)
            for name, buffer in self.model.named_buffers()
            if name in self.persistent or self._has_changed(name, buffer)
        }

    def _has_changed(self, name: str, buffer: torch.Tensor) -> bool:
        value, initial = _on_host(buffer), self._initial.get(name)
        return initial is None or initial.dtype != value.dtype or not torch.equal(initial, value)


def not_persistent(model: nn.Module) -> list[str]:
    """Return the names of non-persistent buffers."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in without_ddp(model).named_modules()
        for name in sorted(module._non_persistent_buffers_set)
    ]


def _put_buffer(model: nn.Module, name: str, value: torch.Tensor, *, persistent: bool) -> None:
    """Replace a buffer, or register one that the model creates later, such as in its first forward pass."""
    prefix, _, attribute = name.rpartition(".")
    module = model.get_submodule(prefix)
    if attribute in module._buffers:
        setattr(module, attribute, value)
        return
    if hasattr(module, attribute):
        delattr(module, attribute)
    module.register_buffer(attribute, value, persistent=persistent)


def _check_storable(state: Any, what: str, call: str) -> None:
    """Raise TaskError if a checkpoint cannot hold the state, which `what` returned by `call`."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:  # pickling may raise any type
        name, kind = next(_not_storable(state, call), (call, type(state)))
        raise TaskError(
            f"{what} returns a value that no checkpoint can hold: {name} is of type "
            f"{kind.__module__}.{kind.__qualname__}. Return tensors, numbers, strings, and lists, tuples and "
            "dictionaries of them"
        ) from error


def _not_storable(state: Any, name: str) -> Iterator[tuple[str, type]]:
    """Yield the path and type of each value in a state that is neither plain nor a plain container."""
    kind = type(state)
    if kind is dict:
        for key, value in state.items():
            yield from _not_storable(value, f"{name}[{key!r}]")
    elif kind in (list, tuple, set):
        for at, value in enumerate(state):
            yield from _not_storable(value, f"{name}[{at}]")
    elif kind not in (torch.Tensor, int, float, complex, bool, str, bytes, type(None)):
        yield name, kind


def _on_host(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().to("cpu", copy=True)
