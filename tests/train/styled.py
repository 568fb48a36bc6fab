"""A small language model whose layers test_styles.py cuts in unusual ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn.utils.parametrizations import weight_norm

from launcher.train.loss import chunked_cross_entropy
from launcher.train.task import ParallelPlan, Task
from launcher.train.tensor_parallel import ReplicatedInCutRegion, VocabularyParallel

DIM, VOCABULARY, GROUP = 64, 51, 8


class Region(nn.Module):
    """Values of groups of neighbours -> other ones. It is called with a keyword, and has modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(GROUP), nn.Sequential(nn.Linear(GROUP, GROUP), nn.Tanh())

    def forward(self, *, groups: torch.Tensor) -> torch.Tensor:
        return groups + self.mix(self.norm(groups))


class Block(nn.Module):
    def __init__(self, hidden: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)
        self.act = nn.PReLU() if how in ("distributed region", "whole region") else nn.GELU()
        if how == "in place":
            self.act = nn.ReLU(inplace=True)
        if how == "region":
            self.region = Region()
        if how == "normed":
            weight_norm(self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "keywords":
            return x + self.down(input=self.act(self.up(input=self.norm(x))))
        hidden = self.act(self.up(self.norm(x)))
        if self.how == "in place":
            down = self.down(hidden)
            down += x
            return down
        if self.how == "region":
            hidden = self.region(groups=hidden.unflatten(-1, (-1, GROUP))).flatten(-2)
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self, how: str, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(hidden, how) for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)
        if how == "two names":
            self.again = self.blocks[0]
        if "tied" in how:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return chunked_cross_entropy(x, self.head, tokens[:, 1:], chunks)


class Styled(Task):
    uses_loss_chunks = True

    def __init__(self, how: str = "", hidden: int = 128, length: int = 9) -> None:
        self.how, self.hidden, self.length = how, hidden, length

    def model(self) -> nn.Module:
        return Model(self.how, self.hidden)

    def blocks(self, model: nn.Module) -> Any:
        return [*model.blocks, model.head]  # an adapter is for the output layer, too

    def data(self, split: Any) -> Any:
        drawn = torch.Generator().manual_seed(0)
        first = torch.randint(VOCABULARY, (64, 1), generator=drawn)
        return list((first + torch.arange(self.length + 1)) % VOCABULARY)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return model(batch, self.loss_chunks)

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        vocabulary = {"tokens": VocabularyParallel(), "head": VocabularyParallel()}
        plan = {**vocabulary, "blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        plan |= PLANS.get(self.how, {})
        return {name: style for name, style in plan.items() if style is not None}


whole, last, sequence = Replicate(), Shard(-1), Shard(1)
PLANS: dict[str, dict[str, ParallelStyle | None]] = {
    "two names": {"again.up": ColwiseParallel(), "again.down": RowwiseParallel()},
    "region": {"blocks.*.region": ReplicatedInCutRegion()},
    "gathered": {"blocks.*.down": ColwiseParallel(input_layouts=last, output_layouts=whole)},
    "whole between": {
        "blocks.*.up": ColwiseParallel(output_layouts=whole),
        "blocks.*.down": RowwiseParallel(input_layouts=whole),
    },
    "distributed": {"blocks.*.up": ColwiseParallel(use_local_output=False)},
    "distributed region": {
        "blocks.*.up": ColwiseParallel(use_local_output=False),
        "blocks.*.act": ReplicatedInCutRegion(),
    },
    "odd sequence": {
        "blocks.*.norm": SequenceParallel(use_local_output=False),
        "blocks.*": PrepareModuleInputOutput(
            input_layouts=(whole,),
            desired_input_layouts=(sequence,),
            output_layouts=(sequence,),
            desired_output_layouts=(whole,),
        ),
        "blocks.*.up": ColwiseParallel(input_layouts=sequence, use_local_output=False),
        "blocks.*.down": RowwiseParallel(output_layouts=sequence, use_local_output=False),
    },
    "odd sequence between": {
        "tokens": ColwiseParallel(output_layouts=sequence, use_local_output=False),
        "blocks.*.norm": SequenceParallel(use_local_output=False),
        "blocks.*.up": ColwiseParallel(input_layouts=sequence, use_local_output=False),
        "blocks.*.down": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        "blocks.1": PrepareModuleOutput(output_layouts=(sequence,), desired_output_layouts=(whole,)),
    },
    # What follows is refused.
    "half tied": {"head": None},
    "whole region": {
        "blocks.*.up": ColwiseParallel(output_layouts=whole, use_local_output=False),
        "blocks.*.act": ReplicatedInCutRegion(),
    },
    "in a region": {"blocks.0": ReplicatedInCutRegion()},
    "not a layer": {"blocks.0.norm": ColwiseParallel()},
    "sequence": {
        "blocks.*.norm": SequenceParallel(),
        "blocks.*": PrepareModuleInputOutput(
            input_layouts=(whole,),
            desired_input_layouts=(sequence,),
            use_local_input=True,
            output_layouts=(sequence,),
            desired_output_layouts=(whole,),
        ),
        "blocks.*.up": ColwiseParallel(input_layouts=sequence),
        "blocks.*.down": RowwiseParallel(output_layouts=sequence),
    },
    "columns": {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.act": PrepareModuleInput(
            input_layouts=(last,),
            desired_input_layouts=(whole,),
            use_local_output=True,
        ),
        "blocks.*.down": None,
    },
}
