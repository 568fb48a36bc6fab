"""What each rank has for itself and no sharding shares: random state and module buffers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launcher.train.rng import rng_state, set_rng_state


def own_name(rank: int) -> str:
    return f"rank-{rank:03d}.pt"


class OwnState:
    """Of one rank. Create it when the model is whole and before it trains.

    BatchNorm's statistics come from the rank's own micro-batches, so each rank's are saved. A non-persistent
    buffer is saved when training has changed it. The others are constants that the model's code computes (a
    mask, rotary angles): they follow the code, not the checkpoint.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.device = device
        self.persistent = self.model.state_dict().keys()
        self._made = {
            name: _on_host(buffer)
            for name, buffer in self.model.named_buffers()
            if name not in self.persistent
        }

    def pack(self) -> bytes:
        """A copy: what happens to the buffers later does not change it."""
        content = {"rng": rng_state(self.device), "buffers": self._buffers()}
        file = io.BytesIO()
        torch.save(content, file)
        return file.getvalue()

    def shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """The model's state without its buffers, which another number of ranks takes from rank 0 alone."""
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        return {name: value for name, value in state.items() if name not in buffers}

    def restore(self, path: Path, *, rng: bool) -> None:
        """From a rank's file. Raises OSError and what torch.load raises."""
        self.load(torch.load(path, weights_only=True, map_location="cpu"), rng=rng)

    @torch.no_grad()
    def load(self, content: dict[str, Any], *, rng: bool) -> None:
        """`content`: "rng", of launcher.train.rng, and "buffers" by their names."""
        here = dict(self.model.named_buffers())
        for name, value in content["buffers"].items():
            if name in here and here[name].shape == value.shape and here[name].dtype == value.dtype:
                here[name].copy_(value)
            else:  # a buffer that training has replaced, such as a cache that grows
                module, _, attribute = name.rpartition(".")
                setattr(self.model.get_submodule(module), attribute, value.to(self.device))
        if rng:
            set_rng_state(content["rng"], self.device)

    def _buffers(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, buffer in self.model.named_buffers():
            value, made = _on_host(buffer), self._made.get(name)
            if made is None or made.dtype != value.dtype or not torch.equal(made, value):
                found[name] = value
        return found


def _on_host(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().to("cpu", copy=True)
