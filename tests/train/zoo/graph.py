"""A graph network: messages are scattered with `index_add`, graphs differ in nodes and edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.train import Task
from zoo.tasks import SAMPLES, Residual

WIDTH = 16


class Graphs(Task):
    def model(self) -> nn.Module:
        return Network()

    def data(self, split: str) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(4)
        return [_graph(generator) for _ in range(SAMPLES)]

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        """One large graph of several that are not connected."""
        sizes = torch.tensor([len(one["nodes"]) for one in samples])
        shifts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])
        edges = [one["edges"] + shift for one, shift in zip(samples, shifts, strict=True)]
        return {
            "nodes": torch.cat([one["nodes"] for one in samples]),
            "edges": torch.cat(edges, 1),
            "graph": torch.repeat_interleave(torch.arange(len(samples)), sizes),
            "targets": torch.stack([one["target"] for one in samples]),
        }

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        count = len(batch["targets"])
        found = model(batch["nodes"], batch["edges"], batch["graph"], count)
        return (found - batch["targets"]).square().sum(), count


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Messages() for _ in range(2))

    def forward(
        self, nodes: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor, count: int
    ) -> torch.Tensor:
        x = self.first(nodes)
        for block in self.blocks:
            x = block(x, edges)
        return self.last(x.new_zeros(count, WIDTH).index_add(0, graph, x)).squeeze(1)


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), Residual(WIDTH)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sent = torch.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], 1)))
        return self.update(x + torch.zeros_like(x).index_add(0, edges[1], sent))


def _graph(generator: torch.Generator) -> dict[str, torch.Tensor]:
    size = int(torch.randint(2, 7, (1,), generator=generator))
    nodes = torch.randn(size, 3, generator=generator)
    edges = torch.randint(0, size, (2, 2 * size), generator=generator)
    return {"nodes": nodes, "edges": edges, "target": nodes.sum().tanh()}
