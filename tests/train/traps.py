"""Tasks with what trips up others: tied weights, unused parameters, BatchNorm, a loss in 16 bit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from launcher.tasks.llama import LanguageModel
from launcher.train import Task
from launcher.train.tensor_parallel import whole

VOCABULARY = 32


class Language(nn.Module):
    def __init__(self, dim: int, tied: str, unused: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.layers.append(nn.Linear(dim, VOCABULARY, bias=False))
        if tied == "head":
            self.layers[-1].weight = self.embedding.weight
        if tied.startswith("kept"):
            self.layers.pop(-1)
            self.layers.append(nn.Identity())
        if tied == "layers":
            self.layers[1].weight = self.layers[0].weight
        if tied == "turned":
            self.layers[0].weight = nn.Parameter(self.layers[0].weight.detach().t())
        if tied == "hooked":
            self.embedding.weight.register_hook(lambda gradient: gradient * 0.5)
        self.kept = {"kept": [self.embedding.weight], "kept data": [self.embedding.weight.data]}.get(tied, [])
        if unused:
            self.unused = nn.Linear(dim, dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers[:-1]:
            x = x + torch.tanh(layer(x))
        for weight in self.kept:
            return functional.linear(x, weight)
        return self.layers[-1](x)


class Trap(Task):
    """`bad`: micro-batches whose loss is not a number; `sign` of the weights; `stop_at`: the call of the loss
    of rank 0 in attempt 0 that asks to stop; `empty`: what the second micro-batch of rank 1, which has no
    target, returns."""

    def __init__(
        self,
        tied: str = "",
        unused: bool = False,
        half: bool = False,
        frozen: bool = False,
        bad: list[int] | None = None,
        sign: int = 1,
        stop_at: int = 0,
        empty: str = "",
        reduction: str = "sum",
    ) -> None:
        self.reduction = reduction
        self.tied, self.unused, self.half, self.frozen, self.sign = tied, unused, half, frozen, sign
        self.bad, self.calls, self.stop_at, self.empty = bad or [], 0, stop_at, empty

    def model(self) -> nn.Module:
        return Language(16, self.tied, self.unused).requires_grad_(not self.frozen)

    def data(self, split: str) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (64, 9), generator=torch.Generator().manual_seed(0))

    def count_call(self) -> None:
        self.calls += 1
        if self.calls == self.stop_at and os.environ["RANK"] == os.environ["LAUNCHER_ATTEMPT"] == "0":
            Path(os.environ["LAUNCHER_STOP_FILE"]).write_text("preempted")

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        logits = model(batch[:, :-1]).flatten(0, 1)
        if self.half:
            logits = logits.bfloat16()
        self.count_call()
        if self.empty and self.calls == 2 and os.environ["RANK"] == "1":
            return (logits.sum() * 0 if self.empty == "attached" else torch.zeros(())), 0
        total = functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction=self.reduction)
        if self.calls in self.bad:
            total = total * float("nan")
        return total, self.sign * batch[:, 1:].numel()


class Twice(nn.Module):
    """A layer of the first block is also outside of the blocks or in the second block, or the second block is
    the first one."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.again = self.blocks[0][0] if where == "outside" else nn.Identity()
        if where == "another block":
            self.blocks[1][0] = self.blocks[0][0]
        if where == "same block":
            self.blocks[1] = self.blocks[0]
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.again(x))


class Counting(Twice):
    """Counts its forward passes in what `get_extra_state` returns."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) * (1 + self.count / 10)


class Repeated(Trap):
    """A module in two places, or a model with an extra state."""

    def __init__(self, where: str, stop_at: int = 0) -> None:
        super().__init__(stop_at=stop_at)
        self.where = where

    def model(self) -> nn.Module:
        return Counting("") if self.where == "extra state" else Twice(self.where)

    def data(self, split: str) -> torch.Tensor:
        return torch.randn((64, 8), generator=torch.Generator().manual_seed(0))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        self.count_call()
        return (model(batch) - batch.sum(1, keepdim=True)).square().sum(), len(batch)


class Normed(Task):
    """BatchNorm in a block that is recomputed, or `alone` as one. The data are fp32 in any precision."""

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1)
        )

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        yield model[1][1] if self.alone else model[1]

    def data(self, split: str) -> Any:
        numbers = torch.randn((64, 9), generator=torch.Generator().manual_seed(0))
        return [(row[:8], row[8:]) for row in numbers]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        output = model(x)
        assert output.dtype == torch.float32
        return functional.mse_loss(output, y, reduction="sum"), len(x)


class Unfilled(Normed):
    """Built on the meta device. `initialise` forgets this tensor; if none, it replaces the first layer."""

    built_on_meta = True

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.forgets = forgets

    def initialise(self, model: nn.Module, seed: int) -> None:
        if not self.forgets:
            model[0] = nn.Linear(8, 8)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name != self.forgets:
                nn.init.ones_(tensor)


class Branches(nn.Module):
    """One of two branches for each micro-batch, as experts and modalities do, or both in an order."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.order: tuple[int, ...] = ()
        self.first = nn.Linear(8, 16)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(16, size), nn.Linear(size, 1)) for size in sizes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.order or (int(x[0, 0] > 0),)
        x = torch.relu(self.first(x))
        return sum(self.branches[one](x) for one in chosen)


class Branching(Task):
    """`by_itself`: FSDP adds up what a rank has, as before torch 2.13."""

    def __init__(self, sizes: tuple[int, int] = (16, 16), by_itself: bool = False) -> None:
        self.sizes, self.by_itself = sizes, by_itself

    def model(self) -> nn.Module:
        return Branches((self.sizes[0], self.sizes[1]))

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """FSDP gathers a block when it is called: on every rank, or it waits for ever."""
        yield model.first

    def data(self, split: str) -> Any:
        numbers = torch.randn((64, 9), generator=torch.Generator().manual_seed(0))
        return [(row[:8], row[8:]) for row in numbers]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        if self.by_itself:
            model.set_reduce_scatter_unused_params(False)
        x, y = batch
        return functional.mse_loss(model(x), y, reduction="sum"), len(x)


class Reordered(Branching):
    """Every rank uses both branches, each rank in its own order, from the first step or only to evaluate."""

    def __init__(self, when: str = "train") -> None:
        super().__init__()
        self.when = when

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        yield from model.branches

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        turned = os.environ["RANK"] == "1" and (self.when == "train") == model.training
        model.order = (1, 0) if turned else (0, 1)
        return super().loss(model, batch)


class CalledTwice(Branching):
    """Rank 1 calls the model twice in its first micro-batch."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == 1:
            model(batch[0])
        return super().loss(model, batch)


class Pairs(nn.Module):
    """Layers in a list of lists, or of dictionaries, which have no forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        pairs = [[nn.Linear(16, 16), nn.Linear(16, 16)] for _ in range(2)]
        self.layers = nn.ModuleList(
            nn.ModuleList(pair) if kind == "list" else nn.ModuleDict(zip("ab", pair, strict=True))
            for pair in pairs
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for pair in self.layers:
            for layer in pair.children():
                x = x + torch.tanh(layer(x))
        return self.last(x)


class Paired(Branching):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def model(self) -> nn.Module:
        return Pairs(self.kind)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        return Task.blocks(self, model)


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 16), nn.Linear(16, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(3))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        x = torch.sin(self.first(places))
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x).sum(-1)


class Differentiating(Task):
    """The loss has the gradient of the energy with respect to the input."""

    def model(self) -> nn.Module:
        return Forces()

    def data(self, split: str) -> torch.Tensor:
        return torch.randn((64, 3), generator=torch.Generator().manual_seed(0))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        places = batch.clone().requires_grad_()
        energy = model(places)
        [force] = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return (force + batch).square().sum() + energy.square().sum(), len(batch)


class Collects(nn.Module):
    """Adds a tuple to a list, and multiplies with what is in the last one of a longer list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(
        self, x: torch.Tensor, found: list[tuple[torch.Tensor]], sums: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        x = x * found.pop()[0] if len(found) > 1 else x
        x = x + torch.tanh(self.linear(x))
        found.append((x + self.linear(x),))
        sums["all"] = sums["all"] + x.square().mean(1)
        return x


class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.layers = nn.ModuleList(Collects() for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        found, sums = list[tuple[torch.Tensor]](), {"all": x.mean(1)}
        for layer in self.layers:
            x = layer(x, found, sums)
        return self.last(sum(one for (one,) in found)), sums["all"]


class Collecting(Normed):
    """Blocks that change the list and the dictionary that they are called with."""

    def model(self) -> nn.Module:
        return Collected()

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        yield from model.layers

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        output, penalty = model(x)
        return functional.mse_loss(output, y, reduction="sum") + penalty.sum(), len(x)


class Unfreezing(Normed):
    """Trains a layer only from the third step on, for which it was not made."""

    calls = 0

    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.calls += 1
        for name, parameter in model.named_parameters():
            if "1." not in name and "2." not in name:
                parameter.requires_grad_(self.calls > 2)
        return super().loss(model, batch)


class Growing(Normed):
    """Makes a layer in its first pass, or one whose shape torch finds out there (`lazy`)."""

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.lazy = lazy

    def model(self) -> nn.Module:
        model = super().model()
        if self.lazy:
            model[0] = nn.LazyLinear(8)
        return model

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        norm, (x, y) = model[1][1], batch
        if not hasattr(norm, "late"):
            norm.late = nn.Linear(8, 1)
        return functional.mse_loss(model(x) + norm.late(x), y, reduction="sum"), len(x)


class Centred(nn.Module):
    """Subtracts a running mean of its inputs, which is a parameter. `over_ranks`: from
    the samples of all ranks."""

    def __init__(self, *, over_ranks: bool) -> None:
        super().__init__()
        self.linear, self.over_ranks = nn.Linear(8, 1), over_ranks
        self.center = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        if self.over_ranks:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.center.lerp_(mean, 0.5)
        return self.linear(x - self.center)


class Centering(Normed):
    def __init__(self, *, over_ranks: bool) -> None:
        super().__init__()
        self.over_ranks = over_ranks

    def model(self) -> nn.Module:
        return Centred(over_ranks=self.over_ranks)

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        yield model.linear


class Shifted(Normed):
    """Adds the mean of its rank's samples to a frozen parameter, which FSDP shards. `left_out`: state_dict()
    of the model does not return it."""

    def __init__(self, left_out: bool = False) -> None:
        super().__init__()
        self.left_out = left_out

    def model(self) -> nn.Module:
        model = super().model()
        model.shift = nn.Parameter(torch.zeros(8), requires_grad=False)
        if self.left_out:
            model.register_state_dict_post_hook(leave_out_shift)
        return model

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        with torch.no_grad():
            model.shift.to_local().add_(batch[0].mean())
        return super().loss(model, batch)


def leave_out_shift(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    del state[f"{prefix}shift"]


class Unseeded(Normed):
    """A model that is not the same on each rank: its `feature` buffer, or its shapes with `wider`."""

    def __init__(self, wider: bool = False) -> None:
        self.wider = wider

    def model(self) -> nn.Module:
        model = super().model()
        if self.wider:
            model.append(nn.Linear(2, 2 + int(os.environ["RANK"])))
        features = torch.frombuffer(bytearray(os.urandom(4)), dtype=torch.uint8).float()
        model.register_buffer("features", features)
        return model


class Loading(Trap):
    def data(self, split: str) -> torch.Tensor:
        print(f"loading {split}", flush=True)
        return super().data(split)


class InPlace(Normed):
    """Has no blocks, and divides in place what its model returns, which is a view."""

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        yield from ()

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        output = model(x.unsqueeze(1))
        output /= 2
        return functional.mse_loss(output.squeeze(1), y, reduction="sum"), len(x)


class NotANumber(Normed):
    """The third micro-batch brings NaN into BatchNorm's statistics."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        if model.training:
            self.calls += 1
            batch = [part * float("nan") if self.calls == 3 else part for part in batch]
        return super().loss(model, batch)


class Counted(Trap):
    """Logs how many tokens it guesses, and their mean place."""

    metrics = ("accuracy", "place", "never")

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        targets = batch[:, 1:]
        guesses = model(batch[:, :-1]).argmax(-1)
        self.log("accuracy", (guesses == targets).sum(), targets.numel())
        self.log("place", float(targets.float().mean()))
        return super().loss(model, batch)


class CountsBlocks(LanguageModel):
    """Logs how many blocks a micro-batch goes through."""

    metrics = ("blocks",)

    def __init__(self) -> None:
        super().__init__(model={"layers": 3, "dim": 16, "hidden": 32}, context=8, held_out=0.001)

    def model(self) -> nn.Module:
        model = super().model()
        for block in self.blocks(model):
            next(block.children()).register_forward_hook(lambda *_: self.log("blocks", 1.0, 0.0))
        model.get_submodule("decoder.norm").register_forward_hook(lambda *_: self.log("blocks", 0.0, 1.0))
        return model


class Scheduled(Trap):
    """Logs the step that `loss` is called for, and weighs it with a schedule."""

    metrics = ("called_for",)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        self.log("called_for", self.current_step * len(batch), len(batch))
        loss, weight = super().loss(model, batch)
        return loss / self.current_step, weight


class Undeclared(Trap):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        self.log("accuracy", 1.0)
        return super().loss(model, batch)


class Penalizing(Trap):
    """A penalty on the whole weight, each micro-batch with its weight."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        loss, weight = super().loss(model, batch)
        return loss + weight * whole(model.get_parameter("layers.0.weight").square().sum()), weight


class Dropping(Normed):
    """Collates no batch at all where each sample is one that it drops."""

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        yield from ()

    def collate(self, samples: list[Any]) -> Any:
        kept = [(x, y) for x, y in samples if x[0] > 0]
        return super().collate(kept) if kept else None

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return (model(torch.zeros(1, 8)).sum() * 0, 0) if batch is None else super().loss(model, batch)


class Thawing(Normed):
    """Trains a layer only from the third step on."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        for name, parameter in model.named_parameters():
            if name.startswith("0."):
                parameter.requires_grad_(self.current_step > 2)
        return super().loss(model, batch)
