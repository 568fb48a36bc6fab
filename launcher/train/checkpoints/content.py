"""What an export writes: a checkpoint's weights, its adapter alone, or the model with the adapter merged."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from launcher.spec.adapter import Adapter
from launcher.spec.listed_names import listed
from launcher.train.adapters.adapter import peft_name
from launcher.train.adapters.frozen import MARK, FrozenWeights
from launcher.train.checkpoints.folder import CHANGED_BUFFERS, CheckpointError, read_marker, unreadable
from launcher.train.checkpoints.parts_per_node import PartsReader
from launcher.train.checkpoints.reader import CheckpointPlanner, CheckpointReader, read_metadata
from launcher.train.state_names import EXTRA

_PREFIX = "model."
_A, _B = ".lora_A.", ".lora_B."


@dataclass(frozen=True)
class Weight:
    name: str
    "Name in the exported file."
    shape: torch.Size
    dtype: torch.dtype
    "Type in the exported file."

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Stored:
    """Parameters and rank 0's persistent buffers, under the names of the user's model.

    Floating-point tensors are converted to `dtype`; None keeps their type.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        """Raises CheckpointError."""
        self.checkpoint = checkpoint
        self.weights = list(_stored(checkpoint, dtype))

    def read(self, weights: list[Weight]) -> dict[str, torch.Tensor]:
        """Return some of the weights by name. Raises CheckpointError.

        DCP assembles the shards, and converts types while it copies.
        """
        tensors = {weight.name: torch.empty(weight.shape, dtype=weight.dtype) for weight in weights}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            try:
                kind = PartsReader if "per_node" in read_marker(self.checkpoint) else CheckpointReader
                reader = kind(self.checkpoint)
                load({"model": tensors}, storage_reader=reader, planner=CheckpointPlanner(), no_dist=True)
            except CheckpointException as error:
                causes = "; ".join(str(cause) for cause, _ in error.failures.values())
                raise CheckpointError(unreadable(self.checkpoint, causes or error)) from error
        return tensors


class AdapterAlone:
    """The trained matrices of an adapter, under peft's names."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        """Raises CheckpointError."""
        stored = Stored(checkpoint, dtype)
        if changed := read_marker(checkpoint).get(CHANGED_BUFFERS):
            raise CheckpointError(
                f"the training changed buffers of the model, for which peft's format has no place: "
                f"{listed(changed)}; export the whole model with --merge"
            )
        self._stored = stored
        self._by_peft_name = {peft_name(w.name): w for w in stored.weights if _A in w.name or _B in w.name}
        self.weights = [replace(weight, name=name) for name, weight in self._by_peft_name.items()]

    def read(self, weights: list[Weight]) -> dict[str, torch.Tensor]:
        tensors = self._stored.read([self._by_peft_name[weight.name] for weight in weights])
        return {peft_name(name): tensor for name, tensor in tensors.items()}


class Merged:
    """The whole model: W + alpha / rank x B A in place of each weight W with an adapter, computed in fp32."""

    def __init__(self, checkpoint: Path, frozen: FrozenWeights, dtype: torch.dtype | None = None) -> None:
        """Raises CheckpointError if the adapter was trained over other weights, or does not fit into them."""
        marker = read_marker(checkpoint)
        if marker.get(MARK, frozen.fingerprint) != frozen.fingerprint:
            raise CheckpointError(
                "the adapter was trained over other weights than the task's model has now: their files have "
                "changed, or the weights are random and were drawn on another kind of device. Export the "
                "adapter without --merge, and merge it into the weights that it was trained over"
            )
        self._stored, self._frozen = Stored(checkpoint), frozen
        adapter = Adapter.model_validate(marker["adapter"])
        self._scaling = adapter.alpha / adapter.rank
        trained = {w.name: w for w in self._stored.weights}
        self._pairs = {
            name.partition(_A)[0] + ".weight": (weight, trained[name.replace(_A, _B)])
            for name, weight in trained.items()
            if _A in name
        }
        if lost := sorted(self._pairs.keys() - frozen.shapes.keys()):
            raise CheckpointError(
                f"an adapter cannot be added to {listed(lost)}: it is computed from other parameters, as by "
                "weight_norm or prune. Export the adapter without --merge"
            )
        whole = [Weight(name, shape, dtype or kept) for name, (shape, kept) in frozen.shapes.items()]
        self._buffers = {
            w.name: w for w in _stored(checkpoint, dtype) if _A not in w.name and _B not in w.name
        }
        self.weights = [*whole, *self._buffers.values()]
        self.untied = [names for names in frozen.tied if not self._pairs.keys().isdisjoint(names)]
        "Names of weights that are one parameter in the model, but differ with the adapter."

    def read(self, weights: list[Weight]) -> dict[str, torch.Tensor]:
        pairs = [pair for weight in weights for pair in self._pairs.get(weight.name, ())]
        buffers = [weight for weight in weights if weight.name in self._buffers]
        stored = self._stored.read(pairs + buffers)
        tensors = {}
        for weight in weights:
            if weight.name in self._buffers:
                tensors[weight.name] = stored[weight.name]
                continue
            value = self._frozen.read(weight.name)
            if weight.name in self._pairs:
                a, b = (stored[pair.name].float() for pair in self._pairs[weight.name])
                value = value.float() + self._scaling * (b @ a)
            tensors[weight.name] = value.to(weight.dtype).clone()
        return tensors


Content = Stored | AdapterAlone | Merged
"The content of the files: `weights` lists it, and `read` returns some of it."


def content_of(checkpoint: Path, dtype: torch.dtype | None, frozen: FrozenWeights | None) -> Content:
    """Return what an export of the checkpoint writes. Raises CheckpointError."""
    adapter = read_marker(checkpoint).get("adapter")
    if frozen is not None:
        return Merged(checkpoint, frozen, dtype)
    return Stored(checkpoint, dtype) if adapter is None else AdapterAlone(checkpoint, dtype)


def _stored(checkpoint: Path, dtype: torch.dtype | None) -> Iterator[Weight]:
    for key, entry in read_metadata(checkpoint).state_dict_metadata.items():
        in_extra_state = EXTRA in key.split(".")[:-1]  # DCP stores the values in a dictionary one by one
        if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata) and not in_extra_state:
            stored = entry.properties.dtype
            wanted = dtype if dtype is not None and stored.is_floating_point else stored
            yield Weight(key.removeprefix(_PREFIX), entry.size, wanted)
