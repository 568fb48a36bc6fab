"""The brain autoencoder: pictures, sound and words of a film to fMRI voxels, with one giant linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional

from launcher.tasks.brain_data import DigitsAsFilm, Recordings
from launcher.train.initialise import fan_in, initialise_parameters
from launcher.train.pipeline_parts import Pipeline, in_turn
from launcher.train.task import ParallelPlan, Split, Task, TaskError
from launcher.train.tensor_parallel import cut_like, whole

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    frames: int
    "Pictures per fMRI volume."
    height: int
    width: int
    video_channels: tuple[int, ...]
    "Each stage halves height and width."
    mels: int
    steps: int
    "The sound is a spectrogram of mels x steps."
    audio_channels: tuple[int, ...]
    words: int
    "Length of the vector that describes the words, e.g. an embedding."
    text_width: int
    layers: tuple[int, ...]
    "Widths, from the output of the giant layer to the last hidden layer of the decoder."
    voxels: int

    @property
    def features(self) -> int:
        """Number of inputs of the giant layer."""
        stages = len(self.video_channels)
        pixels = (self.height >> stages) * (self.width >> stages)
        video = self.frames * self.video_channels[-1] * pixels
        return video + self.audio_channels[-1] * self.steps + self.text_width


# 8b: a field report gives 8.36 billion parameters, BatchNorm over 4096 channels, a bottleneck of 8000, and an
# allocation of 6.26 GiB by 8-bit AdamW, which is a byte per element of a matrix of 6.72 billion. The other
# sizes are chosen to match: 1,640,448 features x 4096, and a decoder of 1.6 billion.
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(4, 16, 16, (4, 8), 8, 8, (8, 8), 16, 16, (64, 32, 64), 100),
    "8b": Shape(
        26, 96, 160, (32, 64), 128, 256, (128, 128), 1024, 10_240, (4096, 8000, 17_088), 85_810
    ),
}  # fmt: skip


class BrainAutoencoder(Task):
    """Learns fMRI voxels from a film. The job must set `model: {batch_norm: true}`.

    `data`: a directory that launcher.tasks.brain_data.Recordings reads; without it, scikit-learn's digits are
    scaled to the shape's size. `parts`: number of parameters, with equally many rows each, that hold the
    giant matrix; the field report has 1. FSDP gathers a whole parameter: 13.4 GB in bf16 for the matrix of
    8b, and the same again for its gradient.
    """

    built_on_meta: ClassVar[bool] = True

    def __init__(
        self, shape: str = "tiny", parts: int = 1, data: str | None = None, held_out: float = 0.1
    ) -> None:
        if shape not in SHAPES:
            raise TaskError(f"shape: {shape!r} is not known; it is one of {', '.join(SHAPES)}")
        self.shape, self.parts, self.folder, self.held_out = SHAPES[shape], parts, data, held_out

    def model(self) -> nn.Module:
        return Autoencoder(self.shape, self.parts)

    def initialise(self, model: nn.Module, seed: int) -> None:
        initialise_parameters(model, seed, fan_in)

    def data(self, split: Split) -> Any:
        s = self.shape
        sizes = ((s.frames, s.height, s.width), (s.mels, s.steps), s.words, s.voxels)
        if self.folder is None:
            return DigitsAsFilm(split, *sizes)
        return Recordings(self.folder, split, self.held_out, *sizes)

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Return how ranks share the layers: each has some outputs of each matrix, and some voxels.

        Ranks exchange only inputs and outputs of the layers (megabytes), never a matrix. Each rank has the
        whole convolutions, and BatchNorm over all channels.
        """
        return {
            "layers.*.rows.*": ColwiseParallel(use_local_output=False),
            "voxels.0": ColwiseParallel(use_local_output=False),
        }

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the squared error, averaged over voxels and summed over samples, and the sample count."""
        video, audio, text, fmri = batch
        return squared_error(model(video, audio, text), fmri)

    def pipeline(self, model: nn.Module) -> Pipeline:
        autoencoder: Any = model
        return Pipeline(
            begin=lambda batch: autoencoder.features(*batch[:3]),
            middle=in_turn(lambda: [*autoencoder.layers, *autoencoder.voxels]),
            end=lambda x, batch: squared_error(x, batch[3]),
            before=[autoencoder.video, autoencoder.audio, autoencoder.text],
            blocks=[*autoencoder.layers, *autoencoder.voxels],
            after=[],
        )


def squared_error(predicted: torch.Tensor, fmri: torch.Tensor) -> tuple[torch.Tensor, int]:
    predicted = predicted.float()
    # With tensor parallelism each rank predicts some of the voxels.
    error = (predicted - cut_like(fmri.float(), predicted)).square()
    # A copy: FSDP warns if a stage returns the view that a DTensor's values are.
    return whole((error.sum(dim=1) / fmri.shape[1]).sum()).clone(), len(fmri)


class Autoencoder(nn.Module):
    """video (n, frames, 3, height, width), audio (n, mels, steps), text (n, words) -> (n, voxels)."""

    def __init__(self, shape: Shape, parts: int = 1) -> None:
        super().__init__()
        self.video = nn.ModuleList(
            Conv(nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False), outputs)
            for inputs, outputs in pairwise((3, *shape.video_channels))
        )
        self.audio = nn.ModuleList(
            Conv(nn.Conv1d(inputs, outputs, kernel_size=3, padding=1, bias=False), outputs)
            for inputs, outputs in pairwise((shape.mels, *shape.audio_channels))
        )
        self.text = Dense(shape.words, shape.text_width)
        # The first of these is the giant layer. Each one is a separate FSDP unit.
        giant, *rest = pairwise((shape.features, *shape.layers))
        self.layers = nn.ModuleList([Dense(*giant, parts), *(Dense(*pair) for pair in rest)])
        self.voxels = nn.ModuleList([nn.Linear(shape.layers[-1], shape.voxels)])

    def forward(self, video: torch.Tensor, audio: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.features(video, audio, text)
        for layer in (*self.layers, *self.voxels):
            x = layer(x)
        return x

    def features(self, video: torch.Tensor, audio: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the giant layer."""
        samples, frames = len(video), video.flatten(0, 1)
        for stage in self.video:
            frames = stage(frames)
        for stage in self.audio:
            audio = stage(audio)
        return torch.cat((frames.reshape(samples, -1), audio.flatten(1), self.text(text)), dim=1)


class Conv(nn.Module):
    def __init__(self, conv: nn.Module, channels: int) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if isinstance(conv, nn.Conv2d) else nn.BatchNorm1d
        self.conv, self.norm = conv, norm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.norm(self.conv(x)))


class Dense(nn.Module):
    """A linear layer with BatchNorm. Its matrix is divided into `parts` parameters of equally many rows."""

    def __init__(self, inputs: int, outputs: int, parts: int = 1) -> None:
        super().__init__()
        if outputs % parts:
            raise TaskError(f"parts: {outputs} rows cannot be divided into {parts} equal parts")
        self.rows = nn.ModuleList(nn.Linear(inputs, outputs // parts, bias=False) for _ in range(parts))
        self.norm = nn.BatchNorm1d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.norm(torch.cat([whole(rows(x)) for rows in self.rows], dim=1)))
