"""A task whose batch has tensors of floats for the first layer, for each block, and for the loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from launcher.train import Pipeline, Task

WIDTH = 12


class Conditioned(Task):
    """`forces`: each block moves its input along the gradient of an energy: second derivatives.
    `in_place`: each block changes its input, and what its layers return, in place. `cut_at`: the number of
    the block that passes on no gradient."""

    def __init__(self, *, forces: bool = False, in_place: bool = False, cut_at: int | None = None) -> None:
        self.forces, self.in_place, self.cut_at = forces, in_place, cut_at

    def model(self) -> nn.Module:
        blocks = (Block(self.forces, self.in_place, cuts=number == self.cut_at) for number in range(4))
        return Model(blocks)

    def data(self, split: str) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(int(split == "train"))
        return [_sample(generator, kind % 3) for kind in range(64)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return _squared_error(model(batch["seen"], batch["about"]), batch)

    def pipeline(self, model: nn.Module) -> Pipeline:
        whole: Any = model
        return Pipeline(
            begin=lambda batch: whole.first(batch["seen"]),
            middle=lambda x, batch: whole.middle(x, batch["about"]),
            end=lambda x, batch: _squared_error(whole.last(x), batch),
            before=[whole.first],
            blocks=list(whole.blocks),
            after=[whole.last],
        )


class Unseeded(Conditioned):
    """Each rank has data of its own."""

    def data(self, split: str) -> list[dict[str, Any]]:
        generator = torch.Generator()
        generator.seed()
        return [_sample(generator, kind % 3) for kind in range(64)]


class Model(nn.Module):
    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, about: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.last(self.middle(self.first(x), about))  # type: ignore[no-any-return]

    def middle(self, x: torch.Tensor, about: dict[str, torch.Tensor]) -> torch.Tensor:
        for block in self.blocks:
            x = block(seen=x, **about)
        return x


class Block(nn.Module):
    def __init__(self, forces: bool, in_place: bool, *, cuts: bool) -> None:
        super().__init__()
        self.in_place, self.cuts = in_place, cuts
        energy = (nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))
        self.energy = nn.Sequential(*energy) if forces else None
        self.up, self.level = nn.Linear(WIDTH, WIDTH), nn.Linear(2, WIDTH)
        self.kind = nn.Embedding(3, WIDTH)

    def forward(self, *, seen: torch.Tensor, level: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        x = seen.detach() if self.cuts else seen
        if self.in_place:
            x += 0.1
            hidden = self.up(x[None])  # of three dimensions, a linear layer returns a view
            hidden += self.level(level) + self.kind(kind)
            return x + hidden.tanh_()[0]
        if self.energy is not None:
            with torch.enable_grad():
                x = x if x.requires_grad else x.requires_grad_()
                [force] = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)
            x = x + force
        return x + torch.tanh(self.up(input=x) + self.level(level) + self.kind(kind))


def _sample(generator: torch.Generator, kind: int) -> dict[str, Any]:
    seen = torch.randn(5, generator=generator)
    about = {"level": torch.rand(2, generator=generator), "kind": torch.tensor(kind)}
    return {"seen": seen, "about": about, "wanted": seen.sin()}


def _squared_error(found: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return (found.float() - batch["wanted"]).square().sum(), len(found)
