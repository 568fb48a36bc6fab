"""The mesh of ranks: which ranks differ in their data, in their part of a layer, and in their layers."""

from __future__ import annotations

from typing import Any, NamedTuple

from launcher.spec.recipe import REPLICATED, SHARDED, Recipe, RecipeChoice


class Mesh(NamedTuple):
    """Sizes of the mesh, or the coordinates of one rank in it.

    Rank numbers count the tensor-parallel ranks fastest and the stages slowest. Ranks with consecutive
    numbers share a node, so a tensor-parallel group does too.
    """

    pipeline: int
    data: int
    tensor: int

    def coordinates(self, rank: int) -> Mesh:
        rest, tensor = divmod(rank, self.tensor)
        return Mesh(*divmod(rest, self.data), tensor)


class Part(NamedTuple):
    """The part of the model that a rank has, before sharding."""

    tensor: int = 1
    "Ranks that share each layer; the part is that of the first one."
    pipeline: int = 1
    stages: tuple[int, ...] | None = None
    stage: int = 0
    "The rank of the pipeline, counted from 0."
    virtual_stages: int = 1

    @staticmethod
    def of(recipe: Recipe, stage: int = 0) -> Part:
        return Part(recipe.tensor, recipe.pipeline, recipe.stages, stage, recipe.virtual_stages)


WHOLE = Part()
UNSTAGED: dict[str, Any] = {"virtual_stages": 1, "schedule": "1f1b", "stages": None}
"Values of the pipeline's settings in a recipe without a pipeline."
UNCUT: dict[str, Any] = {"tensor": 1, "pipeline": 1, **UNSTAGED}
"Fields of a recipe in which each rank computes the whole model."


def stages_of(recipe: Recipe, rank: int) -> range:
    """Return the stages that a rank of the pipeline, counted from 0, has."""
    return range(rank, recipe.pipeline * recipe.virtual_stages, recipe.pipeline)


def model_parallel(recipe: Recipe | RecipeChoice) -> int:
    """Return the number of ranks that share one copy of the model, apart from its sharding."""
    return (recipe.tensor or 1) * (recipe.pipeline or 1)


def data_ranks(recipe: Recipe | RecipeChoice, ranks: int) -> int:
    """Return the number of ranks that train on different samples. At least 1."""
    return max(1, ranks // model_parallel(recipe))


def in_buckets(recipe: Recipe) -> bool:
    """Return whether gradients are in DDP's buckets. On a mesh, launcher.train.sharding.replicas averages
    them in place."""
    return recipe.sharding in REPLICATED and model_parallel(recipe) == 1


def grad_sync_applies(recipe: Recipe) -> bool:
    """Return whether `grad_sync` decides when gradients are reduced. Nothing reduces them with
    `sharding: none`, and replicas on a mesh always reduce them after the last micro-batch."""
    return recipe.sharding in SHARDED or in_buckets(recipe)


def mesh_of(recipe: Recipe, ranks: int) -> Mesh:
    return Mesh(recipe.pipeline, data_ranks(recipe, ranks), recipe.tensor)


def shards(recipe: Recipe, ranks: int, per_node: int) -> int:
    """Return the number of shards of each parameter. `hybrid` shards within a node."""
    if recipe.sharding not in SHARDED:
        return 1
    return per_node // recipe.tensor if recipe.sharding == "hybrid" else data_ranks(recipe, ranks)


def state_shards(recipe: Recipe, ranks: int, per_node: int) -> int:
    """Return the number of shards of the optimizer states of a parameter. `zero1` shards nothing else."""
    return data_ranks(recipe, ranks) if recipe.sharding == "zero1" else shards(recipe, ranks, per_node)
