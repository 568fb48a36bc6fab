"""Clips and their texts. A sample is frames (max_frames, 3, side, side) in uint8, and a string."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from launcher.tasks.digits import digits
from launcher.train.task import Split, TaskError

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHOWN, EACH = 3, 4
"Number of digits in a clip, and number of frames that show each digit."


def evenly(frames: int, wanted: int) -> torch.Tensor:
    """Return `wanted` frame numbers spread evenly over a clip; frames of a short clip are repeated."""
    return torch.arange(wanted) * frames // wanted


class MovingDigits:
    """Clips of three handwritten digits, one after the other; the text is their names."""

    def __init__(self, split: Split, max_frames: int, side: int) -> None:
        self.pictures, self.labels = digits(split)
        self.numbers, self.side = evenly(SHOWN * EACH, max_frames), side
        # Shuffle: in the set 1 often follows 0, so the text could be guessed without the pictures.
        count = len(self.labels)
        self.shown = torch.randint(count, (count, SHOWN), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        shown = self.shown[index]
        frames = self.pictures[shown].repeat_interleave(EACH, dim=0)[self.numbers]
        return _square((frames * 255)[:, None].expand(-1, 3, -1, -1), self.side), self._text(shown)

    def texts(self) -> Iterator[str]:
        """Yield the text of each clip."""
        return (self._text(shown) for shown in self.shown)

    def _text(self, shown: torch.Tensor) -> str:
        return " ".join(NAMES[int(label)] for label in self.labels[shown])


class Clips:
    """Clips listed in `index`, a JSONL file of `{"frames": "clip.npy", "text": "..."}`.

    Paths are relative to the index. A clip is (frames, height, width, 3) in uint8; only the frames in use are
    read. The last part of the index is held out. Raises TaskError.
    """

    def __init__(self, index: str, split: Split, held_out: float, max_frames: int, side: int) -> None:
        path = Path(index)
        if not path.is_file():
            raise TaskError(f"data: {index} is not a file; it must be a JSONL index of clips")
        self.folder, self.max_frames, self.side = path.parent, max_frames, side
        clips = [
            _clip(line, f"{path}:{number}")
            for number, line in enumerate(path.read_text().splitlines(), start=1)
            if line.strip()
        ]
        border = round(len(clips) * (1 - held_out))
        self.clips = clips[:border] if split == "train" else clips[border:]

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        name, text = self.clips[index]
        clip: Any = np.load(self.folder / name, mmap_mode="r")
        if clip.ndim != 4 or clip.shape[3] != 3 or len(clip) == 0:
            raise TaskError(f"{name}: a clip must be (frames, height, width, 3), not {clip.shape}")
        frames = torch.from_numpy(clip[evenly(len(clip), self.max_frames).numpy()])
        return _square(frames.movedim(-1, 1).float(), self.side), text

    def texts(self) -> Iterator[str]:
        """Yield the text of each clip."""
        return (text for _, text in self.clips)


def _clip(line: str, where: str) -> tuple[str, str]:
    try:
        clip = json.loads(line)
        return str(clip["frames"]), str(clip["text"])
    except (json.JSONDecodeError, KeyError, TypeError):
        raise TaskError(f'{where}: must be {{"frames": "clip.npy", "text": "..."}}') from None


def _square(pictures: torch.Tensor, side: int) -> torch.Tensor:
    """Scale pictures to side x side, as uint8 from 0 to 255: a quarter of the bytes of fp32 to copy."""
    drawn = functional.interpolate(pictures, size=(side, side), mode="bilinear")
    return drawn.round().clamp(0, 255).to(torch.uint8)
