"""A task whose batches differ in how many tensors they have: a list, and a key that may be missing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from launcher.train import Task
from ragged import VOCABULARY, Residual


class Varying(Task):
    def model(self) -> nn.Module:
        return Residual(16, 0.0)

    def data(self, split: str) -> list[list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        lengths = [(*(2 + 3 * part + n % 5 for part in range(n % 3)), 4) for n in range(48)]
        return [
            [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in sample]
            for sample in lengths
        ]

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        hints = [first for first, *_ in samples if len(first) == 5]
        parts = [part for sample in samples for part in sample]
        return {**({"hint": torch.stack(hints)} if hints else {}), "parts": parts}

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
        tokens = torch.cat([*batch["parts"], batch.get("hint", torch.zeros(0, dtype=torch.int64)).flatten()])
        return functional.cross_entropy(model(tokens), tokens, reduction="sum"), len(tokens)
