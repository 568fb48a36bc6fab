"""A video-language model: a Llama decoder reads a few tokens per frame, followed by text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from launcher.tasks import llama
from launcher.tasks.text import tokenizer_at
from launcher.tasks.video_data import Clips, MovingDigits
from launcher.tasks.vision import VisionEncoder, VisionShape
from launcher.tasks.windows import check_counts
from launcher.train.initialise import fan_in, initialise_parameters
from launcher.train.outer_units import embedding_and_head
from launcher.train.pipeline_parts import Pipeline
from launcher.train.task import ParallelPlan, Split, Task, TaskError
from launcher.train.tensor_parallel import whole

IGNORED = -100


@dataclass(frozen=True)
class Shape:
    vision: VisionShape
    language: llama.Shape


# 2b: a field report gives 2 billion parameters in the language model, about 4 GB in bf16, and max_frames 100.
# The vision encoder is ViT-S/14; 28 layers of width 2048 and Llama 3's vocabulary, tied, make 1.98 billion.
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(VisionShape(8, 2, 32, 2, 2, 2), llama.Shape(2, 64, 4, 2, 128, 256)),
    "2b": Shape(
        VisionShape(224, 14, 384, 12, 6, 4),
        llama.Shape(28, 2048, 16, 8, 7936, 128_256, tied=True),
    ),
}


class VideoLanguageModel(Task):
    """Learns to write the text that belongs to a clip.

    `max_frames` frames are taken evenly over each clip, whatever its length. The sequence is max_frames x
    tokens per frame, followed by the text, which is cut to `context` tokens. `data`: an index that
    launcher.tasks.video_data.Clips reads; without it, clips show scikit-learn's digits one after another.
    """

    uses_loss_chunks: ClassVar[bool] = True
    counts: ClassVar[Literal["samples", "tokens"]] = "tokens"
    built_on_meta: ClassVar[bool] = True

    def __init__(
        self,
        shape: str = "tiny",
        max_frames: int = 100,
        data: str | None = None,
        context: int = 128,
        tokenizer: str | None = None,
        held_out: float = 0.1,
    ) -> None:
        if shape not in SHAPES:
            raise TaskError(f"shape: {shape!r} is not known; it is one of {', '.join(SHAPES)}")
        check_counts(max_frames=max_frames, context=context)
        self.shape, self.max_frames, self.index = SHAPES[shape], max_frames, data
        self.context, self.tokenizer, self.held_out = context, tokenizer_at(tokenizer), held_out

    def model(self) -> nn.Module:
        return VideoLanguage(self.shape)

    def initialise(self, model: nn.Module, seed: int) -> None:
        initialise_parameters(model, seed, self._std)

    def data(self, split: Split) -> Any:
        side = self.shape.vision.side
        if self.index is None:
            return MovingDigits(split, self.max_frames, side)
        return Clips(self.index, split, self.held_out, self.max_frames, side)

    def example(self) -> tuple[torch.Tensor, str]:
        data = self.data("train")
        return data[0][0], max(data.texts(), key=lambda text: len(self._tokens(text)))

    def collate(self, samples: list[tuple[torch.Tensor, str]]) -> dict[str, torch.Tensor]:
        """Collate samples. Texts are padded at the end; padding has no target and no token attends to it."""
        texts = [self._tokens(text) for _, text in samples]
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        return {
            "frames": torch.stack([frames for frames, _ in samples]),
            "tokens": pad([text[:-1] for text in texts]),
            "targets": pad([text[1:] for text in texts], padding_value=IGNORED),
        }

    def outer_units(self, model: nn.Module) -> Iterable[nn.Module]:
        return embedding_and_head(model, self.blocks(model))

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Return how ranks share the language model. Each has the whole vision encoder, which is small."""
        return llama.parallel_plan(self.shape.language, "language.")

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = model(batch["frames"], batch["tokens"], batch["targets"], self.loss_chunks)
        return total, weight

    def pipeline(self, model: nn.Module) -> Pipeline:
        video_language: Any = model
        language = video_language.language
        return Pipeline(
            begin=lambda batch: video_language.embedded(batch["frames"], batch["tokens"]),
            middle=lambda x, _: language.decoder(x),
            end=lambda x, batch: video_language.loss(x, batch["targets"], self.loss_chunks),
            before=[video_language.vision, video_language.projector, language.tokens],
            blocks=list(language.decoder.blocks),
            after=[language.decoder.norm, language.tokens if language.head is None else language.head],
        )

    def _std(self, name: str, parameter: torch.Tensor) -> float:
        """Return Llama's deviation for the language model and positions, else `fan_in`.

        With 0.02 from pixels to the text's width, the tiny shape would not learn to use the pictures.
        """
        if name.startswith("language.") or name.endswith("positions"):
            return llama.llama_std(name, parameter, self.shape.language.layers)
        return fan_in(name, parameter)

    def _tokens(self, text: str) -> torch.Tensor:
        separator, vocabulary = self.tokenizer.separator, self.shape.language.vocabulary
        words = list(map(int, self.tokenizer.encode(text)))[: self.context - 2]
        tokens = [separator, *words, separator]
        if max(tokens) >= vocabulary:
            raise TaskError(f"token {max(tokens)} of {text[:40]!r} is not in a vocabulary of {vocabulary}")
        return torch.tensor(tokens)


class VideoLanguage(nn.Module):
    """Frames (n, frames, 3, side, side) in uint8, tokens and targets (n, length) -> sum of losses, weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vision = VisionEncoder(shape.vision)
        self.projector = nn.Sequential(
            nn.Linear(shape.vision.dim, shape.language.dim),
            nn.GELU(),
            nn.Linear(shape.language.dim, shape.language.dim),
        )
        self.language = llama.Llama(shape.language)

    def forward(
        self, frames: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor, loss_chunks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss(self.language.decoder(self.embedded(frames, tokens)), targets, loss_chunks)

    def embedded(self, frames: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the input of the decoder: the tokens of all frames, then those of the text."""
        pictures = frames.flatten(0, 1).to(self.vision.positions.dtype) / 255
        embedded = self.projector(self.vision(pictures)).unflatten(0, frames.shape[:2]).flatten(1, 2)
        words = whole(self.language.tokens(tokens))
        return torch.cat((embedded.to(words.dtype), words), dim=1)

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, chunks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        words = whole(hidden)[:, hidden.shape[1] - targets.shape[1] :]
        return self.language.loss(words, targets, chunks)
