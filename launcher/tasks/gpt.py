"""A small byte-level GPT on a text that every machine has: the documentation in Python's `pydoc_data`."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from launcher.tasks.windows import check_counts
from launcher.train.loss import chunked_cross_entropy
from launcher.train.outer_units import embedding_and_head
from launcher.train.pipeline_parts import Pipeline, in_turn
from launcher.train.task import ParallelPlan, Split, Task
from launcher.train.tensor_parallel import VocabularyParallel

BYTES = 256
HELD_OUT = 0.1


class PydocGPT(Task):
    """Learns to predict the next byte of Python's documentation.

    `dim` must be a multiple of `heads`. A sample is `context` + 1 bytes.
    """

    uses_loss_chunks: ClassVar[bool] = True
    counts: ClassVar[Literal["samples", "tokens"]] = "tokens"

    def __init__(
        self, layers: int = 4, dim: int = 128, heads: int = 4, context: int = 128, dropout: float = 0.0
    ) -> None:
        check_counts(layers=layers, dim=dim, heads=heads, context=context)
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        self.layers, self.dim, self.heads, self.context, self.dropout = layers, dim, heads, context, dropout

    def model(self) -> nn.Module:
        return GPT(self.layers, self.dim, self.heads, self.context, self.dropout)

    def data(self, split: Split) -> Sequence[torch.Tensor]:
        """Return windows without overlap. The last tenth of the text is held out."""
        text = documentation()
        border = round(len(text) * (1 - HELD_OUT))
        part = text[:border] if split == "train" else text[border:]
        numbers = torch.tensor(list(part))
        return [numbers[i : i + self.context + 1] for i in range(0, len(part) - self.context, self.context)]

    def outer_units(self, model: nn.Module) -> Iterable[nn.Module]:
        return embedding_and_head(model, self.blocks(model))

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Return how ranks share the layers. The rows of `qkv` are not in the order of the heads, so its
        result is gathered, and each rank mixes all heads."""
        gathered = Replicate()
        return {
            "tokens": VocabularyParallel(),
            "blocks.*.qkv": ColwiseParallel(output_layouts=gathered),
            "blocks.*.out": RowwiseParallel(input_layouts=gathered),
            "blocks.*.mlp.0": ColwiseParallel(),
            "blocks.*.mlp.2": RowwiseParallel(),
            "head": VocabularyParallel(),
        }

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = model(batch[:, :-1], batch[:, 1:], self.loss_chunks)
        return total, weight

    def pipeline(self, model: nn.Module) -> Pipeline:
        gpt: Any = model
        return Pipeline(
            begin=lambda batch: gpt.embedded(batch[:, :-1]),
            middle=in_turn(lambda: gpt.blocks),
            end=lambda x, batch: gpt.loss(x, batch[:, 1:], self.loss_chunks),
            before=[gpt.tokens, gpt.positions],
            blocks=list(gpt.blocks),
            after=[gpt.norm, gpt.head],
        )


def documentation() -> bytes:
    """Return about 0.4 MB of English and code.

    Topics repeat paragraphs. Each paragraph is kept once, so that training data do not repeat held-out data.
    """
    topics = pydoc_data.topics.topics
    paragraphs = (paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


class GPT(nn.Module):
    """Pre-norm transformer with learned positions."""

    def __init__(self, layers: int, dim: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, BYTES, bias=False)
        self.apply(_initialise)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, loss_chunks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sum and weight of the loss of bytes (batch, length), given the next bytes as `targets`.

        The loss is computed here because FSDP gathers the head's weight only during this call.
        """
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets, loss_chunks)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)  # type: ignore[no-any-return]

    def loss(self, x: torch.Tensor, targets: torch.Tensor, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_cross_entropy(self.norm(x), self.head, targets, chunks)


class Block(nn.Module):
    """A pre-norm transformer block. `causal`: a position attends only to those before it."""

    def __init__(
        self, dim: int, heads: int, dropout: float = 0.0, *, bias: bool = False, causal: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self._attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))  # type: ignore[no-any-return]

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
