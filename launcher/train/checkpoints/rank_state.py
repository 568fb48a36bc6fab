"""What each rank has for itself and no sharding shares: random state, buffers, the state of the task."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launcher.train.rng import rng_state, set_rng_state
from launcher.train.task import Task, TaskError


def rank_file_name(rank: int) -> str:
    return f"rank-{rank:03d}.pt"


class RankState:
    """Of one rank. Create it when the model is whole and before it trains.

    BatchNorm's statistics come from the rank's own micro-batches, so each rank's are saved. A non-persistent
    buffer is saved when training has changed it. The others are constants that the model's code computes (a
    mask, rotary angles): they follow the code, not the checkpoint.
    """

    def __init__(self, model: nn.Module, device: torch.device, task: Task | None = None) -> None:
        """Raises TaskError for a state of the task that no file can hold."""
        self.task = task
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.device = device
        self.persistent = self.model.state_dict().keys()
        self._made = {
            name: _on_host(buffer)
            for name, buffer in self.model.named_buffers()
            if name not in self.persistent
        }
        self._check_task()

    def _check_task(self) -> None:
        if self.task is None or (state := self.task.state()) is None:
            return
        file = io.BytesIO()
        try:
            torch.save(state, file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except Exception as error:  # whatever pickling raises
            name, kind = next(_not_storable(state, "state()"), ("state()", type(state)))
            raise TaskError(
                f"state() of {type(self.task).__name__} returns what a checkpoint cannot hold: {name} is of "
                f"type {kind.__module__}.{kind.__qualname__}. Return tensors, numbers, strings, and lists, "
                "tuples and dictionaries of them"
            ) from error

    def pack(self) -> bytes:
        """A copy: what happens to the buffers later does not change it."""
        content = {
            "rng": rng_state(self.device),
            "buffers": self._buffers(),
            "not_persistent": not_persistent(self.model),
        }
        if self.task is not None and (state := self.task.state()) is not None:
            content["task"] = state
        file = io.BytesIO()
        torch.save(content, file)
        return file.getvalue()

    def shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """The model's state without its buffers, which another number of ranks takes from rank 0 alone."""
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        return {name: value for name, value in state.items() if name not in buffers}

    def restore(self, path: Path, *, rng: bool) -> None:
        """From a rank's file. Raises OSError and what torch.load raises: UnpicklingError for an object."""
        self.load(torch.load(path, weights_only=True, map_location="cpu"), rng=rng)

    @torch.no_grad()
    def load(self, content: dict[str, Any], *, rng: bool) -> None:
        """`content`: "rng", of launcher.train.rng, "buffers" by their names, "task" where it has a state."""
        here = dict(self.model.named_buffers(remove_duplicate=False))  # one may stand in two modules
        for name, value in content["buffers"].items():
            if name in here and here[name].shape == value.shape and here[name].dtype == value.dtype:
                here[name].copy_(value)
            else:  # a buffer that training has replaced, such as a cache that grows, or registered
                persistent = name not in content.get("not_persistent", ())
                _put_buffer(self.model, name, value.to(self.device), persistent=persistent)
        if self.task is not None and "task" in content:
            self.task.load_state(content["task"])
        if rng:
            set_rng_state(content["rng"], self.device)

    def _buffers(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, buffer in self.model.named_buffers():
            value, made = _on_host(buffer), self._made.get(name)
            if made is None or made.dtype != value.dtype or not torch.equal(made, value):
                found[name] = value
        return found


def not_persistent(model: nn.Module) -> list[str]:
    """Return the names of the buffers that no state dict holds."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
    ]


def _put_buffer(model: nn.Module, name: str, value: torch.Tensor, *, persistent: bool) -> None:
    """Replace a buffer, or register one that the model makes later, such as in its first forward pass."""
    prefix, _, attribute = name.rpartition(".")
    module = model.get_submodule(prefix)
    if attribute in module._buffers:
        setattr(module, attribute, value)
        return
    if hasattr(module, attribute):
        delattr(module, attribute)
    module.register_buffer(attribute, value, persistent=persistent)


def _not_storable(state: Any, name: str) -> Iterator[tuple[str, type]]:
    """Where in a state there is what is neither a plain value nor a plain container."""
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
