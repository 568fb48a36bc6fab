"""Whether a checkpoint is one of this model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from launcher.spec.listed import listed
from launcher.train.optimizers.state import IN_CHECKPOINT

MODEL = "model."
"Beginning of the names of parameters and buffers in a checkpoint."


def other_model(model: Mapping[str, Any], saved: Metadata, *, whole: bool) -> str | None:
    """Return how the model differs from that of a checkpoint, or None. `model`: its state by name; `whole`:
    not only that of a stage.

    A buffer that only the checkpoint has is no difference: training may have registered it.
    """
    entries = saved.state_dict_metadata
    known = {name.removeprefix(MODEL): one for name, one in entries.items() if name.startswith(MODEL)}
    if new := [name for name in model if name not in known]:
        return f"the model has {listed(new)}, which it lacks"
    for name, tensor in model.items():
        entry = known[name]
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            return f"{name} has the shape {(*tensor.shape,)} in the model, and {(*entry.size,)} in it"
    trained = with_states(saved)
    gone = [name for name in known if name in trained and name not in model]
    return f"it has {listed(gone)}, which the model lacks" if whole and gone else None


def with_states(saved: Metadata) -> set[str]:
    """Return the names of the parameters that have states in a checkpoint. Others never had a gradient."""
    names = (name for name in saved.state_dict_metadata if name.startswith(IN_CHECKPOINT))
    return {name.removeprefix(IN_CHECKPOINT).rpartition(".")[0] for name in names}
