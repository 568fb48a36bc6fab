"""Whether a pass that failed can be repeated in this process: tried out, with this torch on this device."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from launcher.train.optimizers.state import local
from launcher.train.rank import Rank
from launcher.train.recovery.cleanup import clean, partial_sums
from launcher.train.recovery.collectives import AllGather, Collectives, ReduceScatter
from launcher.train.sharding import fully_sharded


def self_test(rank: Rank, mesh: DeviceMesh) -> str | None:
    """Cut a small model's step short at each of its parts, clean, repeat, compare gradients bit for bit.

    The model is sharded as the recipe says. No collective, no random number. Returns why repeating is not
    safe, None when it is.
    """
    try:
        return _tried(rank, mesh)
    except Exception as error:  # of any kind: what FSDP2 keeps to itself may be anything in another torch
        return f"cleaning up after a failure failed: {type(error).__name__}: {error}"


def _tried(rank: Rank, mesh: DeviceMesh) -> str | None:
    fuse = _Fuse()
    model: Any = _Small(2 * mesh.size(mesh.ndim - 1), fuse)
    fully_sharded(model, list(model.blocks), rank, mesh)
    collectives = Collectives(model, rank.device)
    for unit in collectives.units:
        unit.set_custom_all_gather(_FusedGather(collectives, unit, fuse))  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_FusedReduce(collectives, unit, fuse))  # type: ignore[arg-type]
    sample = torch.linspace(-1, 1, 3 * WIDTH, device=rank.device).view(3, WIDTH)
    with collectives.local():
        expected = _gradients(model, sample, fuse)
        parts = fuse.passed
        for part in range(1, parts + 1):
            clean(model)
            fuse.burns_at = fuse.passed + part
            with suppress(torch.OutOfMemoryError):
                _gradients(model, sample, fuse)
            clean(model)
            found = _gradients(model, sample, fuse)
            if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
                return f"cut short at part {part} of {parts} and repeated, a step had other gradients"
    return None


def _gradients(model: Any, sample: torch.Tensor, fuse: _Fuse) -> list[torch.Tensor]:
    """Two micro-batches, whose gradients meet after the second."""
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        loss = model(sample).square().sum()
        fuse()
        loss.backward()
    met = [local(p.grad) for p in model.parameters() if p.grad is not None]
    return [gradient.clone() for gradient in (*met, *partial_sums(model))]


WIDTH = 4


class _Fuse:
    """Raises when it is passed for the `burns_at`-th time."""

    def __init__(self) -> None:
        self.passed = self.burns_at = 0

    def __call__(self, *_: Any) -> None:
        self.passed += 1
        if self.passed == self.burns_at:
            raise torch.OutOfMemoryError("a trial")


class _Block(nn.Module):
    def __init__(self, rows: int, fuse: _Fuse) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH))
        self.down = nn.Parameter(torch.linspace(1, -0.5, rows * WIDTH).view(rows, WIDTH))
        self.fuse = fuse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.up.T)
        # One weight has its gradient then, the other has not.
        hidden.register_hook(self.fuse)  # type: ignore[no-untyped-call]
        self.fuse()
        return x + hidden @ self.down


class _Small(nn.Module):
    def __init__(self, rows: int, fuse: _Fuse) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(rows, fuse) for _ in range(2))
        self.last = _Block(rows, fuse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        x.register_hook(self.last.fuse)  # type: ignore[no-untyped-call]
        return x


class _FusedGather(AllGather):
    def __init__(self, collectives: Collectives, unit: nn.Module, fuse: _Fuse) -> None:
        super().__init__(collectives, unit)
        self.fuse = fuse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.fuse()
        work = super().__call__(*args, **kwargs)
        self.fuse()
        return work


class _FusedReduce(_FusedGather, ReduceScatter):
    pass
