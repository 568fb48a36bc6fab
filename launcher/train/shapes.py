"""The shapes of a task's model, built on the meta device: no weights, no data, no GPU."""

from __future__ import annotations

import torch

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.optimizers.table import embeddings
from launcher.train.precision import cast
from launcher.train.rank import SetupError
from launcher.train.sharding import shared_with_root
from launcher.train.task import Task


def read_shapes(task: Task, recipe: Recipe) -> ModelShapes:
    """As `recipe.precision` stores the model. Raises SetupError for blocks that FSDP cannot shard, and
    whatever the task's own model() raises, such as on the meta device where it asks for a value."""
    with torch.device("meta"):
        model = cast(task.model(), recipe)
    blocks = list(task.blocks(model))
    try:
        shared = shared_with_root(model, blocks)
    except SetupError:
        if recipe.sharding in SHARDED:
            raise
        shared = set()
    paths = {module: name for name, module in model.named_modules()}
    units: dict[torch.nn.Parameter, str] = {}
    for block in reversed(blocks):  # as _fsdp does: a unit takes what no unit below it has
        for parameter in block.parameters():
            if parameter not in shared:
                units.setdefault(parameter, paths[block])
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    wide = set(embeddings(model))
    return ModelShapes(
        parameters=tuple(
            Parameter(
                name=first,
                shape=tuple(parameter.shape),
                itemsize=parameter.itemsize,
                requires_grad=parameter.requires_grad,
                unit=units.get(parameter, ""),
                tied=bool(others),
                embedding=parameter in wide,
            )
            for parameter, (first, *others) in names.items()
        ),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
    )
