"""Models that a bound must not take for a stack of numbered blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from launcher.train import Task

WIDTH = 1024


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.outer(functional.relu(self.inner(x)))
        return result


class Odd(Task):
    def data(self, split: str) -> Any:
        return [torch.zeros(64, WIDTH)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch).float().square().sum(), len(batch)


class Named(Odd):
    """The names of its blocks have no number."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(Block(WIDTH, 8 * WIDTH) for _ in range(2)), NamedBlocks())

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model[2].children())  # type: ignore[index]


class NamedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = Block(WIDTH, 8 * WIDTH), Block(WIDTH, 8 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.up(self.down(x))
        return result


class Uncalled(Block):
    """Uses the weights of its layers without a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(functional.linear(x, self.inner.weight))
        return functional.linear(hidden, self.outer.weight)


class UncalledLayers(Odd):
    """FSDP can gather its blocks, but not their layers."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(Uncalled(WIDTH, 32 * WIDTH) for _ in range(4)))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())


class HeavyUnused(Odd):
    """Most of its parameters are in a block that the loss does not use."""

    def model(self) -> nn.Module:
        return FirstOnly(Block(WIDTH, WIDTH), Block(WIDTH, 16 * WIDTH))


class FirstOnly(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self[0](x)
        return result


class HeavyHead(Odd):
    """Its head is numbered, is no block, and has most of the work."""

    def model(self) -> nn.Module:
        return HeavyHeaded()


class HeavyHeaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH), nn.ReLU(), nn.Linear(16 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


class Differences(Odd):
    """Its blocks compute much from the differences between neighbouring samples: as one each time less."""

    couples_samples = True

    def model(self) -> nn.Module:
        return Stack(Differing, 8)

    def data(self, split: str) -> Any:
        return [torch.zeros(64, WIDTH)] * 64


class Differing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = (x[1:] - x[:-1]).sin().square().exp()
        return super().forward(x) + functional.pad(apart.cos(), (0, 0, 0, 0, 1, 0))


class Looping(Odd):
    """Takes one sample at a time, so that the number of its allocations depends on the micro-batch."""

    def model(self) -> nn.Module:
        return Loop(Block(WIDTH, 8), WIDTH, 8)


class Loop(Block):
    def __init__(self, block: Block, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.blocks = nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(Loop, self).forward(self.blocks[0](one)) for one in x])


class Frozen(Odd):
    """Half of its blocks are frozen, and the first one reads the input."""

    def model(self) -> nn.Module:
        model = Stack(Block, 4 * WIDTH)
        model.blocks[:4].requires_grad_(False)
        return model


class Stack(nn.Module):
    def __init__(self, kind: type[Block], hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(WIDTH, hidden) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(Odd):
    """Has a parameter without dimensions, which FSDP cannot shard."""

    def model(self) -> nn.Module:
        return ScaledBlock(WIDTH, 8)


class ScaledBlock(Block):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Unused(Odd):
    """Has a layer that the loss does not use."""

    def model(self) -> nn.Module:
        return UnusedBlock(WIDTH, 8)


class UnusedBlock(Block):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.pooler = nn.Linear(width, 8)
