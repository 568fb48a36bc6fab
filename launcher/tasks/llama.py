"""Llama (arXiv 2302.13971, 2407.21783): RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from launcher.tasks.text import Text
from launcher.tasks.windows import Windows, check_counts
from launcher.train.initialise import initialise_parameters
from launcher.train.loss import chunked_cross_entropy
from launcher.train.outer_units import embedding_and_head
from launcher.train.pipeline_parts import Pipeline
from launcher.train.task import ParallelPlan, Split, Task, TaskError
from launcher.train.tensor_parallel import HeadsParallel, VocabularyParallel, whole

STD = 0.02
"Standard deviation of the initial weights, as in GPT-2 and Llama's `initializer_range`."


@dataclass(frozen=True)
class Shape:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    "Heads of keys and values; each is shared by heads / kv_heads query heads."
    hidden: int
    "Width of the feed-forward layer."
    vocabulary: int
    rope_base: float = 500_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    "The output layer uses the embedding's weight."


# 1b is from Llama 3.2, 7b from Llama 2, 70b and 405b from Llama 3.1, without its position scaling beyond a
# context of 8192. 13.14b: a field report gives only 13.14 billion parameters in layers 0 to 56. Llama 2's
# attention and vocabulary at width 4096 leave 158.8 million for the feed-forward part of each layer; the
# nearest width that is a multiple of 128 is 12928.
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(2, 64, 4, 2, 192, 256),
    "1b": Shape(16, 2048, 32, 8, 8192, 128_256, tied=True),
    "7b": Shape(32, 4096, 32, 32, 11008, 32_000, rope_base=10_000.0),
    "13.14b": Shape(57, 4096, 32, 32, 12928, 32_000, rope_base=10_000.0),
    "70b": Shape(80, 8192, 64, 8, 28672, 128_256),
    "405b": Shape(126, 16384, 128, 8, 53248, 128_256),
}


class LanguageModel(Task):
    """Trains a Llama on windows of a text. `shape` names one of SHAPES; `model` overrides fields of it.

    `data`, `field`, `tokenizer`, `dtype` and `held_out` are those of launcher.tasks.text.Text.
    """

    uses_loss_chunks: ClassVar[bool] = True
    counts: ClassVar[Literal["samples", "tokens"]] = "tokens"
    built_on_meta: ClassVar[bool] = True

    def __init__(
        self,
        shape: str = "tiny",
        model: Mapping[str, Any] | None = None,
        data: str | None = None,
        context: int = 512,
        tokenizer: str | None = None,
        field: str = "text",
        dtype: Literal["uint16", "uint32"] = "uint16",
        held_out: float = 0.1,
    ) -> None:
        check_counts(context=context)
        self.shape, self.context = shape_named(shape, SHAPES, model or {}), context
        self.text = Text(data, field, tokenizer, dtype, held_out)

    def model(self) -> nn.Module:
        return Llama(self.shape)

    def initialise(self, model: nn.Module, seed: int) -> None:
        initialise_parameters(model, seed, partial(llama_std, layers=self.shape.layers))

    def data(self, split: Split) -> Windows:
        return self.text.windows(split, self.context, self.shape.vocabulary)

    def outer_units(self, model: nn.Module) -> Iterable[nn.Module]:
        return embedding_and_head(model, self.blocks(model))

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        return parallel_plan(self.shape)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = model(batch[:, :-1], batch[:, 1:], self.loss_chunks)
        return total, weight

    def pipeline(self, model: nn.Module) -> Pipeline:
        llama: Any = model
        return Pipeline(
            begin=lambda batch: llama.tokens(batch[:, :-1]),
            middle=lambda x, _: llama.decoder(x),
            end=lambda x, batch: llama.loss(x, batch[:, 1:], self.loss_chunks),
            before=[llama.tokens],
            blocks=list(llama.decoder.blocks),
            after=[llama.decoder.norm, llama.tokens if llama.head is None else llama.head],
        )


def shape_named(name: str, shapes: Mapping[str, Shape], changes: Mapping[str, Any]) -> Shape:
    """Return the shape `name` with `changes` applied. Raises TaskError if it is unknown or invalid."""
    if name not in shapes:
        raise TaskError(f"shape: {name!r} is not known; it is one of {', '.join(shapes)}")
    try:
        shape = replace(shapes[name], **changes)
    except TypeError:
        known = ", ".join(Shape.__dataclass_fields__)
        raise TaskError(f"model: {', '.join(changes)}: the fields of a shape are {known}") from None
    counts = ("layers", "dim", "heads", "kv_heads", "hidden", "vocabulary")
    check_counts(**{f"model.{part}": getattr(shape, part) for part in counts})
    if shape.dim % (2 * shape.heads) or shape.heads % shape.kv_heads:
        raise TaskError(
            f"shape: dim {shape.dim} must be a multiple of 2 x heads {shape.heads}, and heads of "
            f"kv_heads {shape.kv_heads}"
        )
    return shape


def llama_std(name: str, _: torch.Tensor, layers: int) -> float:
    """Return STD; for matrices that add to the residual stream, STD / sqrt(2 x layers), as in GPT-2."""
    return STD / math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else STD


def parallel_plan(shape: Shape, prefix: str = "") -> ParallelPlan:
    """Return how ranks share a Llama whose modules' names begin with `prefix`.

    Between the layers that are cut, each rank has a part of the sequence (sequence parallelism, arXiv
    2205.05198), so norms and sums are not computed twice. Embedding and head are cut by the vocabulary.
    """
    sequence, same = Shard(1), Replicate()
    to_layers = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(same,))
    to_sequence = RowwiseParallel(output_layouts=sequence, use_local_output=False)
    plan: ParallelPlan = {
        "tokens": RowwiseParallel(input_layouts=same, output_layouts=sequence, use_local_output=False),
        "decoder": PrepareModuleInput(input_layouts=(same,), desired_input_layouts=(sequence,)),
        "decoder.norm": SequenceParallel(),
    }
    block: ParallelPlan = {
        "attention_norm": SequenceParallel(),
        "attention": to_layers,
        "attention.query": HeadsParallel(shape.heads),
        "attention.key": HeadsParallel(shape.kv_heads),
        "attention.value": HeadsParallel(shape.kv_heads),
        "attention.out": to_sequence,
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": to_layers,
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": to_sequence,
    }
    plan |= {f"decoder.blocks.*.{name}": style for name, style in block.items()}
    if not shape.tied:
        plan["head"] = VocabularyParallel()
    return {f"{prefix}{name}": style for name, style in plan.items()}


class Llama(nn.Module):
    """Token ids and next tokens, each (batch, length) -> sum of the losses and their number."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.dim)
        self.decoder = Decoder(shape)
        # With `tied` the embedding's weight is used twice; there is no second parameter.
        self.head = None if shape.tied else nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, loss_chunks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss(self.decoder(self.tokens(tokens)), targets, loss_chunks)

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, chunks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sum and weight of the loss. Call it in `forward`, where FSDP has gathered the weights."""
        head = self.tokens.weight if self.head is None else self.head
        return chunked_cross_entropy(whole(hidden), head, targets, chunks)


class Decoder(nn.Module):
    """The blocks and the last norm: (batch, length, dim) -> (batch, length, dim)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape.dim, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.groups, self.rope_base = shape.heads != shape.kv_heads, shape.rope_base
        self.head_dim = shape.dim // shape.heads
        kv = shape.kv_heads * self.head_dim
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, kv, bias=False)
        self.value = nn.Linear(shape.dim, kv, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Compute the table in each layer: a buffer could be cast to bf16 or lost on the meta device, and
        # FSDP's mixed precision would cast an argument. The table is small compared with x.
        cos, sin = rotary_table(x.shape[1], self.head_dim, self.rope_base, x.device)
        # With tensor parallelism each rank has some of the heads.
        q = rotated(self.query(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        k = rotated(self.key(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        v = self.value(x).unflatten(-1, (-1, self.head_dim))
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.groups,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def rotary_table(
    length: int, head_dim: int, base: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (length, 1, head_dim / 2) in fp32. Source: Su et al., arXiv 2104.09864."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None, None] * base**-exponents
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (batch, length, heads, head_dim): the first half of head_dim is paired with the second."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
