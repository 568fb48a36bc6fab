"""Windows of a fixed length in memory-mapped token files: only the requested windows are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launcher.train.task import Split, TaskError

Tokens = np.ndarray[Any, np.dtype[Any]]


def check_counts(**values: Any) -> None:
    """Raise TaskError for an argument that is not a whole number of at least 1."""
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise TaskError(f"{name}: {value!r} is not a whole number of at least 1")


@dataclass(frozen=True)
class TokenFile:
    """A one-dimensional array of token ids, and the name to use in messages about it."""

    name: str
    tokens: Tokens


class Windows:
    """Windows of `context` + 1 tokens. Consecutive windows share one token; no window spans two files.

    `held_out` is the part of the windows, at the end, for evaluation. Raises TaskError if there is no window,
    and on access if a token is not below `vocabulary`.
    """

    def __init__(
        self, files: Sequence[TokenFile], context: int, vocabulary: int, held_out: float, split: Split
    ) -> None:
        check_counts(context=context)
        self.files, self.context, self.vocabulary = list(files), context, vocabulary
        self.ends = list(accumulate(max(0, len(file.tokens) - 1) // context for file in self.files))
        windows = self.ends[-1] if self.ends else 0
        if windows == 0:
            longest = max((len(file.tokens) for file in self.files), default=0)
            raise TaskError(
                f"data: a window is context + 1 = {context + 1} tokens, but the longest file has {longest}; "
                "use more data or a smaller context"
            )
        border = windows - round(windows * held_out)
        self.first, self.stop = (0, border) if split == "train" else (border, windows)

    def __len__(self) -> int:
        return self.stop - self.first

    def __getitem__(self, index: int) -> torch.Tensor:
        window = range(self.first, self.stop)[index]
        number = bisect_right(self.ends, window)
        start = (window - (self.ends[number - 1] if number else 0)) * self.context
        file = self.files[number]
        tokens = file.tokens[start : start + self.context + 1].astype(np.int64)
        if tokens.max() >= self.vocabulary or tokens.min() < 0:
            wrong = int(np.argmax((tokens >= self.vocabulary) | (tokens < 0)))
            raise TaskError(
                f"{file.name}: token {start + wrong} is {tokens[wrong]}, but the model's vocabulary has "
                f"{self.vocabulary} entries; check the tokenizer that made the file, and dtype"
            )
        return torch.from_numpy(tokens)


def open_tokens(path: Path, dtype: str) -> TokenFile:
    """Open a `.npy` file, or a `.bin` file that contains only ids of `dtype`. Raises TaskError."""
    if path.stat().st_size == 0:
        raise TaskError(f"{path} is empty")
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise TaskError(f"{path} is not a readable .npy file: {error}") from None
        if not isinstance(tokens, np.ndarray):
            raise TaskError(f"{path} is not a readable .npy file: it is an .npz archive; save one array")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TaskError(
                f"{path}: token ids must be one row of integers, not {tokens.dtype} of shape {tokens.shape}"
            )
        return TokenFile(str(path), tokens)
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise TaskError(f"{path} has {size} bytes, which is not a multiple of {width} ({dtype}); set dtype")
    return TokenFile(str(path), np.memmap(path, dtype=dtype, mode="r"))
