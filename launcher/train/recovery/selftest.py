"""Test whether this torch on this device can repeat a failed pass in the same process."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from launcher.train.local_shards import local
from launcher.train.loss import chunked_cross_entropy
from launcher.train.rank import Rank
from launcher.train.recovery.collectives import Collectives
from launcher.train.sharding.cleanup import clean, partial_sums
from launcher.train.sharding.sharding import fully_sharded


def self_test(rank: Rank, mesh: DeviceMesh) -> str | None:
    """Fail a small model's step at every point, clean up, repeat it and compare gradients bit for bit.

    The model is sharded as in the recipe. The ranks of a node, which have the same torch, share the points
    among them. Issues no collective and draws no random number. Returns why repeating is not safe, or None if
    this rank has found no reason.
    """
    try:
        return _test(rank, mesh)
    except Exception as error:  # any type: FSDP2's private attributes may differ in another torch
        return f"cleaning up after a failure failed: {type(error).__name__}: {error}"


def _test(rank: Rank, mesh: DeviceMesh) -> str | None:
    fault = _Fault()
    model: Any = _Small(2 * mesh.size(mesh.ndim - 1), fault)
    fully_sharded(model, list(model.blocks), [model.tokens, model.head], rank, mesh)
    collectives = _FaultyCollectives(model, rank.device, fault)
    sample = torch.arange(PARTS + 1, device=rank.device)
    with collectives.local():
        expected = _gradients(model, sample, fault)
        parts = fault.passed
        for part in range(1 + rank.local, parts + 1, rank.per_node):
            clean(model)
            fault.fails_at = fault.passed + part
            with suppress(torch.OutOfMemoryError):
                _gradients(model, sample, fault)
            clean(model)
            repeated = _gradients(model, sample, fault)
            if len(repeated) != len(expected) or not all(map(torch.equal, repeated, expected)):
                return f"a step that failed at point {part} of {parts} and was repeated had other gradients"
    return None


def _gradients(model: Any, sample: torch.Tensor, fault: _Fault) -> list[torch.Tensor]:
    """Run two micro-batches and return the gradients, which are reduced after the second."""
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        loss = model(sample)
        fault()
        loss.backward()
    reduced = [local(p.grad) for p in model.parameters() if p.grad is not None]
    return [gradient.clone() for gradient in (*reduced, *partial_sums(model))]


WIDTH, PARTS = 4, 2


class _Fault:
    """Raises OutOfMemoryError at its call number `fails_at`."""

    def __init__(self) -> None:
        self.passed = self.fails_at = 0

    def __call__(self, *_: Any) -> None:
        self.passed += 1
        if self.passed == self.fails_at:
            raise torch.OutOfMemoryError("a trial")


class _Block(nn.Module):
    def __init__(self, rows: int, fault: _Fault) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH))
        self.down = nn.Parameter(torch.linspace(1, -0.5, rows * WIDTH).view(rows, WIDTH))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.up.T)
        # At this point one weight has its gradient and the other does not.
        hidden.register_hook(self.fault)  # type: ignore[no-untyped-call]
        self.fault()
        return x + hidden @ self.down


class _Small(nn.Module):
    """Has each kind of unit: an embedding, blocks, a head with the loss in parts, and the root."""

    def __init__(self, rows: int, fault: _Fault) -> None:
        super().__init__()
        table = torch.linspace(-1, 1, (rows + PARTS) * WIDTH).view(-1, WIDTH)
        self.tokens = nn.Embedding(len(table), WIDTH, _weight=table.clone())
        self.blocks = nn.ModuleList(_Block(rows, fault) for _ in range(2))
        self.last = _Block(rows, fault)
        self.head = _Head(table, fault)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        x.register_hook(self.last.fault)
        return chunked_cross_entropy(x, self.head, tokens, PARTS)[0]


class _Head(nn.Module):
    def __init__(self, table: torch.Tensor, fault: _Fault) -> None:
        super().__init__()
        self.weight, self.fault = nn.Parameter(table.flip(0)), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fault()  # in the backward pass, too, which recomputes each part of the loss
        return x @ self.weight.T


class _FaultyCollectives(Collectives):
    """May fail before and after each collective."""

    def __init__(self, model: Any, device: torch.device, fault: _Fault) -> None:
        super().__init__(model, device)
        self.fault = fault

    def gather(self, *args: Any) -> Any:
        self.fault()
        work = super().gather(*args)
        self.fault()
        return work

    def reduce(self, *args: Any) -> Any:
        self.fault()
        work = super().reduce(*args)
        self.fault()
        return work
