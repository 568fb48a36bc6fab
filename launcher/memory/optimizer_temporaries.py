"""Temporaries of the optimizer's update, which handles one parameter at a time."""

from __future__ import annotations

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, Shard, shard_of, updated_by
from launcher.spec.optimizer_table import OPTIMIZERS
from launcher.spec.recipe import Recipe

HASHED_BYTES = 2**24
"Maximum bytes that launcher.train.undo.fingerprint hashes at a time, as 64-bit copies of 32-bit words."


def update_temporaries(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> tuple[int, str]:
    """Return the peak bytes of temporaries on rank 0's device, and the parameter that needs them.

    An optimizer on the host has its temporaries there; on the GPU, it hashes the parameters to see which ones
    have changed since its last update. With `zero1`, gathering follows the update of all parameters.
    """
    updated = [p for p, _ in model.distinct if p.updated]
    sizes = [(gather_buffer(p, recipe, ranks), p.name) for p in updated]
    if recipe.offload == "none":
        sizes += [(temporaries_of(recipe, p, updated_by(p, recipe, ranks)), p.name) for p in updated]
    elif recipe.offload != "cpu" and ranks.on_gpu:
        held = ((updated_by(p, recipe, ranks).numel * p.itemsize, p.name) for p in updated)
        sizes += [(2 * min(size, HASHED_BYTES), name) for size, name in held]
    return max(sizes, default=(0, ""))


def temporaries_of(recipe: Recipe, p: Parameter, shard: Shard) -> int:
    """Return the peak bytes of temporaries while this shard is updated on the device."""
    optimizer = OPTIMIZERS[recipe.optimizer]
    if optimizer.temporaries is None:
        return 0
    return shard.numel * optimizer.temporaries(p.itemsize) + shard.rows * optimizer.row_temporaries


def gather_buffer(p: Parameter, recipe: Recipe, ranks: Ranks) -> int:
    """Return the bytes of the buffer in which `zero1` gathers a parameter, 0 if ranks have equally many rows.

    launcher.train.optimizers.sharded_states.ShardedStates gathers other parameters in place.
    """
    shards = ranks.state_shards(recipe)
    if recipe.sharding != "zero1" or not p.shape or not p.splits or p.shape[0] % shards == 0:
        return 0
    return shards * shard_of(p, shards, 0).padded * p.itemsize
