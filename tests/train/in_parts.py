"""A ragged task whose model can be cut over tensor-parallel ranks and into stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from launcher.train import Pipeline
from launcher.train.pipeline_parts import in_turn
from launcher.train.task import ParallelPlan
from launcher.train.tensor_parallel import VocabularyParallel
from ragged import IGNORED, VOCABULARY, Ragged


class InParts(Ragged):
    def __init__(self, layers: int = 3, **others: Any) -> None:
        super().__init__(**others)
        self.layers = layers

    def model(self) -> nn.Module:
        return Stack(self.dim, self.dropout, self.layers)

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        return {
            "embedding": VocabularyParallel(),
            "layers.*.up": ColwiseParallel(),
            "layers.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

    def pipeline(self, model: nn.Module) -> Pipeline:
        stack: Any = model

        def end(x: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            self.count(model)
            return summed(stack.head(x), batch["targets"])

        return Pipeline(
            begin=lambda batch: stack.embedding(batch["inputs"]),
            middle=in_turn(lambda: stack.layers),
            end=end,
            before=[stack.embedding],
            blocks=list(stack.layers),
            after=[stack.head],
        )


def summed(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total, (targets != IGNORED).sum()


class Stack(nn.Module):
    def __init__(self, dim: int, dropout: float, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Layer(dim, dropout) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))
