"""What the arithmetic must not miss: uneven rows, frozen and tied weights, rows of whole 8-bit blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.train import Task

CLASSES = 21


class Odd(Task):
    """`frozen`: the first layer. `tied`: the head's weight is the embedding's."""

    def __init__(self, dim: int = 67, frozen: bool = False, tied: bool = False) -> None:
        self.dim, self.frozen, self.tied = dim, frozen, tied

    def model(self) -> nn.Module:
        return Network(self.dim, self.frozen, self.tied)

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randint(0, CLASSES, (64,), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (classes,) = batch
        return nn.functional.cross_entropy(model(classes), classes, reduction="sum"), len(classes)


class Padded(Task):
    """Samples of which only the first part counts, which code reads from their lengths and from masks."""

    def model(self) -> nn.Module:
        return Network(dim=64, frozen=False, tied=False)

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        classes = torch.randint(0, CLASSES, (64, 48), generator=generator)
        return torch.utils.data.TensorDataset(classes, torch.full((64,), 32))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        classes, lengths = batch
        longest = int(lengths.max())
        keep = torch.arange(longest, device=lengths.device) < torch.tensor([n - 8 for n in lengths])[:, None]
        classes = classes[:, :longest]
        kept = model(classes.flatten()).view(*classes.shape, -1)[keep]
        return nn.functional.cross_entropy(kept, classes[keep], reduction="sum"), int(keep.sum())


class Experts(Padded):
    """A mixture of experts in a loop: the router decides which experts compute a token, and how many tokens
    each of them gets."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(CLASSES, 64), *(Mixture(64, 8) for _ in range(6)), nn.Linear(64, CLASSES)
        )

    def blocks(self, model: nn.Module) -> Any:
        return [module for module in model.children() if isinstance(module, Mixture)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        classes, _ = batch
        scores = model(classes.flatten())
        return nn.functional.cross_entropy(scores, classes.flatten()) * len(classes), len(classes)


class Mixture(nn.Module):
    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        masks = nn.functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        out = x.clone()
        for number in masks.sum((1, 2)).greater(0).nonzero():
            place, rows = torch.where(masks[number].squeeze(0))
            out.index_add_(
                0, rows, (self.experts[number](x[rows]) * weights[rows, place, None]).to(out.dtype)
            )
        return out


class Watched(Padded):
    """Reads its loss and other figures that the model computes, and keeps one from step to step."""

    best = 0.0
    last: torch.Tensor

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        classes, lengths = batch
        keep = torch.arange(classes.shape[1], device=lengths.device) < lengths[:, None]
        scores = model(classes.flatten()).view(*classes.shape, -1)
        picked = torch.masked_select(scores.gather(-1, classes[..., None])[..., 0], keep)
        loss = nn.functional.mse_loss(picked, torch.ones_like(picked))
        if torch.isnan(loss) or not torch.isfinite(scores).all():
            raise ArithmeticError(f"loss {loss:.3f}")
        hits = (scores.argmax(-1) == classes)[keep].sum().item()
        self.best = max(self.best, hits / len(picked), loss.item())
        self.last = loss.detach()  # the memory of all elements: torch shrinks that tensor to a scalar
        return loss * len(classes), len(classes)


class Unused(Odd):
    """Trains a layer that the loss never uses. `unit`: FSDP shards it alone, so it is never gathered."""

    def __init__(self, unit: bool = False) -> None:
        super().__init__(dim=256)
        self.unit = unit

    def model(self) -> nn.Module:
        model = super().model()
        model.unused = nn.Linear(self.dim, 4 * self.dim)
        return model

    def blocks(self, model: nn.Module) -> Any:
        return [model.unused] if self.unit else []


class LaidOut(Odd):
    """Has a weight that is a view of a larger tensor: half of its rows, or `transposed` all of it."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__(dim=256)
        self.transposed = transposed

    def model(self) -> nn.Module:
        model = super().model()
        rows = torch.randn(256 if self.transposed else 512, 256) / 16
        model.wide.weight = nn.Parameter(rows.t() if self.transposed else rows[:256])
        return model


class Network(nn.Module):
    def __init__(self, dim: int, frozen: bool, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim)) for _ in range(2))
        self.wide = nn.Linear(dim, 256)
        self.narrow = nn.Linear(256, dim)  # rows of whole 8-bit blocks, in shards that are not
        self.head = nn.Linear(dim, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.layers[0].requires_grad_(False)

    def forward(self, classes: torch.Tensor) -> torch.Tensor:
        x = self.embedding(classes)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x + self.narrow(self.wide(x)))
