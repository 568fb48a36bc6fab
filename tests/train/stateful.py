"""A task with a state of its own: a curriculum that its loss follows, and a generator that it draws from."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ragged import Ragged


class Keeping(Ragged):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.mean, self.generator = torch.zeros(()), torch.Generator().manual_seed(7)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = super().loss(model, batch)
        noise = torch.rand((), generator=self.generator)
        if model.training:
            self.mean = 0.9 * self.mean + 0.1 * total.detach() / weight
        return total * (1 + noise + self.mean), weight

    def state(self) -> Any:
        return {"mean": self.mean, "generator": self.generator.get_state()}

    def load_state(self, state: Any) -> None:
        self.mean = state["mean"]
        self.generator.set_state(state["generator"])


class Forgetful(Keeping):
    """The same without a word about its state, and with a counter that later losses follow."""

    seen = 0

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += model.training
        total, weight = super().loss(model, batch)
        return total * (2 if self.seen > 100 else 1), weight

    state = Ragged.state
    load_state = Ragged.load_state


class Full(Keeping):
    """Its state does not fit into memory once, directly after the third update."""

    def state(self) -> Any:
        if self.current_step == 3 and os.environ["LAUNCHER_ATTEMPT"] == "0":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().state()


class Averaging(Ragged):
    """Keeps a moving average of each weight, of which a rank has a part under FSDP."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.means: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def average(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.means.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        self.average(model)
        return super().loss(model, batch)

    def state(self) -> Any:
        return {"means": self.means}

    def load_state(self, state: Any) -> None:
        self.means = state["means"]


class Unsaved(Keeping):
    def state(self) -> Any:
        return {"generator": self.generator}


class Teaching(Ragged):
    """Keeps a frozen part of the model, which it changes in each training loss."""

    def model(self) -> nn.Module:
        model = super().model()
        model.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.teacher = [*model.teacher.parameters()]
        return model

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if model.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.teacher[0].add_(1)
        return super().loss(model, batch)


class Halving(Ragged):
    """Computes with half of each weight, and changes it back."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        for p in model.parameters():
            p.data.mul_(0.5)
        result = super().loss(model, batch)
        for p in model.parameters():
            p.data.mul_(2)
        return result


@torch.compile(backend="eager")
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if torch.compiler.is_compiling() else x * torch.nan


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sine(x)


class Compiled(Ragged):
    """Compiles a function of its blocks itself, whose result is NaN if it does not run compiled."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        for at, layer in enumerate(model.layers):
            model.layers[at] = nn.Sequential(layer, Sine())
        return model
