"""Cross-entropy in chunks, so that the logits of a large vocabulary never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Head = Callable[[torch.Tensor], torch.Tensor]


def chunked_cross_entropy(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, chunks: int, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross-entropies and their number, without targets equal to `ignore_index`.

    `hidden` is (..., dim), `targets` (...), `head` a module or function (n, dim) -> (n, vocabulary).
    The tokens are divided into `chunks` parts, and the backward pass recomputes the logits of each part, so
    that only one part's logits exist at a time: about 12 bytes x tokens x vocabulary / chunks in fp32. With
    1 chunk all logits are computed once.

    Call this inside the model's `forward`, where FSDP has gathered the head's weight. A head that is an FSDP
    unit of its own also works, but is gathered again for every chunk.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()

    def part(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            head(hidden).float(), targets, reduction="sum", ignore_index=ignore_index
        )

    weight = (targets != ignore_index).sum()
    if chunks == 1:
        return part(hidden, targets), weight
    # Every rank makes exactly `chunks` parts, even empty ones: with FSDP a call of the head can be a
    # collective.
    parts = zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
    sums = [checkpoint(part, some, theirs, use_reentrant=False) for some, theirs in parts]
    return torch.stack(sums).sum(), weight
