"""Check that a checkpoint belongs to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from launcher.spec.listed_names import listed
from launcher.train.optimizers.state import IN_CHECKPOINT

MODEL = "model."
"Beginning of the names of parameters and buffers in a checkpoint."


def model_difference(
    model: Mapping[str, Any],
    saved: Metadata,
    *,
    whole: bool,
    reshaped: Mapping[str, Sequence[int]],
) -> str | None:
    """Return how the model differs from a checkpoint's model, or None.

    `model` is its state by name; `whole` is False if that is the state of one pipeline stage. A buffer that
    only the checkpoint has does not count: training may have registered it. Of what get_extra_state() of a
    module returns, only a tensor is compared: DCP stores the values in a dictionary one by one. `reshaped`:
    the first shapes of buffers and extra states that training has given another one.
    """
    model = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    entries = saved.state_dict_metadata
    in_checkpoint = {
        name.removeprefix(MODEL): entry for name, entry in entries.items() if name.startswith(MODEL)
    }
    if new := [name for name in model if name not in in_checkpoint]:
        return f"the model has {listed(new)}, which the checkpoint lacks"
    for name, tensor in model.items():
        entry = in_checkpoint[name]
        if isinstance(entry, TensorStorageMetadata) and [*tensor.shape] not in (
            [*entry.size],
            reshaped.get(name),
        ):
            shape, saved_shape = (*tensor.shape,), (*entry.size,)
            return f"{name} has the shape {shape} in the model, and {saved_shape} in the checkpoint"
    trained = with_states(saved)
    gone = [name for name in in_checkpoint if name in trained and name not in model]
    return f"the checkpoint has {listed(gone)}, which the model lacks" if whole and gone else None


def with_states(saved: Metadata) -> set[str]:
    """Return the names of the parameters that have states in a checkpoint. Others never had a gradient."""
    names = (name for name in saved.state_dict_metadata if name.startswith(IN_CHECKPOINT))
    return {name.removeprefix(IN_CHECKPOINT).rpartition(".")[0] for name in names}
