"""Read the shapes of a task's model, built on the meta device: no weights, no data, no GPU."""

from __future__ import annotations

import torch

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.adapters.nf4 import NF4Linear
from launcher.train.local_shards import local
from launcher.train.mesh import meshes
from launcher.train.model import keep_own_part, new_model
from launcher.train.optimizers.build import embeddings
from launcher.train.optimizers.sharded_states import can_split
from launcher.train.outer_units import check_outer_units
from launcher.train.rank import Rank
from launcher.train.sharding.sharding import check_shardable, shared_with_root
from launcher.train.task import Task, blocks_of, outer_units_of, outermost


@torch.no_grad()
def read_shapes(task: Task, recipe: Recipe, rank: Rank | None = None) -> ModelShapes:
    """Return the shapes of the model as `recipe.precision` stores it.

    With `rank`, they are those of the rank's part, before sharding. Raises SetupError for parameters that
    FSDP cannot shard, and for a task that does not say how its model is split. Exceptions of the task's
    model() propagate, such as one that needs a value on the meta device.
    """
    model = new_model(task, recipe, on_meta=True)
    units, blocks = outer_units_of(task, model), blocks_of(task, model)
    names = {module: name for name, module in model.named_modules()}
    if recipe.sharding in SHARDED:
        check_shardable(model)
        shared_with_root(model, blocks)
        check_outer_units(model, blocks, units)
    if rank is not None:
        keep_own_part(model, task, rank, meshes(rank))
    wide = set(embeddings(model))
    packed = {m.packed: m.in_features * m.out_features for m in model.modules() if isinstance(m, NF4Linear)}
    return ModelShapes(
        parameters=tuple(
            Parameter(
                name=name,
                shape=tuple(local(parameter).shape),
                itemsize=parameter.itemsize,
                requires_grad=parameter.requires_grad,
                embedding=parameter in wide,
                packs=packed.get(parameter),
                splits=can_split(local(parameter.detach())),
                whole=parameter.numel() if _split(parameter) else None,
            )
            for name, parameter in model.named_parameters()
        ),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        outer_units=tuple(name for name, module in model.named_modules() if module in units),
        blocks=tuple(names[block] for block in outermost(blocks) if block in names),
    )


def _split(parameter: torch.Tensor) -> bool:
    return local(parameter).shape != parameter.shape
