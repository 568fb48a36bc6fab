"""Read the shapes of a task's model, built on the meta device: no weights, no data, no GPU."""

from __future__ import annotations

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.model import new_model
from launcher.train.nf4 import NF4Linear
from launcher.train.optimizers.build import embeddings
from launcher.train.outer_units import check_outer_units
from launcher.train.sharding import check_shardable, shared_with_root
from launcher.train.task import Task


def read_shapes(task: Task, recipe: Recipe) -> ModelShapes:
    """Return the shapes of the model as `recipe.precision` stores it.

    Raises SetupError for parameters that FSDP cannot shard. Exceptions of the task's model() propagate, such
    as one that needs a value on the meta device.
    """
    model = new_model(task, recipe, on_meta=True)
    units = list(task.outer_units(model))
    if recipe.sharding in SHARDED:
        check_shardable(model)
        blocks = list(task.blocks(model))
        shared_with_root(model, blocks)
        check_outer_units(model, blocks, units)
    wide = set(embeddings(model))
    packed = {m.weight: m.in_features * m.out_features for m in model.modules() if isinstance(m, NF4Linear)}
    return ModelShapes(
        parameters=tuple(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                itemsize=parameter.itemsize,
                requires_grad=parameter.requires_grad,
                embedding=parameter in wide,
                packs=packed.get(parameter),
            )
            for name, parameter in model.named_parameters()
        ),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        outer_units=tuple(name for name, module in model.named_modules() if module in units),
    )
