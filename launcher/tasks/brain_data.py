"""Data of the brain autoencoder: recordings in a folder, or digits as a substitute.

A sample is video (frames, 3, height, width), audio (mels, steps), text (words) and fMRI (voxels), in fp32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from launcher.tasks.digits import digits
from launcher.train.task import Split, TaskError

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class DigitsAsFilm:
    """Films of handwritten digits with synthetic fMRI, for use without recordings.

    The film is a digit that moves to the right by one pixel of the original per frame. The sound is the digit
    read as a spectrogram. The words are a fixed random vector for each of the ten digits. A voxel is the tanh
    of a fixed random projection of the picture, which can be learned but says nothing about brains.
    """

    def __init__(
        self, split: Split, video: tuple[int, int, int], audio: tuple[int, int], words: int, voxels: int
    ) -> None:
        self.pictures, self.labels = digits(split)
        self.frames, *self.size = video
        self.audio = audio
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randn((10, words), generator=generator)
        self.projection = torch.randn((voxels, 64), generator=generator) / 4

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Sample:
        picture = self.pictures[index]
        moving = torch.stack([picture.roll(frame, dims=1) for frame in range(self.frames)])
        video = _scaled(moving, *self.size)[:, None].expand(-1, 3, -1, -1)
        audio = _scaled(picture[None], *self.audio)[0]
        fmri = torch.tanh(self.projection @ picture.flatten())
        return video, audio, self.words[self.labels[index]], fmri


class Recordings:
    """Recordings in memory-mapped files. Row n of each file is the same moment. The last part is held out.

    The files are `video.npy` (n, frames, height, width, 3) in uint8, `audio.npy` (n, mels, steps), `text.npy`
    (n, words) and `fmri.npy` (n, voxels). Raises TaskError if a file is missing or has another shape.
    """

    def __init__(
        self,
        folder: str,
        split: Split,
        held_out: float,
        video: tuple[int, int, int],
        audio: tuple[int, int],
        words: int,
        voxels: int,
    ) -> None:
        wanted = {"video": (*video, 3), "audio": audio, "text": (words,), "fmri": (voxels,)}
        self.arrays = {name: _open(Path(folder) / f"{name}.npy", shape) for name, shape in wanted.items()}
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            raise TaskError(f"{folder}: the files differ in length: {lengths}")
        border = round(lengths["fmri"] * (1 - held_out))
        self.rows = range(border) if split == "train" else range(border, lengths["fmri"])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        video, audio, text, fmri = (
            torch.from_numpy(self.arrays[name][row].astype(np.float32))
            for name in ("video", "audio", "text", "fmri")
        )
        return video.movedim(-1, 1) / 255, audio, text, fmri


def _open(path: Path, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if not path.is_file():
        raise TaskError(f"data: {path} is missing; the folder must have video, audio, text and fmri .npy")
    array = np.load(path, mmap_mode="r")
    if array.shape[1:] != shape:
        raise TaskError(f"{path}: samples have shape {array.shape[1:]}, but the model needs {shape}")
    return array  # type: ignore[no-any-return]


def _scaled(pictures: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Scale pictures (n, 8, 8) to (n, height, width)."""
    return functional.interpolate(pictures[:, None], size=(height, width), mode="bilinear")[:, 0]
