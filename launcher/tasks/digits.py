"""1797 handwritten digits of 8 x 8 pixels, which come with scikit-learn: the small tasks' real pictures."""

from __future__ import annotations

from functools import lru_cache

import torch

from launcher.train.task import Split, TaskError

HELD_OUT = 1 / 6
"The last pictures; scikit-learn keeps the order of the UCI set, in which neighbours share a writer."


@lru_cache(maxsize=2)
def digits(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, 8, 8) in fp32 from 0 to 1, and their labels (n,). Raises TaskError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise TaskError(
            "this task trains on scikit-learn's digits, which is not installed: pip install scikit-learn"
        ) from None
    found = load_digits()
    pictures = torch.tensor(found.images, dtype=torch.float32) / 16
    labels = torch.tensor(found.target, dtype=torch.int64)
    border = round(len(labels) * (1 - HELD_OUT))
    part = slice(border) if split == "train" else slice(border, None)
    return pictures[part], labels[part]
