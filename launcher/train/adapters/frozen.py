"""The frozen weights under an adapter: recognise them by a fingerprint, and recreate them for an export."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import nn

from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.adapters.adapter import hidden, linear_layers
from launcher.train.adapters.nf4 import Packing
from launcher.train.local_shards import column_cuts, local, slices_of
from launcher.train.precision import cast, compute_type
from launcher.train.rank import Rank
from launcher.train.rng import seed_all
from launcher.train.seeds import derive_seed
from launcher.train.task import Task, load_task

MARK = "frozen_weights"
"Name of the fingerprint in the marker of a checkpoint."


@torch.no_grad()
def fingerprint(model: nn.Module, task: Task, rank: Rank | None = None) -> str | None:
    """Return a hash of `Task.weights_fingerprint` and of the first row of each frozen parameter outside
    linear layers, which may be stored in 4 bits: embeddings, norms.

    It is a sum to which each rank adds the rows or parts of rows that it holds, so it is the same under any
    sharding and precision and on any mesh. With `rank`, every rank must call this; without it, the model is
    whole. Return None if there is nothing to hash.
    """
    hashes = [
        _hash_of_part(f"{path}.{name}", parameter)
        for path, module in model.named_modules()
        if not isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(recurse=False)
        if not parameter.requires_grad and parameter.ndim and _contributes(parameter, rank)
    ]
    if (rank is None or rank.first) and (files := task.weights_fingerprint()) is not None:
        hashes.append(files)
    if rank is not None:
        hashes = [value for values in rank.all_values(hashes) for value in values]
    return f"{sum(hashes) % 2**64:016x}" if hashes else None


def _contributes(parameter: torch.Tensor, rank: Rank | None) -> bool:
    """Return whether this rank is the one that adds its part of the first row; replicas must not add it."""
    if rank is None:
        return True
    at = rank.coordinates
    return at.data == 0 and (at.tensor == 0 or bool(column_cuts(parameter)))


def _hash_of_part(name: str, parameter: torch.Tensor) -> int:
    """Return a multilinear hash of this rank's part of the first row in bf16: its bits times random factors,
    modulo 2^64."""
    rows, *columns = slices_of(parameter)
    held = (slice(None), *columns)
    part = local(parameter.detach())
    if rows.start > 0 or not part.numel():
        return 0
    bits = part[:1].to(torch.bfloat16).cpu().view(torch.int16).long()
    generator = torch.Generator().manual_seed(derive_seed("frozen", name))
    factors = torch.randint(2**62, (1, *parameter.shape[1:]), generator=generator)
    # Bits of 0 must count, too.
    return int(((bits + 2**16) * factors[held]).sum())


class FrozenWeights:
    """The weights under a job's adapter, on the CPU, with the values that the recipe stores. Weights in 4
    bits are decoded.

    If the task builds on the meta device, the linear layers of the blocks are made one at a time when they
    are read, so the whole model is never in memory.
    """

    def __init__(self, job: Job, recipe: Recipe, workdir: str) -> None:
        """Run the task's code. Raises TaskError."""
        assert job.task is not None and job.adapter is not None
        seed_all(derive_seed("model", job.train.seed))
        self._task = task = load_task(job.task, job.args, workdir)
        task.loss_chunks = recipe.loss_chunks
        self._seed, self._packed, dtype = job.train.seed, job.adapter.kind == "qlora", compute_type(recipe)
        with torch.device("meta") if task.built_on_meta else nullcontext():
            self._model = cast(task.model(), recipe)
        for parameter in self._model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(False)
        layers = {f"{name}.weight": layer for name, layer in linear_layers(task, self._model).items()}
        self._dtype, self._layers = dtype, layers
        if task.built_on_meta:
            with hidden(list(layers.values()), {"weight"}):
                self._model.to_empty(device="cpu")
                task.initialise(self._model, self._seed)
        self.fingerprint = fingerprint(self._model, task)
        self._others = {
            name: parameter
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if name not in layers
        }

    @property
    def shapes(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of each parameter by name. Tied parameters have each of their names."""
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: (parameter.shape, parameter.dtype) for name, parameter in named}

    @property
    def tied(self) -> list[list[str]]:
        """Lists of names that refer to the same parameter, one name of each module that has it."""
        names: dict[torch.Tensor, list[str]] = {}
        for path, module in self._model.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                names.setdefault(parameter, []).append(name)
        return [same for same in names.values() if len(same) > 1]

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter, which may be shared with the model."""
        if name not in self._layers:
            return self._others[name].detach()
        weight = self._weight(self._layers[name])
        if not self._packed:
            return weight
        packing = Packing((weight.shape[0], weight.shape[1]), self._dtype)
        return packing.unpack(packing.pack(weight))

    def _weight(self, layer: nn.Linear) -> torch.Tensor:
        if not layer.weight.is_meta:
            return layer.weight.detach()
        with hidden([layer]), hidden([module for module in self._model.modules() if module is not layer]):
            weight = torch.empty(layer.out_features, layer.in_features, dtype=self._dtype)
            layer.weight = nn.Parameter(weight, requires_grad=False)
            self._task.initialise(self._model, self._seed)
        return weight
