"""The 1797 handwritten digits of 8 x 8 pixels in scikit-learn, which the small tasks use as pictures."""

from __future__ import annotations

from functools import lru_cache

import torch

from launcher.train.task import Split, TaskError

HELD_OUT = 1 / 6
"Share of the pictures, from the end. Neighbours share a writer: scikit-learn keeps the UCI set's order."


@lru_cache(maxsize=2)
def digits(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures (n, 8, 8) in fp32 from 0 to 1 and labels (n,). Raises TaskError if not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise TaskError(
            "this task trains on the digits of scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    dataset = load_digits()
    pictures = torch.tensor(dataset.images, dtype=torch.float32) / 16
    labels = torch.tensor(dataset.target, dtype=torch.int64)
    border = round(len(labels) * (1 - HELD_OUT))
    part = slice(border) if split == "train" else slice(border, None)
    return pictures[part], labels[part]
